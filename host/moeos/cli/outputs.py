# SPDX-License-Identifier: Apache-2.0
"""Keeps what a run's calls were given and computed, and writes that of all ranks into one file.

This file must not depend on layers, or on where tokens come from.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moeos.cli.tensors import write_tensors
from moeos.cli.workload import Batch
from moeos.world.world import World

_PIECE_BYTES = 1 << 19  # of one exchange, which takes up to MAX_PAYLOAD_BYTES with its pickling


class Outputs:
    """One rank's tokens and outputs: of the last call, or of every row of a file of `rows`.

    `speaks`: whether they belong into the file, where another rank's may be the same.
    """

    def __init__(self, rows: int | None, *, speaks: bool = True) -> None:
        self._rows = rows
        self._speaks = speaks
        self._x = self._y = torch.empty(0)

    def keep(self, batch: Batch, out: Tensor) -> None:
        """Notes one call: its arguments, in this machine's memory, and its output [S, H]."""
        y = out.cpu()
        if self._rows is None or batch.places is None:
            self._x, self._y = batch.x, y
            return
        if self._x.ndim == 1:  # the first call
            self._x, self._y = (y.new_zeros(self._rows, y.shape[1]) for _ in range(2))
        self._x[batch.places], self._y[batch.places] = batch.x, y

    def write(self, world: World, path: Path) -> None:
        """Rank 0 writes x and y [tokens, H] of all ranks, in rank order. Collective.

        Raises `OSError`, on rank 0, if the file cannot be written.
        """
        own = (self._x, self._y) if self._speaks else (self._x[:0], self._y[:0])
        every = dict(zip(("x", "y"), (_gather(world, rows) for rows in own), strict=True))
        if world.rank == 0:
            write_tensors(path, every)


def _gather(world: World, mine: Tensor) -> Tensor:
    """The rows of all ranks [tokens, H], in rank order. Collective."""
    words = mine.contiguous().view(torch.uint8).flatten()
    what = "the outputs of the run"
    sizes = world.control.allgather((len(words), tuple(mine.shape)), what)
    parts = [bytearray() for _ in sizes]
    for first in range(0, max(size for size, _ in sizes), _PIECE_BYTES):
        piece = words[first : first + _PIECE_BYTES].numpy().tobytes()
        for part, found in zip(parts, world.control.allgather(piece, what), strict=True):
            part += found
    return torch.cat(
        [
            torch.frombuffer(part, dtype=mine.dtype).view(shape) if part else mine.new_empty(shape)
            for part, (_, shape) in zip(parts, sizes, strict=True)
        ]
    )
