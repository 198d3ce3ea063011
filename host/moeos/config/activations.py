# SPDX-License-Identifier: Apache-2.0
"""The activations between the two GEMMs of an expert, as data: each is a curve with some numbers.

A gated expert computes `min(gate, limit)`, the curve of it, and multiplies that by
`clamp(up, -limit, limit) + up_offset`; the limit may also bound the curve's result instead of its
argument. An expert without a gate computes the curve alone. Kernels know the curves
(kernels/shape.hpp), and the table here is the only place that knows the activations' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Activation = Literal[
    "swiglu",
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "identity",
    "swigluoai",
    "geglu_tanh",
    "relu2",
]
Curve = Literal["swish", "gelu", "gelu_tanh", "relu", "relu2", "identity"]
"""Functions of one number z: z * sigmoid(alpha * z), GELU with erf or with tanh, max(z, 0), its
square, and z. kernels/shape.hpp has them in this order."""


class Formula(NamedTuple):
    """What an activation computes.

    Attributes:
        curve: the function of the gate, or of the only value.
        gated: whether w1 has gate rows and up rows.
        alpha: the slope of "swish".
        up_offset: is added to up.
        limit: the clamp where a config names none; None: there is none.
    """

    curve: Curve
    gated: bool = False
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


FORMULAS: Mapping[Activation, Formula] = {
    "swiglu": Formula("swish", gated=True),
    "gelu": Formula("gelu"),
    "gelu_tanh": Formula("gelu_tanh"),
    "silu": Formula("swish"),
    "relu": Formula("relu"),
    "identity": Formula("identity"),
    # gpt-oss (transformers' GptOssExperts) and MiniMax-M3, whose checkpoints call it so.
    "swigluoai": Formula("swish", gated=True, alpha=1.702, up_offset=1.0, limit=7.0),
    "geglu_tanh": Formula("gelu_tanh", gated=True),  # Gemma-4 (Gemma4TextExperts)
    "relu2": Formula("relu2"),  # Nemotron-H (NemotronHExperts)
}
