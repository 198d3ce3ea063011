# SPDX-License-Identifier: Apache-2.0
"""Cuts a call that is longer than a layer's buffers into micro-batches, its pieces.

Must not depend on engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeos.engines.base import CallTensors, GradientTensors


def pieces_of(call: CallTensors, most: int) -> Iterator[CallTensors]:
    """The `call.pieces` calls of at most `most` rows each, in order; after the last row they have
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


def gradient_pieces_of(tensors: GradientTensors, most: int) -> Iterator[GradientTensors]:
    """The `tensors.pieces` calls of gradients of at most `most` tokens each, in order. All share
    the memory for gradients of weights.
    """
    if tensors.pieces == 1:
        most = tensors.tokens
    for number in range(tensors.pieces):
        first = min(tensors.tokens, number * most)
        end = min(tensors.tokens, first + most)
        yield tensors._replace(
            x=tensors.x[first:end],
            d_out=tensors.d_out[first:end],
            topk_ids=tensors.topk_ids[first:end],
            topk_weights=tensors.topk_weights[first:end],
            tokens=end - first,
            d_x=tensors.d_x[first:end],
            d_topk_weights=tensors.d_topk_weights[first:end],
            d_x_added=None if tensors.d_x_added is None else tensors.d_x_added[first:end],
            d_shared=None if tensors.d_shared is None else tensors.d_shared[first:end],
        )


def _tokens_of(
    tokens: torch.Tensor, first: int, end: int, number: int, pieces: int
) -> torch.Tensor:
    """The number of tokens among the rows of one piece. A number below 0 remains so in the first
    piece, and one above all rows is above those of the last, where the error is found.
    """
    least = None if number == 0 else 0
    most = None if number == pieces - 1 else end - first
    return (tokens - first).clamp(least, most)
