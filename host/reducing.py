# SPDX-License-Identifier: Apache-2.0
"""Adds up the partial sums that a kernel leaves, by torch.distributed's all-reduce.

The other way is the kernel's own (runtime/sums.hpp). This file knows worlds, process groups and how
experts are cut, and nothing of kernels.
"""

from __future__ import annotations

import datetime
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moeos import sharding
from moeos.config import MoEConfig
from moeos.errors import PeerTimeout
from moeos.slicing import Slicing
from moeos.world import SharedMemory, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_groups: weakref.WeakKeyDictionary[SharedMemory, dict[int, ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""By workspace and number of slices: calls of a workspace come in one order, and so do its
all-reduces. Those of another may come between, in another order on every rank."""


class Reduction:
    """Of one layer on one rank: which calls leave their partial sums, and who adds these up.
    Collective to make, in the world's gate; `cfg` is a slice's.

    Raises `ValueError`, alike on all ranks, where torch.distributed has not the world's ranks and
    the caller wants its all-reduce.
    """

    def __init__(
        self, cfg: MoEConfig, world: World, shared: SharedMemory, slicing: Slicing
    ) -> None:
        self._cfg = cfg
        self._slicing = slicing
        self._deadline = world.deadline
        self._rank = world.rank
        self._known: dict[int, bool] = {}  # by rows: whether a call leaves its sums
        self._group: ProcessGroup | None = None
        if slicing.may_leave_partials(cfg):
            self._group = _group_of(world, shared, slicing)

    def leaves_partials(self, rows: int, *, counted: bool) -> bool:
        """Whether a call of so many rows does; `counted`: see `Slicing.leaves_partials`."""
        if self._group is None:
            return False
        if counted or rows not in self._known:
            found = self._slicing.leaves_partials(self._cfg, rows, counted=counted)
            if counted:
                return found
            self._known[rows] = found
        return self._known[rows]

    def add_up(self, out: torch.Tensor) -> None:
        """Writes the sums over the slices of this rank's experts. Collective among their ranks.

        Raises `PeerTimeout` where another rank does not come, or torch's groups are destroyed. On
        the GPU it only begins here, and a rank that does not come is for NCCL's own timeout.
        """
        assert self._group is not None  # as leaves_partials has said
        if out.numel() == 0:
            return
        try:
            dist.all_reduce(out, group=self._group)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise PeerTimeout(
                f"rank {self._rank}: the all-reduce of partial sums (reduce='after') ended without "
                f"a result within {self._deadline:g} s: a rank did not come, or its process group "
                f"is destroyed. torch.distributed says: {error}"
            ) from error


def _group_of(world: World, shared: SharedMemory, slicing: Slicing) -> ProcessGroup | None:
    """The ranks with slices of the same experts as this one; None where nobody knows them, and the
    costs may choose.
    """
    ranks = None
    if not world.control.shares_memory:
        ranks = sharding.ranks_of(world.group, (world.rank, world.size))
    if not all(world.control.allgather(ranks is not None, "who knows torch.distributed")):
        if slicing.policy.reduce == "auto":
            return None
        raise ValueError(
            "reduce is 'after', and torch.distributed, which would add up, has not the ranks of "
            "this world: call torch.distributed.init_process_group before moeos.init, or pass "
            "moeos.init(group=...); or pass reduce='fused'"
        )
    assert ranks is not None  # as all have said
    made = _groups.setdefault(shared, {})
    if slicing.slices not in made:
        first = slicing.holder(world.rank) * slicing.slices
        made[slicing.slices] = dist.new_group(
            list(ranks[first : first + slicing.slices]),
            timeout=datetime.timedelta(seconds=world.deadline),
            backend="nccl" if world.backend == "cuda" else "gloo",
            use_local_synchronization=True,
        )
    return made[slicing.slices]
