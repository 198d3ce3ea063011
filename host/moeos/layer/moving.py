# SPDX-License-Identifier: Apache-2.0
"""Experts that move from rank to rank: which go where, and how their tensors get there.

This file must not depend on layers or calls.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moeos.partition import sharding
from moeos.partition.placement import Placement
from moeos.system.caller import Caller
from moeos.system.errors import PeerTimeout, in_job
from moeos.world.control import name_ranks
from moeos.world.world import World

_LOOK = 1e-4  # seconds between two looks at an operation of the GPU
_SHORTEST = 1e-3  # least seconds of a wait for an operation
_EARLY = 0.01  # seconds by which a library may find too soon that the time is up
_LEEWAY = 1.0  # seconds beyond the deadline in which operations that are given up must end

_unfinished: list[object] = []  # memory that operations which never ended may still write


class Move(NamedTuple):
    """An expert that a rank gets.

    Attributes:
        expert: its number.
        source, receiver: the ranks that send and receive it.
    """

    expert: int
    source: int
    receiver: int


def moves(old: Placement, new: Placement) -> list[Move]:
    """The experts that each rank lacks and receives, from the ranks that have them in turn."""
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
    """Memory for the received experts. It is apart from `fill`, as a rank may have too little."""
    return {name: tensor.new_empty(tensor.shape) for name, tensor in held.items()}


def fill(
    made: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    old: Placement,
    new: Placement,
    world: World,
) -> None:
    """Writes to `made` this rank's experts as `new` has them. Collective.

    `held`: [X, ...] by name, as `old` has them, of the same names on all ranks with experts. They
    must not change until the call has returned on all ranks. The GPU has done what was launched,
    and no signal's handler may raise here: what a rank leaves half sent, another takes for
    something else.

    Raises `PeerTimeout` where a rank does not send or take its experts before the world's deadline.
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
    peers: list[int] = []  # of each operation, by its rank in the world
    for move in moves(old, new):
        if rank not in (move.source, move.receiver):
            continue
        sends = rank == move.source
        peer = move.receiver if sends else move.source
        tensors, places = (held, before) if sends else (made, own)
        for name in held:
            its = tensors[name][places.index(move.expert)]
            its = its.reshape(-1).view(torch.uint8)  # 8-bit floats cannot be sent everywhere
            what: Any = dist.isend if sends else dist.irecv
            operations.append(dist.P2POp(what, its, dist.get_global_rank(group, peer), group))
            peers.append(peer)
    if operations:
        _exchange(operations, peers, world)


def _exchange(operations: list[dist.P2POp], peers: list[int], world: World) -> None:
    """Sends and receives. Raises `PeerTimeout` at the world's deadline, whatever the library does,
    and the library's error, with the peers, where it gives one.
    """
    device = operations[0].tensor.device
    ends = time.monotonic() + world.deadline

    def exchange() -> None:
        # Streams and the current device are a thread's own.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            requests = dist.batch_isend_irecv(operations)
            late: list[int] = []
            error: Exception | None = None
            for number, request in enumerate(requests):
                # A library may return one request for all operations.
                its = peers if len(requests) < len(peers) else [peers[number]]
                try:
                    arrived = _arrives(request, ends, polled=device.type == "cuda")
                except Exception as raised:
                    # The others go on: their peers wait for what is sent to them.
                    arrived = False
                    if time.monotonic() < ends - _EARLY:  # else the timeout is reported
                        error = error or raised
                late += [] if arrived else its
            if late:
                _unfinished.append((operations, requests))
                _fail(world, late, error)

    caller = Caller("moeos-moves", f"rank {world.rank} of {world.size}")
    try:
        caller.result(exchange, ends - time.monotonic() + _LEEWAY)
    except concurrent.futures.TimeoutError:
        _fail(world, peers, None)
    finally:
        caller.close()


def _arrives(request: Any, ends: float, *, polled: bool) -> bool:
    """Whether an operation has ended by then. `polled`: its own wait would only be the stream's."""
    if not polled:
        # Never 0, which means no limit.
        left = max(ends - time.monotonic(), _SHORTEST)
        return bool(request.wait(datetime.timedelta(seconds=left)))
    while not request.is_completed():
        if time.monotonic() > ends:
            return False
        time.sleep(_LOOK)
    request.wait()
    return True


def _fail(world: World, peers: Iterable[int], error: Exception | None) -> NoReturn:
    """`error`: of the library; None: the deadline has passed."""
    who = name_ranks(sorted(set(peers)))
    job = in_job(
        [world.rank, *sorted(set(peers))], () if world.group is None else world.group.ranks
    )
    if error is not None:
        raise RuntimeError(
            f"rank {world.rank} lost its way to {who} as experts moved: {error}{job}"
        ) from error
    raise PeerTimeout(
        f"rank {world.rank} of {world.size} waited {world.deadline:g} s for experts from or to "
        f"{who}: ended, stuck, or slower than the deadline, which moeos.init(deadline=...) "
        f"sets{job}"
    )


def _group_of(world: World) -> dist.ProcessGroup | None:
    """The process group that has the world's ranks, in their order."""
    if world.group is not None:
        return sharding.found_again(world.group)
    if sharding.process_group_place() == (world.rank, world.size):
        return dist.group.WORLD
    return None
