# SPDX-License-Identifier: Apache-2.0
"""Experts that move from rank to rank: which go where, and how their tensors get there.

It knows tensors of experts [X, ...] and worlds, and nothing of layers or of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moeos import sharding
from moeos.placement import Placement
from moeos.world import World


class Move(NamedTuple):
    """An expert that a rank gets.

    Attributes:
        expert: its number.
        source, receiver: who has it, and who gets it.
    """

    expert: int
    source: int
    receiver: int


def moves(old: Placement, new: Placement) -> list[Move]:
    """What each rank gets that it has not: of the ranks that have it, by turns."""
    found = []
    for expert, (had, has) in enumerate(zip(old.holders(), new.holders(), strict=True)):
        gaining = [rank for rank in has if rank not in had]
        found += [Move(expert, had[n % len(had)], rank) for n, rank in enumerate(gaining)]
    return found


def require_way(world: World) -> None:
    """Raises `RuntimeError` where ranks have no way to send tensors. Alike on all ranks."""
    if not world.control.shares_memory and _group_of(world) is None:
        raise RuntimeError(
            "experts move between processes by torch.distributed, which has not the ranks of this "
            "world: call torch.distributed.init_process_group before moeos.init, or pass "
            "moeos.init(group=...)"
        )


def room(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for as much. Apart from `fill`, since a rank may have too little."""
    return {name: tensor.new_empty(tensor.shape) for name, tensor in held.items()}


def fill(
    made: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    old: Placement,
    new: Placement,
    world: World,
) -> None:
    """Writes to `made` this rank's experts as `new` has them. Collective.

    `held`: [X, ...] by name, as `old` has them, of the same names on all ranks with experts. Nobody
    may change them until all ranks are back.
    """
    rank = world.rank
    before, own = old.ranks[rank], new.ranks[rank]
    for local, expert in enumerate(own):
        if expert in before:
            for name, tensor in held.items():
                made[name][local].copy_(tensor[before.index(expert)])
    if world.control.shares_memory:
        every = world.control.allgather(held, "experts that move")
        for move in moves(old, new):
            if move.receiver == rank:
                at = old.ranks[move.source].index(move.expert)
                for name, tensor in made.items():
                    tensor[own.index(move.expert)].copy_(every[move.source][name][at])
        return
    group = _group_of(world)
    assert group is not None  # require_way
    operations: list[dist.P2POp] = []
    for move in moves(old, new):
        if rank not in (move.source, move.receiver):
            continue
        sends = rank == move.source
        peer = dist.get_global_rank(group, move.receiver if sends else move.source)
        tensors, places = (held, before) if sends else (made, own)
        for name in held:
            its = tensors[name][places.index(move.expert)]
            its = its.reshape(-1).view(torch.uint8)  # 8-bit floats cannot be sent everywhere
            what: Any = dist.isend if sends else dist.irecv
            operations.append(dist.P2POp(what, its, peer, group))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()


def _group_of(world: World) -> dist.ProcessGroup | None:
    """The process group that has the world's ranks, in their order."""
    if world.group is not None:
        return sharding.found_again(world.group)
    if sharding.process_group_place() == (world.rank, world.size):
        return dist.group.WORLD
    return None
