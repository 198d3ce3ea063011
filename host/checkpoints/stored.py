# SPDX-License-Identifier: Apache-2.0
"""Which part of a stored tensor of an expert a rank takes: all of it, or its slice.

It knows shapes, and which rows of gate and up belong together. It knows no names, no format and no
file.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a rank takes of a tensor: runs of one of its dimensions, and all of the others.

    Attributes:
        dim: which one.
        runs: where they begin and end.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]

    def turned(self) -> Cut:
        """The same of a matrix that lies the other way."""
        return Cut(1 - self.dim, self.runs)

    def indices(self, dims: int) -> list[tuple[slice, ...]]:
        """By run, which elements of a tensor with so many dimensions it has."""
        before = (slice(None),) * self.dim
        after = (slice(None),) * (dims - self.dim - 1)
        return [(*before, slice(*run), *after) for run in self.runs]

    def of(self, tensor: Tensor) -> Tensor:
        """It of a tensor: a view where it can be."""
        return self.joined([tensor[index] for index in self.indices(tensor.dim())])

    def joined(self, runs: list[Tensor]) -> Tensor:
        """What the runs are together."""
        return runs[0] if len(runs) == 1 else torch.cat(runs, self.dim)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A matrix or a bias of each expert, [outputs, inputs] or [outputs].

    Attributes:
        names: of the tensors that a checkpoint has of it: their rows follow each other.
        whole: its shape there.
        mine: its shape on this rank, which is `whole` but in one dimension, or `whole`.
        number: which of the equal slices this rank has.
        halves: the parts of its rows of which each is cut alone: those of gate, and of up.
        interleaved: whether rows of gate and up take turns in a checkpoint.
    """

    names: tuple[str, ...]
    whole: tuple[int, ...]
    mine: tuple[int, ...]
    number: int
    halves: int = 1
    interleaved: bool = False

    @property
    def each(self) -> tuple[int, ...]:
        """The shape of the tensor of one name."""
        return (self.whole[0] // len(self.names), *self.whole[1:])

    @property
    def my_each(self) -> tuple[int, ...]:
        """The shape of what this rank has of that."""
        return (self.mine[0] // len(self.names), *self.mine[1:])

    @property
    def halves_of_each(self) -> int:
        """Halves in the tensor of one name."""
        return self.halves // len(self.names)

    @property
    def cut(self) -> Cut | None:
        """What this rank takes of the tensor of one name as it is stored; None: all of it."""
        for dim, (length, own) in enumerate(zip(self.each, self.my_each, strict=True)):
            if own != length:
                parts = 1 if dim > 0 or self.interleaved else self.halves_of_each
                part, each = length // parts, own // parts
                begins = [at * part + self.number * each for at in range(parts)]
                return Cut(dim, tuple((begin, begin + each) for begin in begins))
        return None
