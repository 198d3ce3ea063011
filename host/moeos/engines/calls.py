# SPDX-License-Identifier: Apache-2.0
"""The identity of a call: one number, by which ranks notice that they make different calls.

The runtime only compares these numbers (Call::identity of runtime/words/call.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_PIECES = (1 << 12) - 1
"""The most pieces of a call that an identity has room for."""

_PIECES = MAX_PIECES + 1
_DIRECTIONS = 4
_FORWARD = 0
_BACKWARD = 1
_BACKWARD_OF_ONE = 2  # which reads what one call, and no other, has kept on several ranks
_LAYERS = (1 << 32) // (_DIRECTIONS * _PIECES)
_CALLS = 1 << 8  # calls under way that can be distinguished
_FEW_LAYERS = _LAYERS // _CALLS


def identity(layer: int, pieces: int = 1, *, backward: bool = False, of: int = 0) -> int:
    """A number for a call of a layer, whose number in the world is `layer`; never 0. `of`: the call
    whose backward it is, if the backward reads what that call has kept on several ranks.
    """
    direction = _BACKWARD if backward else _FORWARD
    if backward and of != 0:
        direction = _BACKWARD_OF_ONE
        layer = layer % _FEW_LAYERS * _CALLS + of % _CALLS
    return (layer % _LAYERS * _DIRECTIONS + direction) * _PIECES + pieces


def layer_of(number: int) -> int:
    """The layer of an identity; of a backward of one call its last bits."""
    layer = number // (_DIRECTIONS * _PIECES)
    return layer // _CALLS if _direction_of(number) == _BACKWARD_OF_ONE else layer


def may_be_of_one_layer(number: int, other: int) -> bool:
    """Whether two identities are of one layer, as far as they say it."""
    if _BACKWARD_OF_ONE in (_direction_of(number), _direction_of(other)):
        return layer_of(number) % _FEW_LAYERS == layer_of(other) % _FEW_LAYERS
    return layer_of(number) == layer_of(other)


def is_backward(number: int) -> bool:
    """Whether an identity is of a call of gradients."""
    return _direction_of(number) != _FORWARD


def one_of(number: int) -> int | None:
    """The last bits of the call whose backward it is, if the identity has them."""
    if _direction_of(number) != _BACKWARD_OF_ONE:
        return None
    return number // (_DIRECTIONS * _PIECES) % _CALLS


def _direction_of(number: int) -> int:
    return number // _PIECES % _DIRECTIONS


def describe(number: int, names: Mapping[int, str], of: int = 0) -> str:
    """Words for an identity; `names`: of layers that have one; `of`: the call whose backward it is,
    if it is known.
    """
    layer, pieces = layer_of(number), number % _PIECES
    name = names.get(layer)
    words = f"layer {layer}" + (f" ({name})" if name else "")
    if is_backward(number):
        last_bits = one_of(number)
        of_call = "" if last_bits is None else f"call {last_bits} (modulo {_CALLS}) of "
        if of != 0:
            of_call = f"call {of} of "
        words = f"the backward of {of_call}{words}"
    return words + (f" in {pieces} pieces" if pieces != 1 else "")
