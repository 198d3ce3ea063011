# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of a layer's experts: in its state dict as one tensor of all ranks.

A moment lies as its parameter does: plain, with this rank's experts, under a name that all ranks
have. A checkpoint that saw it so would keep one rank's of it, and give that to all. So a state dict
holds what it holds of a layer: DTensors, sharded over the experts. This file knows optimizers, and
of a layer only which parameters are its experts, and how it converts them.

An optimizer knows no layers, and PyTorch has no hook for the state dicts of all optimizers. So the
two methods of `torch.optim.Optimizer` are wrapped, once, when the first layer is made.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moeos import sharding

if TYPE_CHECKING:
    from moeos.layer import MoELayer


class Held(NamedTuple):
    """A parameter of a layer's experts: the layer, and the name there."""

    layer: MoELayer
    name: str


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

    Optimizer.state_dict = save  # type: ignore[method-assign]
    Optimizer.load_state_dict = load  # type: ignore[method-assign]


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
        return holder.layer._of_all_ranks(local)
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
    if not (every or sharding.is_dtensor(given)):
        return given
    mine = holder.layer._of_this_rank(name, given, given.shape[1:])
    # The optimizer keeps this tensor, which must not keep all ranks' alive.
    return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()
