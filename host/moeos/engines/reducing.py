# SPDX-License-Identifier: Apache-2.0
"""Adds up the partial sums that a kernel leaves, by an all-reduce after it.

The other way is the kernel's own (runtime/rows/sums.hpp). Must not depend on kernels, nor on how an
all-reduce is made.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

from moeos.config.config import MoEConfig
from moeos.partition import sharding
from moeos.partition.slicing import Slicing
from moeos.world.all_reduce import AllReduce, OfDevices, OfHosts
from moeos.world.world import SharedMemory, World

_REMEDY = "All ranks may call reset() and go on"


class Reduction:
    """Decides which calls of a layer leave their partial sums on a rank, and adds these up.
    Collective to make, in the world's gate; `cfg` is a slice's.

    Raises `ValueError`, alike on all ranks, where torch.distributed does not have the world's ranks
    and the caller wants its all-reduce.
    """

    def __init__(
        self, cfg: MoEConfig, world: World, shared: SharedMemory, slicing: Slicing
    ) -> None:
        self._cfg = cfg
        self._slicing = slicing
        self._known: dict[int, bool] = {}  # by rows: whether a call leaves its sums
        self._by: AllReduce | None = None
        if slicing.may_leave_partials(cfg):
            self._by = _all_reduce_of(world, shared, slicing)

    def leaves_partials(self, rows: int, *, counted: bool) -> bool:
        """Whether a call of `rows` rows does; `counted`: see `Slicing.leaves_partials`."""
        if self._by is None:
            return False
        if counted or rows not in self._known:
            found = self._slicing.leaves_partials(self._cfg, rows, counted=counted)
            if counted:
                return found
            self._known[rows] = found
        return self._known[rows]

    def begin(self) -> None:
        """Begins a call that leaves partial sums; see `AllReduce.begin`."""
        assert self._by is not None  # as leaves_partials has said
        self._by.begin()

    def add_up(self, out: torch.Tensor, look: Callable[[], None] = lambda: None) -> None:
        """Writes the sums over the slices of this rank's experts. Collective among their ranks.

        Raises `PeerTimeout` and what `look` does: see `AllReduce.add_up`.
        """
        assert self._by is not None
        self._by.add_up(out, look)


def _all_reduce_of(world: World, shared: SharedMemory, slicing: Slicing) -> AllReduce | None:
    """The all-reduce among the ranks with slices of this rank's experts; None where
    torch.distributed does not know them, and the costs may choose.
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
    slices, holder = slicing.slices, slicing.holder(world.rank)
    made = shared.all_reduces
    if slices in made:
        return made[slices]
    first = holder * slices
    if world.backend == "cuda":
        group = dist.new_group(
            list(ranks[first : first + slices]),
            timeout=datetime.timedelta(seconds=world.deadline),
            backend="nccl",
            use_local_synchronization=True,
        )
        made[slices] = OfDevices(group, world.rank)
    else:
        name = f"{shared.number}/{slices}/{holder}"
        sums, waits = (world.control.store(f"{kind}/{name}") for kind in ("sums", "waits"))
        what = f"rank {world.rank}: the all-reduce of partial sums (reduce='after')"
        place, those = world.rank - first, range(first, first + slices)
        made[slices] = OfHosts(sums, waits, place, those, world.deadline, what, _REMEDY)
    return made[slices]
