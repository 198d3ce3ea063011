# SPDX-License-Identifier: Apache-2.0
"""The shape that a GPU's kernel is compiled for: a layer, a world, a share of the grid; and the
sizes that follow from them.

The only file that decides how work is cut on the GPU. Must not depend on compilers or launches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, get_args

import torch

from moeos import _runtime
from moeos.config.config import MoEConfig
from moeos.config.sizes import (
    CHUNK_ROWS,
    NARROW_ROWS,
    layer_sizes,
    of_gradients,
    parts,
    routed_alone,
    sent_bytes,
    shared_cut,
)
from moeos.partition.rates import H200
from moeos.partition.slicing import WHOLE, Slicing

ARCHITECTURES = ("sm_90a",)
"""The GPUs that kernels can be compiled for: Hopper, whose own instructions they use."""
DTYPES = (torch.bfloat16, torch.float16)
"""Storage types that the GPU computes with."""
MAX_EXPERTS = 1024
"""Each lane of the warp that routes a token has 32 of its logits in registers."""
MAX_TOP_K = 32
"""A lane of a warp looks up one pair."""
MAX_GROUPS = 32
"""A lane of a warp keeps the score of an expert group."""

_Cut = tuple[MoEConfig, dict[str, int], dict[str, int]]
"""The layer of calls, how their work is cut, and fields of Geometry that are not the layer's."""
Transport = Literal["none", "mapped", "nvshmem"]
"""How remote peers are reached: there are none; by stores into heaps that this GPU addresses (of
virtual ranks); by NVSHMEM."""

_TILE_ROWS = 128
_STAGE_COLUMNS = 256
_NARROW_COLUMNS = 128
_WEIGHT_BOX_ROWS = 128  # where no part reaches beyond them
ORDERED_ROWS = 32
"""Rows of weights that lie in a box in an order of their own; a smaller box has no more."""
VALUE_COLUMNS = 128
"""Columns of a part of the first product of a call of gradients."""
DEPTH = 64
"""Columns of a kept row are a multiple: kTileDepth."""
_LINE_BYTES = 128  # a cache line; rows of a call of gradients fill whole lines
_PARTS_AT_HAND = 2  # a processor computes one part, and has claimed one
_CHOICE_BYTES = 8  # per slot of a token, in a row that is sent
_FEW_TOKENS = 512  # the most tokens in a call of a layer for few
_ROUTE_TOKENS = 64  # the most tokens of a block
_BOX_BYTES = 128  # a box's row, such as router columns that a block's Route multiplies
_MOST_SLICES, _LEAST_STEPS = 8, 4  # slices of a block's Route, and steps of a slice
_GROUPS = 2  # consumer warpgroups
_TOKEN_DISPATCH_BYTES = 64 << 10  # the most bytes of rows that a courier spreads together
ONCE_BYTES = 24 << 20
"""A call with this many bytes of rows for a peer sends each token there once. The peer needs some
microseconds more to copy it to its other rows, which fewer rows do not win back on the link."""
DEDUP_TOKENS = _FEW_TOKENS + 1
"""Only a layer for this many tokens sends them once: in one for few, a look at what might have
landed is felt in every call."""
HOPPER_BLOCKS = H200.blocks
"""Blocks of an H100 or H200: one per SM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShape:
    """The layer, the world and the machine that a kernel is compiled for.

    Attributes:
        cfg: the layer.
        world_size: P; where experts are sliced, the ranks that hold one slice of all.
        processors: blocks of each rank that run tasks; all but one of its share of the grid.
        virtual_ranks: ranks in one launch: 1, or P when all of them share one GPU.
        transport: how those peers are reached whose memory is not written directly.
        trace_events: events that each actor notes of a call, at most; 0 compiles none of it in.
        places: the most experts of a rank, where a table says which; 0: they lie in order.
        slicing: how experts are cut; `cfg` is that of one slice.
        faults: whether it does what a fault plan asks of it (runtime/health/faults.hpp); otherwise
            it has no code for that.
        arch: one of `ARCHITECTURES`.
        gradients: whether its calls are of gradients; `cfg` is the layer's all the same.
        saves: whether a forward call saves GEMM0's results, or a call of gradients finds them
            saved.

    Raises:
        ValueError: the GPU does not have this layer yet; the message says what it has.
    """

    cfg: MoEConfig
    world_size: int
    processors: int
    virtual_ranks: int = 1
    transport: Transport = "none"
    trace_events: int = 0
    places: int = 0
    slicing: Slicing = WHOLE
    faults: bool = False
    arch: str = ARCHITECTURES[0]
    gradients: bool = False
    saves: bool = False

    def __post_init__(self) -> None:
        check_supported(self.cfg)
        self.cfg.experts_per_rank(self.world_size)
        if self.arch not in ARCHITECTURES:
            allowed = ", ".join(ARCHITECTURES)
            raise ValueError(f"arch is {self.arch!r}; kernels can be compiled for {allowed}")
        ranks = self.world_size * (self.slicing.slices if self.slicing.sums else 1)
        if self.virtual_ranks not in (1, ranks):
            raise ValueError(
                f"virtual_ranks is {self.virtual_ranks}; allowed: 1, or all {ranks} ranks"
            )
        if self.transport not in get_args(Transport):
            allowed = ", ".join(map(repr, get_args(Transport)))
            raise ValueError(f"transport is {self.transport!r}; allowed: {allowed}")
        pairs = self.slicing.pairs(self.cfg) + (self.cfg.shared_experts > 0)
        if pairs > MAX_TOP_K and self.slicing.apart:
            raise ValueError(
                f"a token has {pairs} rows, of {self.slicing.slices} slices of each of its experts "
                f"and of shared ones; on the GPU at most {MAX_TOP_K} are allowed: lower "
                "tensor_ranks, or use parallel='expert'"
            )
        if self.slicing.slices > MAX_TOP_K:
            raise ValueError(
                f"{self.slicing.slices} ranks hold slices of the same experts; on the GPU at most "
                f"{MAX_TOP_K} are allowed: lower tensor_ranks, or use parallel='expert'"
            )
        if self.slicing.sums and self.transport != "none":
            raise ValueError(
                "parallel is 'tensor', and some ranks are reached over a network, which slices of "
                "experts are not: use the GPUs of one host, or parallel='expert'"
            )
        places = self.world_size * self.places
        if places > MAX_EXPERTS:
            apart = self.slicing.apart
            what, remedy = (
                ("slices of experts have", "lower tensor_ranks, or use parallel='expert'")
                if apart
                else ("placement has", "give the fullest rank fewer experts")
            )
            raise ValueError(
                f"{what} {places} places, {self.places} on each of {self.world_size} ranks; "
                f"on the GPU at most {MAX_EXPERTS} are allowed: {remedy}"
            )
        if self.processors < 1:
            raise ValueError(f"processors is {self.processors}; a rank needs at least 1")

    @property
    def local_experts(self) -> int:
        """X: tables and messages about a rank's experts have this many places."""
        return self.places or self.cfg.experts_per_rank(self.world_size)

    @property
    def couriers(self) -> int:
        """Couriers of each rank: every processor's block has one."""
        return self.processors

    @functools.cached_property
    def sizes(self) -> _runtime.Sizes:
        """Buffers and bounds of one rank, as the runtime derives them.

        Raises `ValueError` when a bound does not fit the runtime's words.
        """
        cfg, cut, rows = self._cut_of_gradients() if self.gradients else self._cut_of_calls()
        return layer_sizes(
            cfg,
            self.world_size,
            self.processors,
            cut,
            couriers=self.couriers,
            remote=self.transport != "none",
            trace_events=self.trace_events,
            places=self.places,
            rows=rows,
        )

    def _cut_of_calls(self) -> _Cut:
        cfg = self.cfg
        wide_columns = (_product0_columns(cfg), _tile_columns(cfg))
        narrow_columns = (narrow_product0_columns(cfg), _NARROW_COLUMNS)
        wide, narrow = parts(cfg, *wide_columns), parts(cfg, *narrow_columns)
        cut = {
            "tile_rows": _TILE_ROWS,
            "route_tokens": _ROUTE_TOKENS,
            "route_slices": _route_slices(cfg),
            "kept_bytes": _kept_bytes(cfg),
            "product0_parts": wide[0],
            "product1_parts": wide[1],
            "narrow_rows": NARROW_ROWS,
            "product0_narrow_parts": narrow[0],
            "product1_narrow_parts": narrow[1],
            # With 1, rows of any number lie next to those of another source. They take more boxes
            # to load, for which there are too few lanes where weights have small boxes.
            "segment_align": 1 if has_whole_parts(cfg) else _runtime.SEGMENT_ALIGN,
            "dedup_rows": _dedup_rows(cfg, sent_bytes(cfg)),
            "dedup_after": _dedup_after(cfg, self.world_size),
            "dispatch_tokens": _dispatch_tokens(cfg, self.slicing.pairs(cfg)),
            "up_front_rows": NARROW_ROWS,
            **shared_cut(cfg, wide_columns[0], narrow_columns[0]),
        }
        return cfg, cut, self.slicing.sizes(cfg, self.world_size)

    def _cut_of_gradients(self) -> _Cut:
        """Calls of gradients have routed experts alone, and no narrow tiles. Each slice gets all
        sums. kernels/sm90/block/gradient_rows.cuh names a row's parts and checks these bytes.
        """
        cfg = routed_alone(self.cfg)
        size = cfg.dtype.itemsize
        hidden = cfg.hidden * size
        columns = -(-cfg.intermediate // DEPTH) * DEPTH
        product0_parts, product1_parts = parts(cfg, VALUE_COLUMNS, _STAGE_COLUMNS)
        sent = _align(2 * hidden + self.slicing.pairs(cfg) * _CHOICE_BYTES, _LINE_BYTES)
        kept = (3 if cfg.gated else 2) * columns * size + 4 * product0_parts + 4
        kept = _align(kept, _LINE_BYTES)
        if self.world_size > 1:  # a peer may send again before weights have their gradients
            kept += copies_bytes(cfg)
        cut = {
            "tile_rows": _TILE_ROWS,
            "route_tokens": _ROUTE_TOKENS,
            "route_slices": _route_slices(cfg),
            "kept_bytes": _kept_bytes(cfg),
            "product0_parts": product0_parts,
            "product1_parts": product1_parts,
            "segment_align": _runtime.SEGMENT_ALIGN,
            "dedup_rows": _dedup_rows(cfg, sent),
            "dedup_after": _dedup_after(cfg, self.world_size),
            "up_front_rows": NARROW_ROWS,
            "second_after": _PARTS_AT_HAND * self.processors,
        }
        rows = dataclasses.replace(self.slicing, everywhere=True).sizes(cfg, self.world_size)
        return cfg, cut, {**rows, **of_gradients(sent, kept)}


def check_supported(cfg: MoEConfig) -> None:
    """Raises `ValueError` if the GPU does not have such a layer; the twin has all but float16."""
    if cfg.dtype not in DTYPES:
        allowed = " or ".join(map(str, DTYPES))
        raise ValueError(f"dtype is {cfg.dtype}; the GPU computes with {allowed}")
    of_router = "router_rows" if cfg.zero_experts > 0 else "experts"  # with the zero experts
    rows = MAX_TOP_K - (cfg.shared_experts > 0)  # a lane of a warp loads each that is added up
    of_token = "top_k" if cfg.rounding is None else "slots"
    bounds = {of_router: MAX_EXPERTS, of_token: rows, "expert_groups": MAX_GROUPS}
    for name, most in bounds.items():
        if getattr(cfg, name) > most:
            raise ValueError(
                f"{name} is {getattr(cfg, name)}; on the GPU at most {most} are allowed: "
                'with more the layer runs on backend "twin" alone'
            )


def route_columns(cfg: MoEConfig) -> int:
    """Columns of the tile in which the logits of a block and a bank of experts are computed."""
    return next((columns for columns in (64, 128) if cfg.router_rows <= columns), _STAGE_COLUMNS)


def route_banks(cfg: MoEConfig) -> int:
    """Banks of experts, each of as many as the tile has columns: kRouteBanks of
    kernels/sm90/block/config.cuh.
    """
    return -(-cfg.router_rows // route_columns(cfg))


def copies_bytes(cfg: MoEConfig) -> int:
    """Bytes of x and of the gradient of the output, which follow all else that a row keeps."""
    return _align(2 * cfg.hidden * cfg.dtype.itemsize, _LINE_BYTES)


def _align(size: int, to: int = 16) -> int:
    """`to`: 16 is what bulk copies and tensor maps need."""
    return -(-size // to) * to


def _tile_columns(cfg: MoEConfig) -> int:
    """Columns of a wide tile: kTileColumns of kernels/sm90/block/config.cuh."""
    return _STAGE_COLUMNS if cfg.activation_format is None else _STAGE_COLUMNS // 2


def _product0_columns(cfg: MoEConfig) -> int:
    """Columns of GEMM0's result in a part of a wide tile; a gated part multiplies this many gate
    columns and this many up columns.
    """
    return _tile_columns(cfg) // 2 if cfg.gated else _tile_columns(cfg)


def narrow_product0_columns(cfg: MoEConfig) -> int:
    """Columns of GEMM0's result in a part of a narrow tile."""
    return _NARROW_COLUMNS // 2 if cfg.gated else _NARROW_COLUMNS


def has_whole_parts(cfg: MoEConfig) -> bool:
    """Whether every part of all GEMMs has all the columns of a tile: kWholeParts of
    kernels/sm90/block/config.cuh.
    """
    narrowest = cfg.intermediate
    if cfg.shared_experts > 0:
        narrowest = min(narrowest, cfg.shared_intermediate)
    return cfg.hidden >= _tile_columns(cfg) and narrowest >= _product0_columns(cfg)


def has_up_maps(cfg: MoEConfig) -> bool:
    """Whether up rows of routed experts have tensor maps of their own: kUpMaps of
    kernels/sm90/block/config.cuh.
    """
    return cfg.gate_up == "separate" or (cfg.gate_up == "interleaved" and not cfg.transposed)


def weight_box_rows(cfg: MoEConfig) -> int:
    """Rows of a box of weights, or columns of transposed ones: kWeightBoxRows of
    kernels/sm90/block/arguments.cuh.
    """
    if cfg.transposed:
        return _BOX_BYTES // cfg.dtype.itemsize
    return min(_WEIGHT_BOX_ROWS, _product0_columns(cfg)) if has_whole_parts(cfg) else ORDERED_ROWS


def _dedup_rows(cfg: MoEConfig, row_bytes: int) -> int:
    """Geometry's `dedup_rows`, for rows of `row_bytes` bytes as they are sent."""
    if cfg.max_tokens < DEDUP_TOKENS:
        return 0
    return max(1, ONCE_BYTES // row_bytes)


def _dedup_after(cfg: MoEConfig, world_size: int) -> int:
    """Geometry's `dedup_after`: chunks that hold a rank's share of the rows with which all
    processors of a GPU begin, since these would wait for copies. It does not count this rank's own
    processors: a peer may have more or fewer, and must use the same number of chunks.
    """
    tiles = HOPPER_BLOCKS / -(-cfg.intermediate // _product0_columns(cfg))
    return math.ceil(tiles * _TILE_ROWS / (world_size * CHUNK_ROWS))


def _dispatch_tokens(cfg: MoEConfig, pairs: int) -> int:
    """Geometry's `dispatch_tokens`: as many as a warp has lanes for, unless their rows are so long
    that the first tiles would wait for the last tokens' rows. `pairs`: of a token.
    """
    if cfg.apply_router_weight_on_input or cfg.activation_format is not None:
        return 0  # such rows are loaded before what is sent of them is made
    row_bytes = cfg.hidden * cfg.dtype.itemsize
    return max(1, min(MAX_TOP_K, _TOKEN_DISPATCH_BYTES // row_bytes) // pairs)


def _route_slices(cfg: MoEConfig) -> int:
    """Parts into which the Route of a block of tokens may be cut, so that idle processors share it:
    one processor takes long to read a router. Each bank's depth is cut into slices, and a part adds
    up the logits' products over one slice.

    Until they are added up, a token's partial logits lie in its row of the output, which they must
    fit; or, where one slice of each bank does not, in memory of `_kept_bytes`.
    """
    columns = route_columns(cfg)
    boxes = 1 if columns > 128 else 2  # kRouteDepth
    depth = boxes * _BOX_BYTES // cfg.gate_dtype.itemsize
    steps = -(-cfg.hidden // depth)
    by_room = cfg.hidden * cfg.dtype.itemsize // _sums_bytes(cfg)
    slices = max(1, min(_MOST_SLICES, steps // _LEAST_STEPS, by_room))
    # All slices but the last have equally many steps, and the last has some.
    return -(-steps // -(-steps // slices)) * route_banks(cfg)


def _sums_bytes(cfg: MoEConfig) -> int:
    """Bytes of a token's partial logits that a slice of each bank keeps."""
    kept = _GROUPS if cfg.router_dtype is None else 1  # partial sums of a logit in a slice
    return kept * route_banks(cfg) * route_columns(cfg) * 4


def _kept_bytes(cfg: MoEConfig) -> int:
    """Geometry's `kept_bytes`. One slice of one bank keeps nothing."""
    fits = _sums_bytes(cfg) <= cfg.hidden * cfg.dtype.itemsize
    return 0 if fits or route_banks(cfg) == 1 else _sums_bytes(cfg)
