# SPDX-License-Identifier: Apache-2.0
"""What calls count in `torch.utils.flop_counter.FlopCounterMode`: the products of a rank's tokens.

It knows the operators' schemas, and nothing of modules or engines. The counter's module imports
Triton where it is installed, which takes a third of a second. So formulas are registered when a
program imports that module, and moeos does not.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeos import call_checks

_COUNTER = "torch.utils.flop_counter"
_FED = {
    "w1": ("x",),
    "w2": ("x", "w1", "w3", "b1"),
    "w3": ("x",),
    "gate.weight": ("x",),
    "shared_w1": ("x",),
    "shared_w2": ("x", "shared_w1"),
    "shared_gate": ("x",),
}
"""The matrices of a call, and what the input of each one's product depends on."""


def of_forward(named: Mapping[str, Any]) -> int:
    """Of a call, by the names of its operator's schema: 2 for each number of a matrix that a row is
    multiplied by.

    As PyTorch's own formulas it sees shapes alone. So each row of x is a token with `pairs` experts
    of this size, whether its slots are used or not, and experts that cost nothing count as others.
    """
    own = {**named, "gate.weight": named["gate"]}
    return 2 * sum(_products(own, named["x"], named["pairs"], named["topk_weights"]).values())


def of_backward(named: Mapping[str, Any], names: Sequence[str]) -> int:
    """Of a backward; `names`: of what it may be of.

    As of modules of PyTorch, each product has one more for the gradient of its matrix and one for
    that of its input, where they are wanted. What is computed again does not count.
    """
    wanted = dict(zip(names, named["wanted"], strict=True))
    own = dict(zip(call_checks.OWN, named["own"], strict=True))
    products = _products(own, named["x"], named["pairs"], named["dtype_of_weights"])
    total = 0
    for name, number in products.items():
        total += number * (wanted[name] + any(wanted[one] for one in _FED[name]))
    return 2 * total


def _products(
    own: Mapping[str, Tensor | None], x: Tensor, pairs: int, of_caller: object
) -> dict[str, int]:
    """Products of numbers, by matrix. `of_caller`: None where the gate weighs."""
    found = {}
    for name in _FED:
        matrix = own[name]
        if matrix is None or (name == "gate.weight" and of_caller is not None):
            continue
        of_a_byte = 2 if matrix.dtype == torch.uint8 else 1  # codes of 4 bits
        if name in call_checks.WEIGHTS:  # [X, ...], of which a pair has one
            found[name] = x.shape[0] * pairs * prod(matrix.shape[1:]) * of_a_byte
        else:
            found[name] = x.shape[0] * prod(matrix.shape) * of_a_byte
    return found


def count(names: Sequence[str]) -> None:
    """Has all operators of moeos counted from now on. `names`: as of `of_backward`."""

    def register(module: ModuleType) -> None:
        for name in ("forward", "forward_into", "record", "backward"):
            _register(module, name, names)

    if _COUNTER in sys.modules:
        register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _Watch(register))


def _register(module: Any, name: str, names: Sequence[str]) -> None:
    operator = getattr(torch.ops.moeos, name)
    arguments = operator.default._schema.arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}

    def formula(*given: Any, out_val: object = None, **how: Any) -> int:
        by_place = {one.name: value for one, value in zip(arguments, given, strict=False)}
        named = defaults | by_place | how
        return of_backward(named, names) if name == "backward" else of_forward(named)

    module.register_flop_formula(operator, get_raw=True)(formula)


class _Watch(MetaPathFinder):
    """Registers formulas when the counter's module is imported, and is gone then."""

    def __init__(self, register: Any) -> None:
        self._register = register

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec
