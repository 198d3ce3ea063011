# SPDX-License-Identifier: Apache-2.0
"""The sizes of a layer as the runtime derives them, for whichever machine computes it.

The only file that hands a config to `_twin.Sizes`, which is runtime/geometry.hpp and its bounds. It
knows nothing of engines or compilers; these bring their tiles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import torch

from moeos import _twin
from moeos.activations import Curve
from moeos.config import GroupScore, MoEConfig, Scoring

LARGE_EXPERT = 20 << 20
"""An expert whose two matrices have more bytes is a large one: a GPU's L2 cache of 50 MiB does not
hold the weights of two beside each other. (A gated one's are half as many more.)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a machine cuts its work: rows of a tile, tokens of a block that is routed together,
    columns of the parts, and Route parts of a block, whose sums of a token take `kept_bytes` of
    memory where its row of the output is too short for them.

    Tiles of an expert with up to `narrow_rows` padded rows have parts of half as many columns. In
    those of others, each source's rows are padded to a multiple of `segment_align`. A call with
    `once_rows` rows for a peer, or more, takes each token there once; with 0, none does; but the
    first `once_after` chunks bring all of their rows. In a call of up to `spread_tokens` tokens a
    processor, parts of Dispatch are tokens, each with all of its rows. One in which every expert
    here has up to `whole_rows` padded rows is planned whole beside remote peers, too; with 0, none
    is.
    """

    rows: int
    route_tokens: int
    gemm0_columns: int
    gemm1_columns: int
    route_slices: int = 1
    kept_bytes: int = 0
    narrow_rows: int = 0
    segment_align: int = _twin.SEGMENT_ALIGN
    once_rows: int
    once_after: int
    spread_tokens: int
    whole_rows: int


def layer_sizes(
    cfg: MoEConfig,
    world_size: int,
    processors: int,
    tiles: Tiles,
    *,
    couriers: int = 0,
    remote: bool = False,
    trace_events: int = 0,
) -> _twin.Sizes:
    """Buffers and bounds of one rank of a layer.

    `couriers`: actors that do nothing but Dispatch and Replicate; with none, processors do it.

    Raises `ValueError` when E is not divisible by the world or a bound does not fit the runtime's
    words.
    """
    cfg.experts_per_rank(world_size)
    once = _can_send_once(cfg, world_size, tiles)
    capacity, limit = cfg.capacity(cfg.max_tokens), cfg.resolved_swiglu_limit
    return _twin.Sizes(
        world=world_size,
        experts=cfg.experts,
        top_k=cfg.top_k,
        max_tokens=cfg.max_tokens,
        hidden=cfg.hidden,
        intermediate=cfg.intermediate,
        element_bytes=cfg.dtype.itemsize,
        capacity=cfg.max_tokens if capacity is None else capacity,
        capacity_rows=cfg.resolved_row_map == "capacity",
        # kernels/shape.hpp has the enumerators in the order of the names.
        curve=get_args(Curve).index(cfg.formula.curve),
        gated=cfg.gated,
        alpha=cfg.resolved_swiglu_alpha,
        up_offset=cfg.formula.up_offset,
        swiglu_limit=math.inf if limit is None else limit,
        clamps_after=cfg.swiglu_clamp == "after",
        scoring=get_args(Scoring).index(cfg.scoring),
        renormalize=cfg.renormalize,
        routed_scaling=cfg.routed_scaling,
        expert_groups=cfg.expert_groups,
        top_groups=cfg.top_groups,
        group_score=get_args(GroupScore).index(cfg.group_score),
        zero_experts=cfg.zero_experts,
        weight_on_input=cfg.apply_router_weight_on_input,
        fp32_router=cfg.router_dtype == torch.float32,
        processors=processors,
        couriers=couriers,
        remote=remote,
        tile_rows=tiles.rows,
        route_tokens=tiles.route_tokens,
        route_slices=tiles.route_slices,
        kept_bytes=tiles.kept_bytes,
        gemm0_columns=tiles.gemm0_columns,
        gemm1_columns=tiles.gemm1_columns,
        narrow_rows=tiles.narrow_rows,
        segment_align=tiles.segment_align,
        large_experts=2 * cfg.hidden * cfg.intermediate * cfg.dtype.itemsize > LARGE_EXPERT,
        once_rows=tiles.once_rows if once else 0,
        once_after=tiles.once_after if once else 0,
        spread_tokens=tiles.spread_tokens,
        whole_rows=tiles.whole_rows,
        trace_events=trace_events,
    )


def _can_send_once(cfg: MoEConfig, world_size: int, tiles: Tiles) -> bool:
    """Whether a rank can have several experts of a token, and a call `once_rows` rows for it."""
    rows_of_token = min(cfg.top_k, cfg.experts // world_size)
    most = cfg.max_tokens * rows_of_token
    return world_size > 1 and rows_of_token > 1 and 0 < tiles.once_rows <= most
