# SPDX-License-Identifier: Apache-2.0
"""Options for how experts are cut over ranks, and for how calls of slices compute.

This file must not depend on what commands do with a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch.distributed as dist

import moeos
from moeos.cli.shared import process_group
from moeos.partition.slicing import Slicing, slicing_of


@dataclasses.dataclass(frozen=True)
class SliceOptions:
    """Arguments of a layer of the same names."""

    parallel: str = "expert"
    tensor_ranks: int | None = None
    layout: str = "auto"
    reduce: str = "auto"

    def slicing(self, ranks: int) -> Slicing:
        """The slicing of a world of `ranks` ranks. Raises `ValueError` for what a layer would
        refuse.
        """
        return slicing_of(
            self.parallel, "replicated", ranks, self.tensor_ranks, self.layout, self.reduce
        )


def may_all_reduce(world: moeos.World, cfg: moeos.MoEConfig, slicing: Slicing) -> bool:
    """Whether some call of a layer leaves its partial sums to torch.distributed.

    Raises `ValueError` where they must be left and all ranks are of this process.
    """
    if not slicing.may_leave_partials(slicing.cut(cfg)):
        return False
    if world.control.shares_memory and slicing.policy.reduce == "after":
        raise ValueError(
            "--reduce is after, and torch.distributed, which would add up, has no ranks of one "
            "process: start a process for each rank, as torchrun does, or give --reduce fused"
        )
    return not world.control.shares_memory


@contextlib.contextmanager
def ranks_of_torch(world: moeos.World, *, wanted: bool) -> Iterator[dist.ProcessGroup | None]:
    """The process group of all ranks for as long as the block runs; None where it is not wanted,
    or there is one rank. Collective.
    """
    if not wanted:
        yield None
        return
    with process_group.over(world) as group:
        yield group
