# SPDX-License-Identifier: Apache-2.0
"""The bytes that launches for calls of gradients are given, for one rank: of a forward call that
saves `SavingArguments` of kernels/sm90/block/arguments.cuh, and of a call of gradients
`GradientArguments` of kernels/sm90/block/backward_arguments.cuh.

The only file that knows the order of what follows `RankArguments`. It launches nothing.
"""

from __future__ import annotations

import struct

import numpy
from torch import Tensor

from moeos import _runtime
from moeos.compile.kernel_shape import DEPTH, ORDERED_ROWS, VALUE_COLUMNS, copies_bytes, has_up_maps
from moeos.config.config import MoEConfig
from moeos.engines.base import CallTensors, GradientTensors
from moeos.engines.cuda.arguments import (
    CELL_BOX_ROWS,
    MAP_ALIGNMENT,
    MAP_BYTES,
    RECORD_BYTES,
    ArgumentPacker,
    Box,
    RankBuffers,
)
from moeos.engines.saved_tensors import Share

_MAPS = (
    *("rows",) * len(CELL_BOX_ROWS),
    *("d_hidden",) * len(CELL_BOX_ROWS),
    *("values", "inputs", "w1", "w1_ordered", "w2", "d_w1", "d_w2"),
)
_SAVED = struct.Struct("<QI")  # saved, saved_of_source
SAVING_RECORD_BYTES = RECORD_BYTES + MAP_ALIGNMENT
"""Bytes of one rank's record of a forward call that saves; other records here begin with one."""
# d_out, d_x, d_topk_weights, d_w1, d_w2, d_b1, d_b2, d_x_added, d_shared; blocks, experts; d_w3
_CALL = struct.Struct("<9Q2IQ")
_CALL_AT = SAVING_RECORD_BYTES + len(_MAPS) * MAP_BYTES
_UP_MAPS = ("w1", "w1_ordered", "d_w1")  # UpGradientMaps
_UPS_AT = -(-(_CALL_AT + _CALL.size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
GRADIENT_RECORD_BYTES = _UPS_AT + len(_UP_MAPS) * MAP_BYTES
"""Bytes of one rank's record; a launch of virtual ranks is given one for each, in rank order."""


class SavingPacker:
    """Packs one rank's records of calls that save, or find what was saved.

    Args:
        of_rank: packs what stands before, for this layer and these sizes; used by this object only.

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
        of_rank: packs what stands before, for this layer and these sizes; used by this object only.
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
        self._weights: tuple[int, ...] | None = None  # the addresses that are packed
        self._gradients: tuple[int, ...] | None = None  # likewise
        self._anywhere = 0  # an address for weights of no expert
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
        between = self._anywhere = buffers.between.data_ptr()
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
        if sizes.world > 1:  # copies, after all else
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
            w3=t.w3,
        )
        self._saving.pack(call, share, identity)
        self._bytes[:SAVING_RECORD_BYTES] = self._saving.record.tobytes()
        weights = _addresses(t.w1, t.w2, t.w3)
        if weights != self._weights:
            self._pack_weights(t.w1, t.w2, t.w3)
            self._weights = weights
        gradients = _addresses(t.d_w1, t.d_w2, t.d_w3)
        if gradients != self._gradients:
            self._pack_gradients(t.d_w1, t.d_w2, t.d_w3)
            self._gradients = gradients
        of_call = (t.d_out, t.d_x, t.d_topk_weights)
        of_weights = (t.d_w1, t.d_w2, t.d_b1, t.d_b2)
        told = (*of_call, *of_weights, t.d_x_added, t.d_shared)
        of_ups = _addresses(t.d_w3)
        _CALL.pack_into(self._bytes, _CALL_AT, *_addresses(*told), self._blocks, len(t.w1), *of_ups)

    def _pack_weights(self, w1: Tensor, w2: Tensor, w3: Tensor | None) -> None:
        cfg, packer = self._cfg, self._of_rank
        rows = Box(VALUE_COLUMNS, cfg.dtype)
        if cfg.transposed:
            columns = w1.shape[2]
            self._place(_MAPS.index("w1"), packer.map_of("w1", w1, columns, rows))
            if w3 is not None:
                self._place_up("w1", packer.map_of("w3", w3, columns, rows))
            # Rows in the order of the accumulators of h: where gates and ups take turns, a thread
            # has units l and l + 4 of eight, and elsewhere 2l and 2l + 1.
            pair, four = (4, 1) if cfg.gate_up == "interleaved" else (1, 2)
            inner = cfg.intermediate
            order = [(2, pair, 2), (4, four, 4), (inner // 8, 8, VALUE_COLUMNS // 8)]
            of_w2 = self._matrices("w2", w2, cfg.hidden, order, inner)
            self._place(_MAPS.index("w2"), of_w2)
            return
        groups = DEPTH if cfg.intermediate % DEPTH == 0 else ORDERED_ROWS
        ordered = Box(groups, cfg.dtype, ordered=True)
        apart = 2 if cfg.gate_up == "interleaved" else 1
        for name, box in (("w1", rows), ("w1_ordered", ordered)):
            self._place(_MAPS.index(name), packer.map_of("w1", w1, cfg.hidden, box, apart))
            if cfg.gate_up != "concatenated":
                ups, first = (w1, 1) if w3 is None else (w3, 0)
                self._place_up(name, packer.map_of("w1", ups, cfg.hidden, box, apart, first))
        of_w2 = packer.map_of("w2", w2, cfg.intermediate, Box(DEPTH, cfg.dtype))
        self._place(_MAPS.index("w2"), of_w2)

    def _pack_gradients(
        self, d_w1: Tensor | None, d_w2: Tensor | None, d_w3: Tensor | None
    ) -> None:
        """Maps of what consumer warps store: kernels/sm90/weight_gradients.cuh."""
        cfg, hidden, inner = self._cfg, self._cfg.hidden, self._cfg.intermediate
        # Each dimension but the columns: its size, its stride in rows, and what a box has of it.
        natural = [(4, 2, 4), (2, 1, 2)]
        kept = [(inner // 8, 8, 4), (2, 1, 2), (4, 2, 2)]
        rows, columns = (inner, hidden) if cfg.transposed else (hidden, inner)
        if d_w2 is not None and len(d_w2) > 0:
            dimensions = [*natural, (rows // 8, 8, 2)]
            of_w2 = self._matrices("d_w2", d_w2, columns, dimensions, rows)
            self._place(_MAPS.index("d_w2"), of_w2)
        ups, first = (d_w3, 0) if cfg.gate_up == "separate" else (d_w1, 1)
        for place, matrix, nth in ((self._place_gates, d_w1, 0), (self._place_up, ups, first)):
            if matrix is None or len(matrix) == 0 or (nth > 0 and not self._has_up_gradients):
                continue
            if cfg.transposed:
                halves = cfg.gated and cfg.gate_up == "concatenated"
                columns = inner if halves else matrix.shape[2]
                dimensions = [*natural, (hidden // 8, 8, 2)]
                made = self._matrices(
                    "d_w1",
                    matrix,
                    columns,
                    dimensions,
                    hidden,
                    row_elements=matrix.shape[2],
                    first=nth * inner,
                )
            else:
                apart = 2 if cfg.gate_up == "interleaved" else 1
                made = self._matrices(
                    "d_w1",
                    matrix,
                    hidden,
                    kept,
                    inner,
                    row_elements=apart * hidden,
                    first=nth * hidden,
                )
            place("d_w1", made)

    @property
    def _has_up_gradients(self) -> bool:
        """kUpGradientMaps of kernels/sm90/block/backward_arguments.cuh."""
        cfg = self._cfg
        side_by_side = cfg.transposed and cfg.gated and cfg.gate_up == "concatenated"
        return has_up_maps(cfg) or side_by_side

    def _matrices(
        self,
        name: str,
        tensor: Tensor,
        columns: int,
        dimensions: list[tuple[int, int, int]],
        rows: int,
        *,
        row_elements: int | None = None,
        first: int = 0,
    ) -> bytes:
        """The map of matrices with `rows` rows, from element `first` of each row on, a box of one
        matrix. `row_elements`: from one row to the next; None: `columns`.
        """
        size = tensor.element_size()
        row_elements = columns if row_elements is None else row_elements
        matrices = tensor.numel() // (rows * row_elements)
        return self._of_rank.encode_dimensions(
            name,
            tensor.data_ptr() + first * size if matrices > 0 else self._anywhere,
            columns,
            [*dimensions, (max(1, matrices), rows, 1)],
            Box(0, self._cfg.dtype),
            row_elements * size,
        )

    def _place_gates(self, name: str, tensor_map: bytes) -> None:
        self._place(_MAPS.index(name), tensor_map)

    def _place_up(self, name: str, tensor_map: bytes) -> None:
        at = _UPS_AT + _UP_MAPS.index(name) * MAP_BYTES
        self._bytes[at : at + MAP_BYTES] = tensor_map

    def _rows(self, address: int, rows: int, columns: int, height: int, row_bytes: int) -> bytes:
        box = Box(height, self._cfg.dtype)
        return self._of_rank.encode("the heap", address, rows, columns, box, row_bytes)

    def _place(self, index: int, tensor_map: bytes) -> None:
        at = SAVING_RECORD_BYTES + index * MAP_BYTES
        self._bytes[at : at + MAP_BYTES] = tensor_map


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    """The address of each tensor; 0 where there is none."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
