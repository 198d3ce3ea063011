# SPDX-License-Identifier: Apache-2.0
"""The weights of an experts module of transformers, as `moeos.Experts` takes them.

transformers has four layouts: rows or columns of outputs, and gate and up behind one another or in
turn. This file turns the other three into the one that moeos has: once, in the module's own
parameters, and so that all else still finds what it had. An error on the way, or Ctrl-C, leaves a
module that is right, and whose move may begin again. It knows no world and makes no call, and
nothing of what codes and scales mean.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moeos.integrations.shared import gate_then_up, interleaved

_MOVED = "_moeos_moved"
"""The attribute of a module in which the address of its reordered w1 stands."""


_CODES, _SCALES = "_blocks", ("_scale_inv", "_scales")
"""Behind the name of a matrix: codes that are not called as the matrix is, and scales."""


class Weights(NamedTuple):
    """As `moeos.Experts` takes them."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None


def names_of(module: Any) -> tuple[str, ...]:
    """The parameters of a module, in the order of `Weights`, without scales."""
    names = _matrices(module)
    biases = tuple(f"{name}_bias" for name in names) if module.has_bias else ()
    coded = f"{names[0]}{_CODES}" in module._parameters
    return (*(f"{name}{_CODES}" if coded else name for name in names), *biases)


def scale_names_of(module: Any) -> tuple[str, ...]:
    """Those that are the scales of both matrices; none of a module that is not quantised."""
    for end in _SCALES:
        names = tuple(f"{name}{end}" for name in _matrices(module))
        if any(name in module._parameters for name in names):
            return names
    return ()


def _matrices(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def is_in_place(module: Any) -> bool:
    """Whether the module's parameters are as moeos takes them, and `move` has nothing to do."""
    if module.has_gate and not module.is_concatenated:
        return False
    return all(_rows(module, name).is_contiguous() for name in names_of(module)[:2])


def is_in_turn(module: Any) -> bool:
    """Whether the module's gates and ups are, or were, in turn."""
    return bool(module.has_gate) and (isinstance(module, _Reordered) or not module.is_concatenated)


def are_others(module: Any) -> bool:
    """Whether tensors stand in the place of the module's parameters whose order nobody knows: those
    of `torch.func.functional_call`, where the module's gates and ups are, or were, in turn.
    """
    if not is_in_turn(module) or module._is_expert_parallel:
        return False
    own = getattr(module, names_of(module)[0])
    if isinstance(own, nn.Parameter):
        return False
    moved: int | None = getattr(module, _MOVED, None)
    return moved is None or moved != own.data_ptr()


def move(module: Any) -> None:
    """Gives the module's parameters the layout that moeos takes. One thread at a time.

    A transposed matrix stays what it was: the parameter is a view of memory in the other order.
    Columns in turn cannot be one, so the parameters get another order, and the module a class that
    knows it: what it computes and its state dict are as before.
    """
    with torch.inference_mode(False), torch.no_grad():
        if module.has_gate and not module.is_concatenated:
            every = (*names_of(module), *scale_names_of(module))
            names = [name for name in every if name.startswith("gate_up_proj")]
            ordered = {name: gate_then_up(_rows(module, name), 1) for name in names}
            known = [
                (module, "__class__", _reordered(type(module))),
                (module, "is_concatenated", True),
            ]
            _put(module, ordered, known)
            module.__dict__[_MOVED] = getattr(module, names[0]).data_ptr()
        for name in names_of(module)[:2]:
            if not _rows(module, name).is_contiguous():
                _put(module, {name: _rows(module, name)}, [])


def weights_of(module: Any) -> Weights:
    """The parameters of a module that is in place and not quantised, or views of them."""
    names = names_of(module)
    w1, w2 = (_rows(module, name) for name in names[:2])
    b1, b2 = (getattr(module, name) for name in names[2:]) if module.has_bias else (None, None)
    return Weights(w1, w2, b1, b2)


def _rows(module: Any, name: str) -> Tensor:
    """[X, outputs, inputs], or a bias [X, outputs]."""
    tensor: Tensor = getattr(module, name)
    return tensor.transpose(1, 2) if module.is_transposed and tensor.dim() == 3 else tensor


def _put(module: Any, rows: dict[str, Tensor], known: list[tuple[Any, str, Any]]) -> None:
    """Gives parameters memory of their own with these rows, and attributes their values: all of
    them or none.

    In a call with expert parallelism the local part of a parameter stands in its place, and would
    be forgotten after the call. What is new there, transformers makes the whole parameter of.
    """
    old = {name: module._parameters[name] for name in rows}
    new = {}
    for name, tensor in rows.items():
        memory = tensor.contiguous()
        across = module.is_transposed and memory.dim() == 3
        new[name] = memory.transpose(1, 2) if across else memory
    if module._is_expert_parallel:
        made = {
            name: nn.Parameter(tensor, requires_grad=old[name].requires_grad)
            for name, tensor in new.items()
        }
        known = [(module, "_parameters", module._parameters | made), *known]
    else:
        known = [*((old[name], "data", tensor) for name, tensor in new.items()), *known]
    device = next(iter(new.values())).device
    if device.type == "cuda":  # another thread may read them on another stream
        torch.cuda.current_stream(device).synchronize()
    # One call into C: no signal's handler and no other thread runs between two of them.
    collections.deque(map(object.__setattr__, *zip(*known, strict=True)), maxlen=0)


OTHERS = (
    "tensors stand in the place of this module's parameters, and moeos has given these another "
    "order: pass dict(model.named_parameters()), or what is detached from them, after a first call"
)


class _Reordered:
    """What a module knows whose gates and ups lie behind one another, and once were in turn."""

    _original: type[nn.Module]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if are_others(self):
            raise ValueError(OTHERS)
        gated: Tensor = super()._apply_gate(interleaved(gate_up))  # type: ignore[misc]
        return gated

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        self._reorder(destination, prefix, interleaved)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._reorder(state_dict, prefix, gate_then_up)  # which is load_state_dict's own copy
        super()._load_from_state_dict(state_dict, prefix, *others)  # type: ignore[misc]

    def _reorder(
        self, tensors: dict[str, Tensor], prefix: str, order: Callable[[Tensor, int], Tensor]
    ) -> None:
        for end in ("", "_bias", _CODES, *_SCALES):
            key = f"{prefix}gate_up_proj{end}"
            if key in tensors:
                rows = tensors[key].dim() > 2 and not self.is_transposed  # type: ignore[attr-defined]
                tensors[key] = order(tensors[key], 1 if rows else -1)

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
