# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of a layer's experts: in its state dict as one tensor of all ranks.

A moment lies as its parameter does: plain, with this rank's experts, under a name that all ranks
have. A checkpoint that saw it so would keep one rank's moment, and give that to all ranks. So in a
state dict a moment is what the parameter is: a DTensor, sharded over the experts. This file knows
optimizers, and of a layer only which parameters are its experts, where they lie, and how it
converts them.

An optimizer knows no layers, and PyTorch has no hook for the state dicts of all optimizers. So the
two methods of `torch.optim.Optimizer` are wrapped, once, when the first layer is made.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moeos.partition import sharding
from moeos.partition.placement import Placement

if TYPE_CHECKING:
    from moeos.layer.layer import MoELayer


class Held(NamedTuple):
    """A parameter of a layer's experts: the layer, and the name there."""

    layer: MoELayer
    name: str


class Behind(NamedTuple):
    """A state that did not move when its parameter's experts did.

    Attributes:
        layer: whose parameter it is.
        name: of the parameter.
        parameter: it.
        state: what the optimizer keeps of it.
        placement: where experts lay when the optimizer wrote it.
    """

    layer: weakref.ref[MoELayer]
    name: str
    parameter: Tensor
    state: Any
    placement: Placement


_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_behind: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Behind]]
_behind = weakref.WeakKeyDictionary()

HeldById = dict[int, Held]
Convert = Callable[[Held, Tensor, str, Tensor], Tensor]


def install(held: Callable[[], HeldById]) -> None:
    """Makes state dicts of all optimizers convert what belongs to parameters that are `held`."""
    from torch.optim import Optimizer

    save_state_dict, load_state_dict = Optimizer.state_dict, Optimizer.load_state_dict

    @functools.wraps(save_state_dict)
    def save(self: Optimizer) -> dict[str, Any]:
        return _converted(self, save_state_dict(self), held(), _of_all_ranks)

    @functools.wraps(load_state_dict)
    def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, _converted(self, state_dict, held(), _of_this_rank))
        _stepped.add(self)

    Optimizer.state_dict = save  # type: ignore[method-assign]
    Optimizer.load_state_dict = load  # type: ignore[method-assign]


def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raises `RuntimeError`, before an optimizer's step, where it keeps another expert's state for
    an expert.
    """
    _stepped.add(optimizer)
    for one in _behind.get(optimizer, ()):
        if _is_of_others(optimizer, one):
            raise RuntimeError(_told(optimizer, one))


def state_of(
    optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, rank: int
) -> dict[str, Tensor]:
    """What an optimizer keeps of experts, a part for each: tensors [X, ...] by their names.

    Raises `ValueError` for a tensor of another shape, whose parts are unknown, and `RuntimeError`
    for a state that is of other experts.
    """
    for one in _behind.get(optimizer, ()):
        if one.parameter is parameter and _is_of_others(optimizer, one):
            raise RuntimeError(_told(optimizer, one))
    found: dict[str, Tensor] = {}

    def add(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() > 0 and len(tensor) == len(parameter):
            found[name] = tensor.detach()
        elif tensor.numel() > 1:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and rank {rank} {len(parameter)} experts: "
                "what of it is of which cannot be told. Clear it before experts move "
                "(optimizer.state.pop(parameter))"
            )
        return tensor

    _each_tensor(f"state of {name}", optimizer.state.get(parameter, {}), add)
    return found


def left_behind(
    layer: MoELayer,
    name: str,
    parameter: Tensor,
    old: Placement,
    moved: Collection[torch.optim.Optimizer],
) -> None:
    """Remembers the state that each optimizer but those that `moved` keeps for a parameter, whose
    experts lie as `old` says. Their next step raises.
    """
    for optimizer in list(_stepped):
        state = optimizer.state.get(parameter)
        known = _behind.get(optimizer, [])
        kept = [one for one in known if one.parameter is not parameter]
        if state and not any(optimizer is one for one in moved):
            again = [one for one in known if one.parameter is parameter and one.state is state]
            kept += again or [Behind(weakref.ref(layer), name, parameter, state, old)]
        if known or kept:
            _behind[optimizer] = kept


def _is_of_others(optimizer: torch.optim.Optimizer, one: Behind) -> bool:
    """Whether the optimizer still has that state, and the experts lie elsewhere."""
    layer, state = one.layer(), optimizer.state.get(one.parameter)
    return layer is not None and state is one.state and layer.placement != one.placement


def _told(optimizer: torch.optim.Optimizer, one: Behind) -> str:
    return (
        f"{type(optimizer).__name__} keeps of {one.name} what is of other experts, since "
        "layer.replace has moved them: pass it to replace, which then moves that, too "
        "(layer.replace(placement, optimizers=[optimizer])); or start anew with "
        "optimizer.state.clear()"
    )


def _converted(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], held: HeldById, convert: Convert
) -> dict[str, Any]:
    """The state dict with `convert` of each tensor of experts; nothing is changed in place."""
    # A state dict has numbers for parameters, in the order of the groups.
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # PyTorch names the mismatch
        holder = held.get(id(parameter))
        if holder is not None and number in own:
            made = functools.partial(convert, holder, parameter)
            own[number] = _each_tensor(holder.name, state["state"][number], made)
    return {**state, "state": own}


def _each_tensor(name: str, value: Any, made: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return made(name, value)
    if isinstance(value, dict):
        return {key: _each_tensor(f"{name}.{key}", one, made) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each_tensor(name, one, made) for one in value)
    return value


def _of_all_ranks(holder: Held, parameter: Tensor, name: str, local: Tensor) -> Tensor:
    if local.dim() > 0 and len(local) == len(parameter):
        layer = holder.layer
        made = layer._of_all_ranks(local)
        if layer._placed:
            if made is local:  # which keeps its memory
                made = local.detach()
            layer._given.add([sharding.local_part(made)])
        return made
    if local.numel() > 1 and sharding.process_group_place() is not None:
        warnings.warn(
            f"{name} in an optimizer's state has shape {list(local.shape)}, and this rank "
            f"{len(parameter)} experts: a checkpoint of torch.distributed keeps one rank's of it; "
            "save each rank's state in a file of its own",
            stacklevel=2,
        )
    return local


def _of_this_rank(holder: Held, parameter: Tensor, name: str, given: Tensor) -> Tensor:
    every = given.dim() == parameter.dim() and len(given) == holder.layer.cfg.experts
    in_order = holder.layer.placement.in_order
    of_some = not in_order and given.dim() > 0 and len(given) == len(parameter)
    if not (every or of_some or sharding.is_dtensor(given)):
        return given
    mine = holder.layer._of_this_rank(name, given, given.shape[1:])
    # The optimizer keeps this tensor, which must not keep all ranks' alive.
    return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()
