# SPDX-License-Identifier: Apache-2.0
"""Reads a world's ranks and store from a process group, or from one dimension of a DeviceMesh.

Must not depend on what the world is for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from moeos.system.errors import PeerTimeout
from moeos.world import rendezvous
from moeos.world.rendezvous import Meeting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh


class Membership(NamedTuple):
    """A group, this process's rank in it, and the number of its ranks."""

    group: ProcessGroup
    rank: int
    size: int


def membership(group: ProcessGroup | DeviceMesh) -> Membership:
    """This process's place in a group.

    Raises `TypeError` if it is no group, and `ValueError` if this process is no member of it or a
    mesh has not one dimension.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        group = _group_of(group)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_no_member("group is GroupMember.NON_GROUP_MEMBER"))
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; it must be a process group of torch.distributed, such as "
            "torch.distributed.group.WORLD, or a DeviceMesh of one dimension"
        )
    return Membership(group, group.rank(), group.size())


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    names = mesh.mesh_dim_names
    if mesh.ndim != 1:
        if names:
            remedy = f"pass one of them, such as mesh[{names[-1]!r}]"
        else:
            remedy = "pass one of them, such as mesh.get_group(0)"
        called = f" {names}" if names else ""
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions{called} and shape "
            f"{tuple(mesh.mesh.shape)}: {remedy}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_no_member(f"group is {mesh!r}"))
    return mesh.get_group()


def _no_member(what: str) -> str:
    import torch.distributed as dist

    where = ""
    if dist.is_initialized():
        where = f", rank {dist.get_rank()} of {dist.get_world_size()},"
    return (
        f"{what}: this process{where} is no member of it; make the call only where the group's "
        "ranks are"
    )


def meet(member: Membership, deadline: float, device: torch.device | None) -> Meeting:
    """The store of a group. Collective over it where torch shows none.

    Raises `PeerTimeout` if the group does not give it within `deadline` seconds.
    """
    store = _store_of(member.group)
    if store is not None:
        where = f"the store of process group {member.group.group_name!r}"
        return Meeting(store, where, serves=False)
    return _broadcast_address(member, deadline, device)


def _store_of(group: ProcessGroup) -> Store | None:
    """The group's own part of the store by which it was made; not every group and torch has it."""
    with contextlib.suppress(AttributeError, RuntimeError):
        store: Store | None = group.get_group_store()
        return store
    return None


def _broadcast_address(member: Membership, deadline: float, device: torch.device | None) -> Meeting:
    """A store of the group's rank 0, which sends its address through the group."""
    import torch.distributed as dist

    rank, size = member.rank, member.size
    mine = rendezvous.serve(deadline) if rank == 0 else None
    address = [None if mine is None else rendezvous.announcement(mine)]

    def broadcast() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # for this thread
        dist.broadcast_object_list(address, group=member.group, group_src=0)

    try:
        rendezvous.within(deadline, broadcast)
    except concurrent.futures.TimeoutError as error:
        raise PeerTimeout(
            f"rank {rank} of {size} waited {deadline:g} s for process group "
            f"{member.group.group_name!r} to broadcast the address of a store: a rank did not "
            "arrive (ended, stuck, or never made this call)"
        ) from error
    if mine is not None:
        return Meeting(mine, "the store of this rank", serves=True)
    assert address[0] is not None
    return rendezvous.at_announced(rank, size, deadline, address[0])
