# SPDX-License-Identifier: Apache-2.0
"""Tensors like those of an earlier call that has passed all checks.

The properties of a call's tensors seldom change, and checking each of them costs the host as much
as a launch. PyTorch has one function that checks all properties of all tensors: the guard of
compiled graphs. This file uses it, and must not depend on the checks. Where PyTorch lacks the
function, no tensors are known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = 4
"""Kinds of tensors that are kept, for each number of tensors that a call may have."""

_MOST_GIVEN = 5  # x, ids, weights, tokens and out
_Kind = tuple[Callable[..., bool], bool]  # whether tensors are like these, and any wants a gradient


class KnownTensors:
    """What the tensors of one caller's calls were like.

    Each tensor is known by its class, dtype, device, shape and strides, by whether it requires a
    gradient, and by what in this thread acts on operators that get it (inference mode, autocast,
    modes, transforms). The number of rows of x, the routing and the output may be any.

    Args:
        present: which of the tensors that do not belong to a call's tokens must exist; all others
            must be None.
    """

    def __init__(self, present: Sequence[bool]) -> None:
        self._own = operator.itemgetter(*(i for i, there in enumerate(present) if there))
        self._absent = tuple(i for i, there in enumerate(present) if not there)
        self._kinds: list[tuple[_Kind, ...]] = [()] * (_MOST_GIVEN + 1)

    def are(
        self,
        most_rows: int,
        rows: Tensor,
        ids: Any,
        weights: Any,
        tokens: Any,
        out: Any,
        own: tuple[Any, ...],
    ) -> bool:
        """Whether these tensors are like those of a learned call, with at most `most_rows` rows,
        and no gradient is wanted. None stands for a tensor that a call does not have.
        """
        for place in self._absent:
            if own[place] is not None:
                return False
        given = _given(rows, ids, weights, tokens, out)
        for alike, trained in self._kinds[len(given)]:
            if alike(*given, *self._own(own)):
                count = rows.shape[0]
                return (
                    count <= most_rows
                    and (ids is None or ids.shape[0] == count == weights.shape[0])
                    and (out is None or out.shape[0] == count)
                    and not (trained and torch.is_grad_enabled())
                )
        return False

    def learn(
        self,
        rows: Tensor,
        ids: Tensor | None,
        weights: Tensor | None,
        tokens: Tensor | None,
        out: Tensor | None,
        own: tuple[Tensor | None, ...],
    ) -> None:
        """Learns these tensors of a call that is made without an operator: rows and out are
        contiguous.
        """
        given = _given(rows, ids, weights, tokens, out)
        tensors: list[Any] = [*given, *self._own(own)]
        sizes: list[list[int | None]] = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        for place, tensor in enumerate(given):
            if tensor is tokens:
                continue
            if tensor.dim() != 2:
                return
            sizes[place][0] = None
            contiguous = tensor is rows or tensor is out
            if contiguous:  # the stride of a single row may be any
                strides[place] = [tensor.shape[1], 1]
        alike = _alike(tensors, sizes, strides)
        if alike is not None:
            trained = any(tensor.requires_grad for tensor in tensors)
            before = self._kinds[len(given)]
            self._kinds[len(given)] = ((alike, trained), *before[: KINDS - 1])


def _given(rows: Any, ids: Any, weights: Any, tokens: Any, out: Any) -> tuple[Any, ...]:
    given = (rows,) if ids is None and weights is None else (rows, ids, weights)
    if tokens is not None:
        given += (tokens,)
    return given if out is None else (*given, out)


def _alike(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int | None]], strides: Sequence[list[int]]
) -> Callable[..., bool] | None:
    """Whether other tensors are like these, of any size where one is None; None if that cannot be
    known, or these are not.
    """
    try:
        guards: Any = torch._C._dynamo.guards
        guard = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )
        found: Callable[..., bool] = guard.check
        return found if found(*tensors) else None
    except (AttributeError, TypeError):
        return None
