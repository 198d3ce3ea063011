# SPDX-License-Identifier: Apache-2.0
"""Which part of a stored tensor of an expert a rank takes: all of it, or its slice.

This file knows shapes and which rows of gate and up belong together; it must not depend on names,
formats or files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

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
        """This cut of the transposed matrix."""
        return Cut(1 - self.dim, self.runs)

    def indices(self, dims: int) -> list[tuple[slice, ...]]:
        """By run, which elements of a tensor with `dims` dimensions the cut has."""
        before = (slice(None),) * self.dim
        after = (slice(None),) * (dims - self.dim - 1)
        return [(*before, slice(*run), *after) for run in self.runs]

    def of(self, tensor: Tensor) -> Tensor:
        """This cut of a tensor: a view where possible."""
        return self.joined([tensor[index] for index in self.indices(tensor.dim())])

    def joined(self, runs: list[Tensor]) -> Tensor:
        """The runs, joined."""
        if len(runs) == 1:
            return runs[0]
        if runs[0].element_size() == 1:  # not all numbers of 8 bits can be joined
            bits = [run.view(torch.uint8) for run in runs]
            return torch.cat(bits, self.dim).view(runs[0].dtype)
        return torch.cat(runs, self.dim)


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

    def cuts(
        self,
        grains: Mapping[str, tuple[tuple[int, int], ...]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, Cut | None]:
        """What this rank takes of each part of such a tensor, by the part's name in `shapes`.

        Empty where parts have to be taken whole: where their shapes are not those of the matrix's
        format, or a slice ends inside an element. `grains`: the rows and columns for which an
        element of a part stands, 0 for all of them; the first that fits the part's shape counts.
        """
        cut, found = self.cut, dict[str, Cut | None]()
        if cut is None:
            return found
        for part, shape in shapes.items():
            if math.prod(shape) == 1:
                found[part] = None
                continue
            fitting = [each for each in grains.get(part, ()) if self._fits(each, shape)]
            if not fitting:
                return {}
            grain = fitting[0][cut.dim]
            if grain == 0:
                found[part] = None
                continue
            if any(end % grain for run in cut.runs for end in run):
                return {}
            runs = tuple((begin // grain, end // grain) for begin, end in cut.runs)
            found[part] = Cut(cut.dim, runs)
        return found

    def _fits(self, grain: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether elements that stand for this many rows and columns have this shape."""
        grid = [
            1 if n == 0 else -(-length // n) for n, length in zip(grain, self.each, strict=True)
        ]
        return [*shape[:2], *[1] * (2 - len(shape))] == grid
