# SPDX-License-Identifier: Apache-2.0
"""What calls count in `torch.utils.flop_counter.FlopCounterMode`: the products of a rank's tokens.

This file must not depend on modules or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moeos.call import call_checks

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
    """The FLOPs of a forward: 2 for each number of a matrix that a row is multiplied by. `named`:
    the operator's arguments, by the names of its schema.

    Like PyTorch's own formulas this one sees only shapes. So each row of x is a token with `pairs`
    experts of this size, whether its slots are used or not, and a zero expert counts as any other.
    """
    own = {**named, "gate.weight": named["gate"]}
    return 2 * sum(_products(own, named["x"], named["pairs"], named["topk_weights"]).values())


def of_backward(named: Mapping[str, Any], names: Sequence[str]) -> int:
    """The FLOPs of a backward. `names`: the tensors whose gradients the operator can return.

    As in PyTorch's own modules, each product has one more for the gradient of its matrix and one
    for that of its input, where they are wanted. Recomputation does not count.
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
    """Makes the counter count all operators of moeos from now on. `names`: as for `of_backward`."""
    for name in ("forward", "forward_into", "record", "backward"):
        _register(name, names)


def _register(name: str, names: Sequence[str]) -> None:
    operator = getattr(torch.ops.moeos, name)
    arguments = operator.default._schema.arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}

    def formula(*given: Any, out_val: object = None, **how: Any) -> int:
        by_place = {one.name: value for one, value in zip(arguments, given, strict=False)}
        named = defaults | by_place | how
        return of_backward(named, names) if name == "backward" else of_forward(named)

    register_flop_formula(operator, get_raw=True)(formula)
