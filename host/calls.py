# SPDX-License-Identifier: Apache-2.0
"""What a rank says of its call, so that ranks which make different ones notice: one number.

The runtime compares these numbers and knows no more of them (Call::identity of runtime/call.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_PIECES = (1 << 12) - 1
"""Of a call; what an identity has room for."""

_PIECES = MAX_PIECES + 1
_DIRECTIONS = 4
_FORWARD = 0
_BACKWARD = 1
_LAYERS = (1 << 32) // (_DIRECTIONS * _PIECES)


def identity(layer: int, pieces: int = 1, *, backward: bool = False) -> int:
    """Of a call of a layer, by its number in the world; never 0."""
    direction = _BACKWARD if backward else _FORWARD
    return (layer % _LAYERS * _DIRECTIONS + direction) * _PIECES + pieces


def layer_of(number: int) -> int:
    """The layer of an identity."""
    return number // (_DIRECTIONS * _PIECES)


def is_backward(number: int) -> bool:
    """Whether an identity is of a call of gradients."""
    return number // _PIECES % _DIRECTIONS == _BACKWARD


def describe(number: int, names: Mapping[int, str]) -> str:
    """Words for an identity; `names`: of layers that have one."""
    layer, pieces = layer_of(number), number % _PIECES
    name = names.get(layer)
    words = f"layer {layer}" + (f" ({name})" if name else "")
    if is_backward(number):
        words = f"the backward of {words}"
    return words + (f" in {pieces} pieces" if pieces != 1 else "")
