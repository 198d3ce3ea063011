# SPDX-License-Identifier: Apache-2.0
"""The weights of an experts module of transformers, as `moeos.Experts` takes them.

transformers has four layouts: rows or columns of outputs, and gate and up behind one another or in
turn. This file turns the other three into the one that moeos has: once, in the module's own
parameters, and so that all else still finds what it had. It knows no world and makes no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Weights(NamedTuple):
    """As `moeos.Experts` takes them."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


def names_of(module: Any) -> tuple[str, ...]:
    """The parameters of a module, in the order of `Weights`."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if module.has_bias else names


def is_in_place(module: Any) -> bool:
    """Whether the module's parameters are as moeos takes them, and `weights_of` moves nothing."""
    if module.has_gate and not module.is_concatenated:
        return False
    return all(_rows(module, name).is_contiguous() for name in names_of(module)[:2])


def weights_of(module: Any) -> Weights:
    """The module's parameters, or views of them. What does not lie so is moved first.

    A transposed matrix stays what it was: the parameter is a view of memory in the other order.
    Columns in turn cannot be one, so the parameters get another order, and the module a class that
    knows it: what it computes and its state dict are as before.
    """
    if not is_in_place(module):
        with torch.inference_mode(False), torch.no_grad():
            _move(module)
    names = names_of(module)
    w1, w2 = (_rows(module, name) for name in names[:2])
    b1, b2 = (getattr(module, name) for name in names[2:]) if module.has_bias else (None, None)
    return Weights(w1, w2, b1, b2)


def gate_then_up(interleaved: Tensor) -> Tensor:
    """[..., 2I] gate 0, up 0, gate 1, ... -> [..., 2I] all gates, then all ups."""
    pairs: Tensor = interleaved.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)


def interleaved(gate_then_up: Tensor) -> Tensor:
    """The inverse of `gate_then_up`."""
    columns: Tensor = gate_then_up.unflatten(-1, (2, -1))
    return columns.transpose(-1, -2).flatten(-2)


def _rows(module: Any, name: str) -> Tensor:
    """[X, outputs, inputs]."""
    matrix: Tensor = getattr(module, name)
    return matrix.transpose(1, 2) if module.is_transposed else matrix


def _move(module: Any) -> None:
    if module.has_gate and not module.is_concatenated:
        for name in (name for name in names_of(module) if name.startswith("gate_up_proj")):
            _put(module, name, _of_outputs(module, name, gate_then_up))
        module.__class__ = _reordered(type(module))
        module.is_concatenated = True
    for name in names_of(module)[:2]:
        rows = _rows(module, name).contiguous()
        _put(module, name, rows.transpose(1, 2) if module.is_transposed else rows)


def _of_outputs(module: Any, name: str, order: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameter with its outputs in another order."""
    tensor: Tensor = getattr(module, name)
    if tensor.dim() == 2 or module.is_transposed:
        return order(tensor)
    return order(tensor.transpose(1, 2)).transpose(1, 2)


def _put(module: Any, name: str, tensor: Tensor) -> None:
    """Gives a parameter other memory.

    In a call with expert parallelism the local part of a parameter stands in its place, and would
    be forgotten after the call. What is new there, transformers makes the whole parameter of.
    """
    old = module._parameters[name]
    if module._is_expert_parallel:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        old.data = tensor


class _Reordered:
    """What a module knows whose gates and ups lie behind one another, and once were in turn."""

    _original: type[nn.Module]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = super()._apply_gate(interleaved(gate_up))  # type: ignore[misc]
        return gated

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        self._reorder(destination, prefix, interleaved)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._reorder(state_dict, prefix, gate_then_up)  # which is load_state_dict's own copy
        super()._load_from_state_dict(state_dict, prefix, *others)  # type: ignore[misc]

    def _reorder(
        self, tensors: dict[str, Tensor], prefix: str, order: Callable[[Tensor], Tensor]
    ) -> None:
        for name in ("gate_up_proj", "gate_up_proj_bias"):
            key = prefix + name
            if key in tensors:
                matrix = tensors[key].dim() == 3 and not self.is_transposed  # type: ignore[attr-defined]
                if matrix:
                    tensors[key] = order(tensors[key].transpose(1, 2)).transpose(1, 2)
                else:
                    tensors[key] = order(tensors[key])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self._original,), self.__dict__


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _reordered(original: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of this class whose columns were reordered: one, for all of them."""
    if original not in _classes:
        bases = (_Reordered, original)
        _classes[original] = type(original.__name__, bases, {"_original": original})
    return _classes[original]


def _empty(original: type[nn.Module]) -> nn.Module:
    """For pickles and copies, which fill it."""
    cls = _reordered(original)
    return cls.__new__(cls)
