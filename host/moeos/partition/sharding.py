# SPDX-License-Identifier: Apache-2.0
"""All ranks' experts as one tensor: what a state dict holds, and this rank's part of what it gets.

Ranks hold different experts under equal names. So a checkpoint of a whole model must see a DTensor,
sharded over the experts, and not one rank's tensor. Must not depend on more of a layer than shapes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Group(NamedTuple):
    """A process group as a world remembers it: a reference would keep it alive.

    Attributes:
        name: by which torch.distributed finds it, as long as it is not destroyed.
        ranks: of the default group, in the group's order; another may get the name later.
    """

    name: str
    ranks: tuple[int, ...]


def remembered(group: ProcessGroup) -> Group | None:
    """How a world remembers its group; None for one that torch.distributed does not know."""
    try:
        return Group(group.group_name, tuple(dist.get_process_group_ranks(group)))
    except (KeyError, RuntimeError, ValueError):
        return None


def found_again(known: Group) -> ProcessGroup | None:
    """The group, if it still exists."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed import distributed_c10d

    try:
        group: ProcessGroup = distributed_c10d._resolve_process_group(known.name)  # type: ignore
    except (LookupError, RuntimeError, ValueError):
        return None
    return group if remembered(group) == known else None


def process_group_place() -> tuple[int, int] | None:
    """This process's rank in the default group of torch.distributed, and that group's size."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def ranks_of(known: Group | None, place: tuple[int, int]) -> tuple[int, ...] | None:
    """The ranks of the default group that make up a world; None if they are not known.

    Args:
        known: what the world was made of.
        place: this process's rank in the world, and the world's size.
    """
    if known is not None:
        return known.ranks
    here = process_group_place()
    if here is not None and place == here:
        return tuple(range(here[1]))
    return (here[0],) if here is not None and place[1] == 1 else None


def default_group() -> ProcessGroup:
    """The process group of all processes; torch.distributed must be initialised."""
    group: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return group


def whole(local: Tensor, experts: int, device: torch.device, group: ProcessGroup) -> Tensor:
    """The DTensor [E, ...] of which each rank of a group holds its `local` [its experts, ...].

    Both have the same memory. Sends nothing. `experts`: E; `device`: where it lies once it has
    values.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    _tell_safetensors()
    kind = device.type if local.is_meta else local.device.type
    mesh = DeviceMesh.from_group(group, kind)
    shape = torch.Size((experts, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _tell_safetensors() -> None:
    """Lets safetensors say what to save, where it would say that a DTensor has no memory."""
    module: Any = sys.modules.get("safetensors.torch")
    address = getattr(module, "storage_ptr", None)
    if address is None or hasattr(address, "__wrapped__"):
        return

    @functools.wraps(address)
    def storage_ptr(tensor: Tensor) -> int:
        if is_dtensor(tensor):
            raise RuntimeError(
                f"safetensors reads memory, and a DTensor of shape {list(tensor.shape)} is in that "
                "of several ranks: save full_tensor() of each, or what torch.distributed.checkpoint"
                ".state_dict.get_model_state_dict returns with StateDictOptions("
                "full_state_dict=True), both called on all ranks; or to_local() in a file of each "
                "rank's own"
            )
        found: int = address(tensor)
        return found

    module.storage_ptr = storage_ptr


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; there is none where their module has not been imported."""
    if type(tensor) is Tensor:
        return False
    # Not imported here: that takes a second, and a signal during it leaves half a module.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> Tensor:
    """The very tensor that a DTensor has on this rank; another tensor itself."""
    if not is_dtensor(tensor):
        plain: Tensor = tensor
        return plain
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def is_cut(tensor: Any) -> bool:
    """Whether it is a DTensor of which this rank may hold a part only."""
    return is_dtensor(tensor) and not all(p.is_replicate() for p in tensor.placements)


def everything(name: str, tensor: Any) -> Tensor:
    """A plain tensor of all that a DTensor holds; another tensor as it is.

    Collective for the ranks of a DTensor's mesh, unless it is replicated: then nothing is sent.
    Raises `ValueError` where its ranks cannot be asked.
    """
    plain: Tensor
    if not is_dtensor(tensor):
        plain = tensor
        return plain
    mesh = _mesh_with_this_rank(name, tensor)
    if not is_cut(tensor):
        plain = tensor.to_local()
        return plain
    needed = mesh.mesh.flatten().tolist()
    place = process_group_place()
    if place is None or max(needed) >= place[1]:
        there = "is not initialised" if place is None else f"has {place[1]} ranks"
        raise ValueError(
            f"{name} is a DTensor, placed {list(tensor.placements)} on the ranks {needed}, and "
            f"torch.distributed {there}: read it with torch.distributed.checkpoint, which moves "
            "it to other ranks, or pass a whole tensor (DTensor.full_tensor)"
        )
    return _gathered(tensor)


def for_parameter(name: str, given: Tensor, own: Tensor | None) -> Tensor:
    """What PyTorch loads into a parameter that all ranks have whole, or that `fully_shard` has cut
    between calls: `everything` of a DTensor, or the DTensor itself.
    """
    return given if own is not None and is_dtensor(own) else everything(name, given)


def _gathered(tensor: Any) -> Tensor:
    """All of a DTensor, sent as bytes if they are 8-bit floats, which gloo does not send."""
    plain: Tensor
    if tensor.dtype.itemsize > 1 or not tensor.is_floating_point():
        plain = tensor.full_tensor()
        return plain
    from torch.distributed.tensor import DTensor

    as_bytes = DTensor.from_local(
        tensor.to_local().view(torch.uint8),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    plain = as_bytes.full_tensor()
    return plain.view(tensor.dtype)


def part(
    name: str,
    tensor: Any,
    own: Sequence[int],
    experts: int,
    each: torch.Size,
    rank: int,
    ranks: int,
    *,
    in_order: bool = True,
) -> Tensor:
    """What `rank` of `ranks` holds of a DTensor or a tensor with all experts [E, ...].

    `own`: its experts, of which each has the shape `each`; `experts`: E; `in_order`: whether ranks
    hold what `MoEConfig.experts_of` says. Then a plain tensor of as many experts as its own, and
    not of all, is taken for them. Memory is shared where it can be. Where experts are in order, a
    DTensor that is sharded over the experts of `ranks` ranks is taken as it lies; for others see
    `everything`.

    Raises `ValueError` for other shapes, and for a DTensor that another rank has written.
    """
    local, every = torch.Size((len(own), *each)), torch.Size((experts, *each))
    if tensor.shape != every and (is_dtensor(tensor) or tensor.shape != local):
        kind = "a DTensor" if is_dtensor(tensor) else "a tensor"
        raise ValueError(
            f"{name} is {kind} of shape {list(tensor.shape)}; rank {rank} of {ranks} takes all "
            f"experts, {list(every)} (also as a DTensor), or its own, {list(local)}"
        )
    mine: Tensor
    if not is_dtensor(tensor):
        if not in_order and own and tensor.shape != every:
            raise ValueError(
                f"{name} has {len(tensor)} experts and does not say which; those of rank {rank} "
                f"lie out of order, {[*own]}: pass all experts, {list(every)}, or each one as its "
                f"own tensor, such as {name}.{own[0]}"
            )
        whole_is_own = tensor.shape == every and not isinstance(own, range)
        mine = tensor if tensor.shape == local and not whole_is_own else rows_of(tensor, own)
        return mine
    from torch.distributed.tensor import Shard

    mesh = _mesh_with_this_rank(name, tensor)
    if in_order and mesh.size() == ranks and [*tensor.placements] == [Shard(0)]:
        [holder] = mesh.get_coordinate()
        if holder != rank:
            raise ValueError(
                f"{name} is a DTensor that holds the experts of rank {holder} here, and this is "
                f"rank {rank}: load what rank {rank} has saved, or a whole tensor"
            )
        mine = tensor.to_local()
        return mine
    return rows_of(everything(name, tensor), own)


def rows_of(every: Tensor, own: Sequence[int]) -> Tensor:
    """One rank's experts of a tensor of all experts [E, ...]; a view where they are contiguous."""
    if isinstance(own, range):
        return every[own.start : own.stop]
    if every.element_size() == 1 and every.dim() > 0:  # 8-bit floats cannot be looked up
        return every.view(torch.uint8)[list(own)].view(every.dtype)
    return every[list(own)]


def _mesh_with_this_rank(name: str, tensor: Any) -> Any:
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} is a DTensor on the ranks {mesh.mesh.flatten().tolist()}, and this process is "
            "not one of them: it holds nothing of it here"
        )
    return mesh
