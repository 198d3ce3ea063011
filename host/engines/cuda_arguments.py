"""The bytes that a launch is given: `RankArguments` of kernels/sm90/arguments.cuh, for one rank.

The only file that knows the fields' order, and the boxes in which the kernel loads matrices. It
launches nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import struct

import torch
from torch import Tensor

from moeos import _twin
from moeos.config import MoEConfig
from moeos.engines.base import CallTensors

MAX_MAPS = 512
"""Tensor maps of a rank that are kept for the next call."""

_FIELDS = struct.Struct(
    "<"
    + "128s" * 10  # tensor maps: x, gate, cells[3], w1, w2, intermediate[3]
    # heap, memory, peers, x_rows, selection_bias, topk_ids, topk_weights, b1, b2,
    # intermediate_rows, out, deadline_ns
    + "12Q"
    + "4I"  # rank, tokens, pair_limit, reserved
)
_MAP_ALIGNMENT = 64
RECORD_BYTES = -(-_FIELDS.size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
"""Of one rank's record; a launch of virtual ranks is given one for each, in rank order."""

_BOX_COLUMNS = 64  # 128 bytes, one row of a stage
_TILE_BOX_ROWS = 128  # of w1, w2
_ROUTE_BOX_ROWS = 64  # of x
_GATE_BOX_ROWS = (64, 128, 256)  # the first that holds all experts
_SEGMENT_BOX_ROWS = (128, 32, 8)  # of cells and of the buffer between the GEMMs
_ADDRESS_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBuffers:
    """One rank's device memory, which lives as long as its layer.

    Attributes:
        heap: uint8, the symmetric heap.
        memory: uint8, the rank's queues, counters and maps.
        intermediate: [rows, I] in the layer's dtype, between the GEMMs.
        peers: int64 [P], the addresses of all ranks' heaps.
    """

    heap: Tensor
    memory: Tensor
    intermediate: Tensor
    peers: Tensor


class ArgumentPacker:
    """Packs one rank's records. Tensor maps of matrices that come again are made once.

    Args:
        deadline: seconds.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        sizes: _twin.Sizes,
        rank: int,
        deadline: float,
        buffers: RankBuffers,
    ) -> None:
        self._cfg = cfg
        self._rank = rank
        self._deadline_ns = int(deadline * 1e9)
        self._gate_box_rows = next(n for n in _GATE_BOX_ROWS if cfg.experts <= n)
        self._buffers = buffers
        self._maps: dict[tuple[int, int, int, int], bytes] = {}
        self._driver = importlib.import_module("cuda.bindings.driver")
        cells = buffers.heap.data_ptr() + sizes.first_cell
        between = buffers.intermediate
        self._cell_maps = [
            self._encode("the heap", cells, sizes.cells * sizes.cell_rows, cfg.hidden, rows)
            for rows in _SEGMENT_BOX_ROWS
        ]
        self._intermediate_maps = [
            self._encode("the buffer", between.data_ptr(), len(between), cfg.intermediate, rows)
            for rows in _SEGMENT_BOX_ROWS
        ]

    def pack(self, tensors: CallTensors, pair_limit: int) -> bytes:
        """The record of one call: `RECORD_BYTES` bytes.

        Raises `ValueError` if a tensor lies at an address that tensor maps cannot have.
        """
        t, buffers = tensors, self._buffers
        hidden, intermediate = self._cfg.hidden, self._cfg.intermediate
        if len(t.x) > 0:
            x_map = self._map("x", t.x, hidden, _ROUTE_BOX_ROWS)
            x, out = t.x, t.out
        else:  # their rows are never used, but there must be an address
            x_map = self._intermediate_maps[0]
            x = out = buffers.intermediate
        record = _FIELDS.pack(
            x_map,
            self._map("gate.weight", t.gate, hidden, self._gate_box_rows),
            *self._cell_maps,
            self._map("w1", t.w1, hidden, _TILE_BOX_ROWS),
            self._map("w2", t.w2, intermediate, _TILE_BOX_ROWS),
            *self._intermediate_maps,
            buffers.heap.data_ptr(),
            buffers.memory.data_ptr(),
            buffers.peers.data_ptr(),
            x.data_ptr(),
            _address(t.selection_bias),
            self._given(t.topk_ids),
            self._given(t.topk_weights),
            _address(t.b1),
            _address(t.b2),
            buffers.intermediate.data_ptr(),
            out.data_ptr(),
            self._deadline_ns,
            self._rank,
            len(t.x),
            pair_limit,
            0,
        )
        return record.ljust(RECORD_BYTES, b"\0")

    def _given(self, tensor: Tensor | None) -> int:
        """The address of routing given by the caller; 0 means that there is none."""
        if tensor is None:
            return 0
        return tensor.data_ptr() or self._buffers.intermediate.data_ptr()  # no tokens: never read

    def _map(self, name: str, matrix: Tensor, columns: int, box_rows: int) -> bytes:
        """The tensor map of a contiguous tensor whose last dimension has `columns` elements."""
        rows = matrix.numel() // columns
        key = (matrix.data_ptr(), rows, columns, box_rows)
        found = self._maps.get(key)
        if found is None:
            found = self._encode(name, matrix.data_ptr(), rows, columns, box_rows)
            if len(self._maps) == MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            self._maps[key] = found
        return found

    def _encode(self, name: str, address: int, rows: int, columns: int, box_rows: int) -> bytes:
        if address % _ADDRESS_ALIGNMENT != 0:
            raise ValueError(
                f"{name} lies at address {address:#x}; it must be a multiple of "
                f"{_ADDRESS_ALIGNMENT}: pass a copy, {name}.clone()"
            )
        driver = self._driver
        kind = driver.CUtensorMapDataType
        status, made = driver.cuTensorMapEncodeTiled(
            kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            if self._cfg.dtype == torch.float16
            else kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(columns * self._cfg.dtype.itemsize)],
            [driver.cuuint32_t(_BOX_COLUMNS), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(status) != 0:
            raise RuntimeError(f"no tensor map of {name}, [{rows}, {columns}]: {status.name}")
        return struct.pack("<16Q", *map(int, made.opaque))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
