# SPDX-License-Identifier: Apache-2.0
"""The tensor in which a call keeps results of GEMM0, and each piece's share of it.

Must not depend on engines, nor on which row lies where.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeos.engines.base import GradientTensors
from moeos.engines.saved_rows import SavedRows


class Share(NamedTuple):
    """Rows of a piece: from its first one on, and how many each source has."""

    rows: Tensor
    of_source: int


def room_for(rule: SavedRows, w1_rows: int, x: Tensor, pieces: int) -> Tensor:
    """Memory for the rows that a call with x keeps, of `w1_rows` numbers each."""
    return x.new_empty((rule.of_call(x.shape[0], pieces), w1_rows))


def shares_of(rule: SavedRows, saved: Tensor, x: Tensor, pieces: int) -> list[Share]:
    """Each piece's share of `saved`."""
    found = []
    first = 0
    for rows in rule.of_pieces(x.shape[0], pieces):
        found.append(Share(saved[first:], rows))
        first += rule.sources * rows
    return found


def shares_to_load(
    rule: SavedRows, w1_rows: int, tensors: GradientTensors, rank: int
) -> list[Share]:
    """Each piece's share of the saved rows in a call of gradients.

    Raises `ValueError` for saved rows that are not a forward call's, as a saved-tensor hook may
    return them.
    """
    saved, x = tensors.saved, tensors.x
    shape = [rule.of_call(x.shape[0], tensors.pieces), w1_rows]
    right = list(saved.shape) == shape and saved.dtype == x.dtype and saved.device == x.device
    if not (right and saved.is_contiguous()):
        raise ValueError(
            f"rank {rank}: the rows that a forward call has saved are now "
            f"{saved.dtype} {list(saved.shape)} on {saved.device}; they must be contiguous "
            f"{x.dtype} {shape} on {x.device}: return from saved-tensor hooks what was packed"
        )
    return shares_of(rule, saved, x, tensors.pieces)
