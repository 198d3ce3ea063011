# SPDX-License-Identifier: Apache-2.0
"""The bytes that launches for calls of gradients are given, for one rank: of a forward call that
saves `SavingArguments` of kernels/sm90/arguments.cuh, and of a call of gradients
`GradientArguments` of kernels/sm90/gradient_arguments.cuh.

The only file that knows the order of what stands behind `RankArguments`. It launches nothing.
"""

from __future__ import annotations

import struct

import numpy
from torch import Tensor

from moeos import _runtime
from moeos.config import MoEConfig
from moeos.engines.base import CallTensors, GradientTensors
from moeos.engines.cuda_arguments import (
    CELL_BOX_ROWS,
    MAP_ALIGNMENT,
    MAP_BYTES,
    RECORD_BYTES,
    ArgumentPacker,
    Box,
    RankBuffers,
)
from moeos.engines.saved_tensors import Share
from moeos.kernel_shape import DEPTH, ORDERED_ROWS, TURN_COLUMNS, copies_bytes

_MAPS = (
    *("rows",) * len(CELL_BOX_ROWS),
    *("d_hidden",) * len(CELL_BOX_ROWS),
    *("values", "inputs", "w1", "w1_ordered", "w2", "d_w1", "d_w2"),
)
_SAVED = struct.Struct("<QI")  # saved, saved_of_source
SAVING_RECORD_BYTES = RECORD_BYTES + MAP_ALIGNMENT
"""Of one rank's record of a forward call that saves, and of the begin of every other here."""
# d_out, d_x, d_topk_weights, d_w1, d_w2, d_b1, d_b2, d_x_added, d_shared; blocks, experts
_CALL = struct.Struct("<9Q2I")
_CALL_AT = SAVING_RECORD_BYTES + len(_MAPS) * MAP_BYTES
GRADIENT_RECORD_BYTES = -(-(_CALL_AT + _CALL.size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
"""Of one rank's record; a launch of virtual ranks is given one for each, in rank order."""


class SavingPacker:
    """Packs one rank's records of calls that save, or find what was saved.

    Args:
        of_rank: packs what stands before: of the same layer and sizes, and nobody else's.

    Attributes:
        record: uint8 [SAVING_RECORD_BYTES], what `pack` has made; the next `pack` changes it.
    """

    def __init__(self, of_rank: ArgumentPacker) -> None:
        self._of_rank = of_rank
        self.record = numpy.zeros(SAVING_RECORD_BYTES, dtype=numpy.uint8)
        self._bytes = memoryview(self.record)  # type: ignore[arg-type]

    def pack_code(self, address: int, size: int) -> None:
        """See `ArgumentPacker.pack_code`."""
        self._of_rank.pack_code(address, size)

    def use(self, buffers: RankBuffers) -> None:
        """See `ArgumentPacker.use`."""
        self._of_rank.use(buffers)

    def pack(self, tensors: CallTensors, share: Share, identity: int) -> None:
        """Makes `record` that of a call; `share`: where its rows are saved.

        Raises what `ArgumentPacker.pack` raises.
        """
        self._of_rank.pack(tensors, identity)
        self._bytes[:RECORD_BYTES] = self._of_rank.record.tobytes()
        _SAVED.pack_into(self._bytes, RECORD_BYTES, share.rows.data_ptr(), share.of_source)


class GradientPacker:
    """Packs one rank's records, all in one place.

    Args:
        cfg: the layer without its shared experts.
        of_rank: packs what stands before: of the same layer and sizes, and nobody else's.
        blocks: of the launch that makes the gradients of weights.

    Attributes:
        record: uint8 [GRADIENT_RECORD_BYTES], what `pack` has made; the next `pack` changes it.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        sizes: _runtime.Sizes,
        of_rank: ArgumentPacker,
        blocks: int,
    ) -> None:
        self._cfg = cfg
        self._sizes = sizes
        self._of_rank = of_rank
        self._saving = SavingPacker(of_rank)
        self._blocks = blocks
        self._weights: tuple[int, int] | None = None  # the addresses that are packed
        self._gradients: tuple[int, ...] | None = None  # likewise
        self.record = numpy.zeros(GRADIENT_RECORD_BYTES, dtype=numpy.uint8)
        self._bytes = memoryview(self.record)  # type: ignore[arg-type]

    def pack_code(self, address: int, size: int) -> None:
        """See `ArgumentPacker.pack_code`."""
        self._of_rank.pack_code(address, size)

    def use(self, buffers: RankBuffers) -> None:
        """See `ArgumentPacker.use`."""
        cfg, sizes, size = self._cfg, self._sizes, self._cfg.dtype.itemsize
        self._of_rank.use(buffers)
        cells = buffers.heap.data_ptr() + buffers.place.rows_at
        between = buffers.between.data_ptr()
        of_cells = sizes.cells * buffers.place.stride_rows
        kept = sizes.world * sizes.cell_rows_used
        columns = -(-cfg.intermediate // DEPTH) * DEPTH
        halves = 2 if cfg.gated else 1
        for index, rows in enumerate(CELL_BOX_ROWS):
            in_cells = self._rows(cells, of_cells, 2 * cfg.hidden, rows, sizes.sent_bytes)
            self._place(_MAPS.index("rows") + index, in_cells)
            factor = between + columns * size
            d_hidden = self._rows(factor, kept, halves * columns, rows, sizes.hidden_bytes)
            self._place(_MAPS.index("d_hidden") + index, d_hidden)
        values = self._rows(between, kept, columns, DEPTH, sizes.hidden_bytes)
        self._place(_MAPS.index("values"), values)
        inputs = self._rows(cells, of_cells, 2 * cfg.hidden, DEPTH, sizes.sent_bytes)
        if sizes.world > 1:  # copies, behind all else
            copies = between + sizes.hidden_bytes - copies_bytes(cfg)
            inputs = self._rows(copies, kept, 2 * cfg.hidden, DEPTH, sizes.hidden_bytes)
        self._place(_MAPS.index("inputs"), inputs)

    def pack(self, tensors: GradientTensors, share: Share, sent: Tensor, identity: int) -> None:
        """Makes `record` that of a call; `share`: what was saved for it; `sent`: uint8
        [rows, `Sizes.sent_bytes`], memory for the rows that are sent.

        Raises what `ArgumentPacker.pack` raises.
        """
        t = tensors
        call = CallTensors(
            x=t.x,
            out=sent,
            gate=None,
            selection_bias=None,
            topk_ids=t.topk_ids,
            topk_weights=t.topk_weights,
            w1=t.w1,
            b1=t.b1,
            w2=t.w2,
            b2=t.b2,
        )
        self._saving.pack(call, share, identity)
        self._bytes[:SAVING_RECORD_BYTES] = self._saving.record.tobytes()
        weights = t.w1.data_ptr(), t.w2.data_ptr()
        if weights != self._weights:
            self._pack_weights(t.w1, t.w2)
            self._weights = weights
        gradients = tuple(0 if made is None else made.data_ptr() for made in (t.d_w1, t.d_w2))
        if gradients != self._gradients:
            self._pack_gradients(t.d_w1, t.d_w2)
            self._gradients = gradients
        of_call = (t.d_out, t.d_x, t.d_topk_weights)
        of_weights = (t.d_w1, t.d_w2, t.d_b1, t.d_b2)
        told = (*of_call, *of_weights, t.d_x_added, t.d_shared)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in told]
        _CALL.pack_into(self._bytes, _CALL_AT, *addresses, self._blocks, len(t.w1))

    def _pack_weights(self, w1: Tensor, w2: Tensor) -> None:
        cfg, packer = self._cfg, self._of_rank
        groups = DEPTH if cfg.intermediate % DEPTH == 0 else ORDERED_ROWS
        boxes = {
            "w1": (w1, cfg.hidden, Box(TURN_COLUMNS, cfg.dtype)),
            "w1_ordered": (w1, cfg.hidden, Box(groups, cfg.dtype, ordered=True)),
            "w2": (w2, cfg.intermediate, Box(DEPTH, cfg.dtype)),
        }
        for name, (matrix, columns, box) in boxes.items():
            self._place(_MAPS.index(name), packer.map_of(name[:2], matrix, columns, box))

    def _pack_gradients(self, d_w1: Tensor | None, d_w2: Tensor | None) -> None:
        """Maps of what consumer warps store: kernels/sm90/weight_gradients.cuh."""
        cfg = self._cfg
        # Each dimension but the columns: its size, its stride in rows, and what a box has of it.
        of_d_w1 = [(cfg.intermediate // 8, 8, 4), (2, 1, 2), (4, 2, 2)]
        of_d_w2 = [(4, 2, 4), (2, 1, 2), (cfg.hidden // 8, 8, 2)]
        for name, matrix, rows, columns, dimensions in (
            ("d_w1", d_w1, cfg.intermediate, cfg.hidden, of_d_w1),
            ("d_w2", d_w2, cfg.hidden, cfg.intermediate, of_d_w2),
        ):
            if matrix is not None and len(matrix) > 0:
                matrices = matrix.numel() // (rows * columns)  # gates and ups are two
                made = self._of_rank.encode_dimensions(
                    name,
                    matrix.data_ptr(),
                    columns,
                    [*dimensions, (matrices, rows, 1)],
                    Box(0, cfg.dtype),
                )
                self._place(_MAPS.index(name), made)

    def _rows(self, address: int, rows: int, columns: int, height: int, row_bytes: int) -> bytes:
        box = Box(height, self._cfg.dtype)
        return self._of_rank.encode("the heap", address, rows, columns, box, row_bytes)

    def _place(self, index: int, tensor_map: bytes) -> None:
        at = SAVING_RECORD_BYTES + index * MAP_BYTES
        self._bytes[at : at + MAP_BYTES] = tensor_map
