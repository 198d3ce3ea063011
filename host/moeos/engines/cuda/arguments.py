# SPDX-License-Identifier: Apache-2.0
"""The bytes that a launch is given: `RankArguments` of kernels/sm90/block/arguments.cuh, for one
rank.

The only file that knows the fields' order, and the boxes in which the kernel loads matrices. It
launches nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

from moeos import _runtime
from moeos.compile import kernel_shape
from moeos.compile.kernel_shape import ORDERED_ROWS
from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS
from moeos.engines.base import CallTensors, require_memory
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.shared_heap import HeapPlace
from moeos.system import tensor_memory

Key = TypeVar("Key")
Maps = TypeVar("Maps")

MAX_KEPT = 256
"""Places of tokens, and sets of parameters, whose tensor maps a rank keeps for later calls."""

WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes in which the kernel reads weights from the caller: WeightType of arguments.cuh."""

_MAP_TYPES = {
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.uint8: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
}
_PARAMETER_FIELDS = (
    *("gate", "selection_bias", "router_bias", "expert_scale"),
    *("w1", "b1", "w2", "b2", "w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2"),
    *("shared_w1_scale", "shared_w2_scale", "shared_w1_scale_2", "shared_w2_scale_2"),
    *("shared_w1", "shared_w2", "shared_gate", "w3"),
)
MAP_BYTES = 128
CELL_BOX_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Heights of boxes of rows that may be of any number."""
_INTERMEDIATE_BOX_ROWS = tuple(n for n in CELL_BOX_ROWS if n >= _runtime.SEGMENT_ALIGN)
_MAPS = (
    *("x", "x_row", "gate", *("cells",) * len(CELL_BOX_ROWS)),
    *("w1", "w1_narrow", "w2", "w1_deep", "w2_deep"),
    *("intermediate",) * len(_INTERMEDIATE_BOX_ROWS),
    *("shared_w1", "shared_w1_narrow", "shared_w2", "shared_w1_deep", "shared_w2_deep"),
    *("shared_gate", "shared_between"),
)
# heap; control, tables and records; peers, intermediate_rows; HeapPlace; rank, host_failure,
# deadline_ns
_LAYER = struct.Struct("<9QI4xI4x2Q")
_CODE = struct.Struct("<2Q")  # code, code_bytes
# selection_bias, router_bias, expert_scale, b1, b2, w1_scale, w2_scale, w1_scale_2, w2_scale_2, and
# the last four of the shared experts
_PARAMETERS = struct.Struct("<13Q")
# x_rows, out, topk_ids, topk_weights, token_count, x_scale; rows, ids_wide, weight_type, any_ids,
# identity, x_scale_is_exponent, leaves_partials
_CALL = struct.Struct("<6Q7I")

_X_AT = _MAPS.index("x") * MAP_BYTES  # that map and the next
_GATE_AT = _MAPS.index("gate") * MAP_BYTES
_WEIGHTS_AT = _MAPS.index("w1") * MAP_BYTES  # five maps
_SHARED_AT = _MAPS.index("shared_w1") * MAP_BYTES  # six maps
_LAYER_AT = len(_MAPS) * MAP_BYTES
_CODE_AT = _LAYER_AT + _LAYER.size
_PARAMETERS_AT = _CODE_AT + _CODE.size
_CALL_AT = _PARAMETERS_AT + _PARAMETERS.size
MAP_ALIGNMENT = 64
RECORD_BYTES = -(-(_CALL_AT + _CALL.size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
"""Bytes of one rank's record; a launch of virtual ranks is given one for each, in rank order."""

_BOX_BYTES = 128  # a box's row, one row of a stage
_BOX_COLUMNS = 64  # columns of weights in a box: kTileDepth
_ROUTE_BOX_ROWS = 64  # rows of x in a box
_TOKEN_BOX_ROWS = 64  # rows of tokens between the shared experts' GEMMs in a box
_SHARED_GATE_ROWS = 8  # rows in a box of the shared experts' gate, which has one

_ROWS_TOGETHER = 8  # rows at whose multiples such a box may begin
ADDRESS_ALIGNMENT = 16
"""The alignment of addresses at which tensor maps and vectors of a kernel begin."""


class Box(NamedTuple):
    """What a tensor map loads at once: `row_bytes` bytes, the swizzle's width, of each of its rows,
    whose elements are of a type; `ordered`: its rows lie in an order of their own.
    """

    rows: int
    element: torch.dtype
    row_bytes: int = _BOX_BYTES
    ordered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBuffers:
    """One rank's device memory that the layers of one shape share.

    Attributes:
        heap: uint8, the symmetric heap.
        place: where in it the shape lies.
        control: uint8, what depends on the world alone.
        tables: uint8, the shape's queues, counters and maps.
        between: uint8, rows between the GEMMs.
        peers: int64 [2, P], see `cuda_peers.Peers.table`.
    """

    heap: Tensor
    place: HeapPlace
    control: Tensor
    tables: Tensor
    between: Tensor
    peers: Tensor


class ArgumentPacker:
    """Packs one rank's records, all in one place; what is as in the call before stays there.

    Args:
        deadline: seconds.
        host_failure: address of the memory of `cuda_records.HostFailure`.
        records: of the layer.

    Attributes:
        record: uint8 [RECORD_BYTES], what `pack` has made; the next `pack` changes it.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        sizes: _runtime.Sizes,
        rank: int,
        deadline: float,
        host_failure: int,
        records: Tensor,
    ) -> None:
        self._cfg = cfg
        self._sizes = sizes
        self._of_layer = (rank, host_failure, int(deadline * 1e9))
        self._records = records.data_ptr()
        self._device = records.device
        self._gate_box_rows = kernel_shape.route_columns(cfg)
        self._maps_of_x: dict[tuple[int, int, bool], bytes] = {}
        self._maps_of_parameters: dict[tuple[int, ...], tuple[bytes, bytes, bytes]] = {}
        self._driver = cuda_driver.load()
        self.record = numpy.zeros(RECORD_BYTES, dtype=numpy.uint8)
        self._bytes = memoryview(self.record)  # type: ignore[arg-type]
        self._anywhere = 0  # an address for what has no rows
        # Address and rows of the maps of x that are packed, and whether it is no codes.
        self._x: tuple[int, int, bool] | None = None
        self._parameters: tuple[int, ...] | None = None  # the addresses that are packed
        self._given: tuple[int, ...] = (0, 0, 0, 0, 0)  # rows, addresses of what comes with them

    def use(self, buffers: RankBuffers) -> None:
        """Makes the next calls use these buffers, which live as long as they are used."""
        cfg, sizes, place = self._cfg, self._sizes, buffers.place
        heap, between = buffers.heap.data_ptr(), buffers.between.data_ptr()
        for index, rows in enumerate(CELL_BOX_ROWS):
            count = sizes.cells * place.stride_rows
            cell_map = self.encode(
                "the heap",
                heap + place.rows_at,
                count,
                cfg.hidden,
                self._rows_box(rows),
                sizes.sent_bytes,
            )
            self._place(_MAPS.index("cells") + index, cell_map)
        for index, rows in enumerate(_INTERMEDIATE_BOX_ROWS):
            count = sizes.intermediate_rows
            between_map = self.encode(
                "the buffer",
                between,
                count,
                cfg.intermediate,
                self._rows_box(rows),
                sizes.hidden_bytes,
            )
            self._place(_MAPS.index("intermediate") + index, between_map)
        if cfg.shared_experts > 0:
            values = cfg.shared_experts * cfg.shared_intermediate
            rows = sizes.shared_between_bytes // sizes.shared_bytes
            shared = between + sizes.shared_between_at
            shared_map = self.encode("the buffer", shared, rows, values, self._box(_TOKEN_BOX_ROWS))
            self._place(_MAPS.index("shared_between"), shared_map)
        rank, host_failure, deadline_ns = self._of_layer
        _LAYER.pack_into(
            self._bytes,
            _LAYER_AT,
            heap,
            buffers.control.data_ptr(),
            buffers.tables.data_ptr(),
            self._records,
            buffers.peers.data_ptr(),
            between,
            place.words_at,
            place.rows_at,
            place.results_at,
            place.stride_rows,
            rank,
            host_failure,
            deadline_ns,
        )
        self._anywhere = between

    def pack_code(self, address: int, size: int) -> None:
        """Says in `record` where the kernel's instructions lie, and how many bytes they are."""
        _CODE.pack_into(self._bytes, _CODE_AT, address, size)

    def pack(self, tensors: CallTensors, identity: int, leaves_partials: bool = False) -> None:
        """Makes `record` that of a call; `identity`: see `moeos.engines.calls`; `leaves_partials`:
        see runtime/words/call.hpp.

        Routing must be contiguous, and its weights of 16 or 32 bits. Raises `ValueError` if a
        tensor lies on another device, at an address that tensor maps cannot have, or has not all of
        its memory: that is asked where its address is a new one, as a storage that is cut moves.
        """
        # By place, as names cost more; the order is that of the fields.
        x, out, gate, bias, ids, weights, w1, b1, w2, b2, count, any_ids = tensors[:12]
        router_bias, expert_scale, shared_w1, shared_w2, shared_gate = tensors[13:18]
        w1_scale, w2_scale, w1_scale_2, w2_scale_2 = tensors[18:22]
        shared_scales, x_scale = tensors[22:26], tensors[26]
        # Only the addresses of parameters differ from call to call: the config says the rest.
        parameters = (
            0 if gate is None else gate.data_ptr(),
            w1.data_ptr(),
            w2.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if router_bias is None else router_bias.data_ptr(),
            0 if expert_scale is None else expert_scale.data_ptr(),
            0 if b1 is None else b1.data_ptr(),
            0 if b2 is None else b2.data_ptr(),
            0 if w1_scale is None else w1_scale.data_ptr(),
            0 if w2_scale is None else w2_scale.data_ptr(),
            0 if w1_scale_2 is None else w1_scale_2.data_ptr(),
            0 if w2_scale_2 is None else w2_scale_2.data_ptr(),
            *[0 if scale is None else scale.data_ptr() for scale in shared_scales],
            0 if shared_w1 is None else shared_w1.data_ptr(),
            0 if shared_w2 is None else shared_w2.data_ptr(),
            0 if shared_gate is None else shared_gate.data_ptr(),
            0 if tensors.w3 is None else tensors.w3.data_ptr(),
        )
        if parameters != self._parameters:
            self._pack_parameters(tensors, parameters)
        rows = x.shape[0]
        if rows > 0:
            x_at, out_at = x.data_ptr(), out.data_ptr()
            if out_at % ADDRESS_ALIGNMENT != 0:
                raise ValueError(
                    f"out lies at address {out_at:#x}; it must be a multiple of "
                    f"{ADDRESS_ALIGNMENT}: leave it away, and copy what is returned"
                )
            place = (x_at, rows, x_scale is None)
            if self._x != place:
                self._pack_x(x, place)
        else:  # nothing of them is read or written
            x_at = out_at = self._anywhere
        given = (
            rows,
            0 if ids is None else ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            0 if count is None else count.data_ptr(),
            0 if x_scale is None else x_scale.data_ptr(),
        )
        if given != self._given:
            require_memory(tensors, "topk_ids", "topk_weights", "tokens", "x_scale")
            self._given = given
        _CALL.pack_into(
            self._bytes,
            _CALL_AT,
            x_at,
            out_at,
            # 0 means that there is none; without rows there is no other address.
            0 if ids is None else given[1] or x_at,
            0 if weights is None else given[2] or x_at,
            given[3],
            0 if x_scale is None else given[4] or x_at,
            rows,
            0 if ids is None else ids.dtype == torch.int64,
            0 if weights is None else WEIGHT_TYPES[weights.dtype],
            any_ids,
            identity,
            0 if x_scale is None else x_scale.dtype == torch.uint8,
            leaves_partials,
        )

    def _pack_x(self, x: Tensor, place: tuple[int, int, bool]) -> None:
        maps = self._maps_of_x.get(place)
        if maps is None:
            tensor_memory.require_memory("x", x)
            hidden = self._cfg.hidden
            element = self._cfg.dtype if place[2] else torch.uint8  # codes, which no map reads
            maps = b"".join(
                self.map_of("x", x, hidden, Box(rows, element)) for rows in (_ROUTE_BOX_ROWS, 1)
            )
            _keep(self._maps_of_x, place, maps)
        self._bytes[_X_AT : _X_AT + len(maps)] = maps
        self._x = place

    def _pack_parameters(self, tensors: CallTensors, addresses: tuple[int, ...]) -> None:
        maps = self._maps_of_parameters.get(addresses)
        if maps is None:
            require_memory(tensors, *_PARAMETER_FIELDS)
            maps = self._parameter_maps(tensors)
            _keep(self._maps_of_parameters, addresses, maps)
        of_gate, of_weights, of_shared = maps
        self._bytes[_GATE_AT : _GATE_AT + len(of_gate)] = of_gate
        self._bytes[_WEIGHTS_AT : _WEIGHTS_AT + len(of_weights)] = of_weights
        self._bytes[_SHARED_AT : _SHARED_AT + len(of_shared)] = of_shared
        _PARAMETERS.pack_into(self._bytes, _PARAMETERS_AT, *addresses[3:16])
        self._parameters = addresses

    def _parameter_maps(self, t: CallTensors) -> tuple[bytes, bytes, bytes]:
        """The map of the gate, those of the experts' weights, and those of shared experts."""
        cfg = self._cfg
        # A caller that gives routing may have no gate. The kernel then loads nothing by its map,
        # but prefetches it, so it must be a valid map: that of w1 will do.
        gate = t.w1 if t.gate is None else t.gate
        of_gate = self.map_of("gate", gate, cfg.hidden, Box(self._gate_box_rows, cfg.gate_dtype))
        of_experts = self._weight_maps("", t.w1, t.w2, cfg.intermediate, cfg.weight_format)
        if kernel_shape.has_up_maps(cfg):
            # Up rows have maps of their own, where those of shared experts would be.
            w3, first = (t.w1, 1) if t.w3 is None else (t.w3, 0)
            stored = cfg.weight_format
            ups = self._weight_maps("", w3, t.w2, cfg.intermediate, stored, first)
            return of_gate, of_experts, ups
        if t.shared_w1 is None or t.shared_w2 is None:
            return of_gate, of_experts, b""
        width, stored = cfg.shared_intermediate, cfg.shared_weight_format
        of_shared = self._weight_maps("shared_", t.shared_w1, t.shared_w2, width, stored)
        shared_gate = t.shared_w1 if t.shared_gate is None else t.shared_gate  # likewise
        of_shared += self.map_of(
            "shared_gate", shared_gate, cfg.hidden, self._box(_SHARED_GATE_ROWS)
        )
        return of_gate, of_experts, of_shared

    def _weight_maps(
        self,
        prefix: str,
        w1: Tensor,
        w2: Tensor,
        intermediate: int,
        stored: str | None,
        first: int = 0,
    ) -> bytes:
        """`WeightMaps`: of w1, of w1 in the boxes of narrow tiles, of w2, and of both in the boxes
        of tiles that decode in registers. `stored`: the format of their codes, or None; `first`: of
        w1's rows, where gate and up rows take turns.
        """
        rows = kernel_shape.weight_box_rows(self._cfg)
        if self._cfg.transposed:
            of_w1, of_w2 = (
                self.map_of_transposed(name, one, Box(rows, one.dtype))
                for name, one in (("w1", w1), ("w2", w2))
            )
            return of_w1 + of_w1 + of_w2 + of_w1 + of_w2
        wide = self._box(rows, ordered=True)
        depths = (self._cfg.hidden, intermediate)
        if stored is not None:  # a map's elements are bytes
            bits = FORMATS[stored].code_bits
            decoded = prefix == "shared_" or self._cfg.activation_format is None
            codes = _BOX_COLUMNS if decoded else _BOX_BYTES  # codes of a row: kCodedDepth
            row_bytes = codes * bits // 8
            wide = Box(rows, torch.uint8, row_bytes, ordered=True)
            depths = (depths[0] * bits // 8, depths[1] * bits // 8)
        narrow = wide._replace(rows=min(rows, kernel_shape.narrow_product0_columns(self._cfg)))
        apart = 2 if prefix == "" and self._cfg.gate_up == "interleaved" else 1
        return b"".join(
            self.map_of(prefix + name, matrix, columns, box, *of)
            for name, matrix, columns, box, *of in (
                ("w1", w1, depths[0], wide, apart, first),
                ("w1", w1, depths[0], narrow, apart, first),
                ("w2", w2, depths[1], wide),
                ("w1", w1, depths[0], narrow._replace(row_bytes=_BOX_BYTES), apart, first),
                ("w2", w2, depths[1], wide._replace(row_bytes=_BOX_BYTES)),
            )
        )

    def _rows_box(self, rows: int) -> Box:
        """The box of rows that experts multiply."""
        return self._box(rows) if self._cfg.activation_format is None else Box(rows, torch.uint8)

    def _box(self, rows: int, ordered: bool = False) -> Box:
        return Box(rows, self._cfg.dtype, ordered=ordered)

    def _place(self, index: int, tensor_map: bytes) -> None:
        self._bytes[index * MAP_BYTES : (index + 1) * MAP_BYTES] = tensor_map

    def map_of(
        self, name: str, matrix: Tensor, columns: int, box: Box, apart: int = 1, first: int = 0
    ) -> bytes:
        """The tensor map of rows of a contiguous tensor whose last dimension has `columns`
        elements: of every `apart`-th one from `first` on.
        """
        self._require_here(name, matrix)
        row_bytes = columns * box.element.itemsize
        rows = matrix.numel() * matrix.element_size() // row_bytes // apart
        if rows == 0:  # weights of no expert, by whose map nothing is loaded
            return self.encode(name, self._anywhere, box.rows, columns, box)
        address = matrix.data_ptr() + first * row_bytes
        return self.encode(name, address, rows, columns, box, apart * row_bytes)

    def map_of_transposed(self, name: str, matrices: Tensor, box: Box) -> bytes:
        """The tensor map of contiguous [X, depth, columns], of which a box has kTileDepth rows of
        one matrix: beyond it there are zeros, and not the next matrix.
        """
        self._require_here(name, matrices)
        experts, depth, columns = matrices.shape
        address = matrices.data_ptr() if experts > 0 else self._anywhere
        dimensions = [(depth, 1, kernel_shape.DEPTH), (max(1, experts), depth, 1)]
        return self.encode_dimensions(name, address, columns, dimensions, box)

    def _require_here(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self._device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {self._device}")

    def encode(
        self,
        name: str,
        address: int,
        rows: int,
        columns: int,
        box: Box,
        row_bytes: int | None = None,
    ) -> bytes:
        """`row_bytes`: from one row to the next; None: rows lie side by side."""
        dimensions = [(rows, 1, box.rows)]
        if box.ordered:  # see load_weights in kernels/sm90/ptx/tma.cuh
            groups = box.rows // ORDERED_ROWS
            dimensions = [
                (2, 1, 2),
                (rows // _ROWS_TOGETHER, _ROWS_TOGETHER, ORDERED_ROWS // _ROWS_TOGETHER),
                (_ROWS_TOGETHER // 2, 2, _ROWS_TOGETHER // 2),
                (groups, ORDERED_ROWS, groups),
            ]
        return self.encode_dimensions(name, address, columns, dimensions, box, row_bytes)

    def encode_dimensions(
        self,
        name: str,
        address: int,
        columns: int,
        dimensions: Sequence[tuple[int, int, int]],
        box: Box,
        row_bytes: int | None = None,
    ) -> bytes:
        """The map of rows in several dimensions: for each its size, its stride in rows, and a
        box's share of it.
        """
        if address % ADDRESS_ALIGNMENT != 0:
            raise ValueError(
                f"{name} lies at address {address:#x}; it must be a multiple of "
                f"{ADDRESS_ALIGNMENT}: pass a copy, {name}.clone()"
            )
        driver = self._driver
        kind = driver.CUtensorMapDataType
        size_of_element = box.element.itemsize
        if row_bytes is None:
            row_bytes = columns * size_of_element
        status, made = driver.cuTensorMapEncodeTiled(
            getattr(kind, _MAP_TYPES[box.element]),
            1 + len(dimensions),
            address,
            [driver.cuuint64_t(size) for size in (columns, *(d[0] for d in dimensions))],
            [driver.cuuint64_t(stride * row_bytes) for _, stride, _ in dimensions],
            [
                driver.cuuint32_t(size)
                for size in (box.row_bytes // size_of_element, *(d[2] for d in dimensions))
            ],
            [driver.cuuint32_t(1)] * (1 + len(dimensions)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{box.row_bytes}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(status) != 0:
            sizes = [size for size, _, _ in dimensions]
            raise RuntimeError(f"no tensor map of {name}, {[*sizes, columns]}: {status.name}")
        return struct.pack("<16Q", *map(int, made.opaque))


def _keep(kept: dict[Key, Maps], key: Key, maps: Maps) -> None:
    """Keeps maps for later calls; the oldest make room."""
    if len(kept) == MAX_KEPT:
        del kept[next(iter(kept))]
    kept[key] = maps
