# SPDX-License-Identifier: Apache-2.0
"""A call that is longer than a layer's buffers, cut into calls that are not. It knows tensors, and
nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeos.engines.base import CallTensors


def pieces_of(call: CallTensors, most: int) -> Iterator[CallTensors]:
    """The `call.pieces` calls of at most so many rows each, in order; behind the last row they have
    none.
    """
    if call.pieces == 1:
        yield call
        return
    rows = call.x.shape[0]
    for number in range(call.pieces):
        first, end = min(rows, number * most), min(rows, (number + 1) * most)
        yield call._replace(
            x=call.x[first:end],
            out=call.out[first:end],
            x_scale=None if call.x_scale is None else call.x_scale[first:end],
            topk_ids=None if call.topk_ids is None else call.topk_ids[first:end],
            topk_weights=None if call.topk_weights is None else call.topk_weights[first:end],
            tokens=None
            if call.tokens is None
            else _tokens_of(call.tokens, first, end, number, call.pieces),
        )


def _tokens_of(
    tokens: torch.Tensor, first: int, end: int, number: int, pieces: int
) -> torch.Tensor:
    """The tokens among the rows of one piece. A number below 0 remains so in the first piece, and
    one above all rows is above those of the last, so that what is wrong is found there.
    """
    least = None if number == 0 else 0
    most = None if number == pieces - 1 else end - first
    return (tokens - first).clamp(least, most)
