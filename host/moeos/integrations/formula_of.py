# SPDX-License-Identifier: Apache-2.0
"""Which activation a function of another library is: it is tried on numbers.

Libraries have one class for each family of models, and name its activation as they like. A
function's results on numbers identify it, whatever its name. This file must not depend on any
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from moeos.config import reference
from moeos.config.activations import FORMULAS
from moeos.config.config import MoEConfig

# Numbers of either sign, near 0, around every clamp in use, and where the curves have become
# straight. They are float64, as float32 would lose the tails of GELU.
_NUMBERS = torch.tensor(
    [0.0, 0.01, 0.1, 0.5, 1.0, 1.7, 2.5, 4.0, 6.5, 7.5, 9.5, 10.5, 31.0, 1e4],
    dtype=torch.float64,
    device="cpu",
)
_SAME = 1e-5  # functions may compute in float32 in between, and no two formulae are this near
_WIDTH = 8  # a config has multiples of it


class NoFormulaError(ValueError):
    """A function is none of the formulae. The message has numbers of it and of the nearest one."""


def fields_of(
    function: Callable[[Tensor], Tensor],
    gated: bool,
    limits: Iterable[float] = (),
    alphas: Iterable[float] = (),
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The fields of a `MoEConfig` that say what `function` computes; `NoFormulaError` if none do.

    Args:
        function: [n, 2I] (gate, then up) -> [n, I], or [n, I] -> [n, I] without a gate; of float64.
        gated: which of these.
        limits, alphas: numbers that may be its clamp and its slope.
        device: where it is tried.
    """
    signed = torch.cat([-_NUMBERS.flip(0), _NUMBERS]).to(device)
    rows = torch.cartesian_prod(signed, signed) if gated else signed[:, None]
    rows = rows.repeat_interleave(_WIDTH, dim=1)
    nearest: tuple[int, str] | None = None  # where it differs least often, and how
    with torch.no_grad():
        made = function(rows)
        for fields in _candidates(gated, [None, *limits], [None, *alphas]):
            cfg = MoEConfig(hidden=_WIDTH, intermediate=_WIDTH, experts=1, top_k=1, **fields)
            expected = reference.activate(rows, cfg)
            if made.shape != expected.shape:
                shapes = f"{list(made.shape)} of {list(rows.shape)}, where {list(expected.shape)}"
                raise NoFormulaError(f"its function makes {shapes} is needed")
            differs = ~torch.isclose(made.double(), expected, rtol=_SAME, atol=_SAME)
            count = int(differs.sum())
            if count == 0:
                return fields
            if nearest is None or count < nearest[0]:
                nearest = count, _difference(rows, made.double(), expected, fields)
    assert nearest is not None
    raise NoFormulaError(nearest[1])


def _difference(rows: Tensor, made: Tensor, expected: Tensor, fields: dict[str, Any]) -> str:
    """Where a function is farthest from a formula, in relation to what it makes."""
    at = int(((made - expected).abs() / (1 + expected.abs())).argmax())
    row, column = divmod(at, _WIDTH)
    inputs = [f"{number:g}" for number in rows[row, column::_WIDTH].tolist()]
    called = f"gate {inputs[0]} and up {inputs[1]}" if len(inputs) == 2 else inputs[0]
    name = ", ".join(f"{key} {value!r}" for key, value in fields.items() if value is not None)
    return (
        f"of {called} its function makes {made.flatten()[at]:.6g}, and the nearest formula "
        f"({name}) {expected.flatten()[at]:.6g}"
    )


def _candidates(
    gated: bool, limits: list[float | None], alphas: list[float | None]
) -> Iterator[dict[str, Any]]:
    for activation, formula in FORMULAS.items():
        if formula.gated != gated:
            continue
        for limit in limits if gated else [None]:
            for alpha in alphas if gated and formula.curve == "swish" else [None]:
                fields = {
                    "activation": activation,
                    "swiglu_limit": limit,
                    "swiglu_alpha": alpha,
                }
                yield fields
                if limit is not None or formula.limit is not None:
                    yield fields | {"swiglu_clamp": "after"}
