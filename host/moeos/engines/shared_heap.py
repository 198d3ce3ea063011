# SPDX-License-Identifier: Apache-2.0
"""Where the words and rows of several shapes of layers lie in the one heap that they share.

[header][words of shape 1][words of shape 2]...[room for words][cells of rows][results]. The cells
of all shapes begin at nearly the same bytes, and no shape's cells lie where another's results do
(runtime/memory/layout.hpp). This file allocates nothing, and must depend on sizes alone.
"""

from __future__ import annotations

import dataclasses

from moeos import _runtime

_ALIGNMENT = 128
_ROOM = 2
"""This many times the words of the shapes so far are kept for words."""


@dataclasses.dataclass(frozen=True)
class HeapPlace:
    """`moeos::HeapPlace`: where a shape's words, cells and results begin, and rows from cell to
    cell."""

    words_at: int
    rows_at: int
    results_at: int
    stride_rows: int


@dataclasses.dataclass(frozen=True)
class SharedHeap:
    """The plan of a heap; the same on all ranks that admit the same shapes in the same order.

    Attributes:
        shapes: in the order in which they came.
        rows_at: where the cells begin.
        stride: bytes from one cell to the next, at most.
        results_at: where the results begin.
        size: bytes of the heap.
    """

    shapes: tuple[_runtime.Sizes, ...] = ()
    rows_at: int = 0
    stride: int = 0
    results_at: int = 0
    size: int = 0

    def with_shape(self, sizes: _runtime.Sizes) -> SharedHeap:
        """The plan with one more shape; only `shapes` changes if it fits."""
        shapes = (*self.shapes, sizes)
        words = _words_end(shapes)
        wide = max(shape.sent_bytes for shape in shapes)
        stride = max(shape.cell_places * shape.sent_bytes for shape in shapes)
        if len({shape.sent_bytes for shape in shapes}) > 1:
            # A shape's cells are whole rows of its own, so they may begin this much earlier than
            # another shape's.
            stride += sizes.cells * wide
        rows_at, stride = self.rows_at, max(stride, self.stride)
        if words > rows_at:
            header = sizes.header_bytes
            sums = sum(shape.sums_bytes for shape in shapes)  # rows: no room is kept for more
            rows_at = header + _align(_ROOM * (words - header - sums) + sums)
        tail = max(shape.tile_rows * shape.sent_bytes for shape in shapes)
        results_at = max(self.results_at, _align(rows_at + sizes.cells * stride + tail))
        results = max(shape.result_bytes for shape in shapes)
        size = max(self.size, _align(results_at + results))
        return SharedHeap(shapes, rows_at, stride, results_at, size)

    def grew_from(self, other: SharedHeap) -> bool:
        """Whether shapes do not lie where they do in the other plan."""
        return dataclasses.replace(self, shapes=other.shapes) != other

    def place(self, index: int) -> HeapPlace:
        """Where a shape lies, by its place in `shapes`."""
        shape = self.shapes[index]
        words_at = _words_end(self.shapes[:index]) if index > 0 else shape.header_bytes
        stride_rows = self.stride // shape.sent_bytes
        return HeapPlace(words_at, self.rows_at, self.results_at, stride_rows)


def _words_end(shapes: tuple[_runtime.Sizes, ...]) -> int:
    return shapes[0].header_bytes + sum(shape.words_bytes for shape in shapes)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
