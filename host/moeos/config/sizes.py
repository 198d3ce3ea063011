# SPDX-License-Identifier: Apache-2.0
"""The sizes of a layer as the runtime derives them, for whichever machine computes it.

The only file that hands a config to `_runtime.Sizes`: runtime/words/geometry.def and
kernels/shape.def have its fields. Must not depend on engines or compilers; these say how they cut
their work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from moeos import _runtime
from moeos.config.activations import Curve
from moeos.config.config import GateUp, GroupScore, MoEConfig, Scoring
from moeos.config.element_formats import (
    ACTIVATION_NAMES,
    FORMATS,
    HIDDEN_GROUP,
    NAMES,
    RESULT_GROUP,
    TOKEN_GROUP,
)

NARROW_ROWS = 64  # the most rows of an expert whose tile is narrow on a GPU
CHUNK_ROWS = 32
"""Rows of one transfer and of one arrival flag, on every machine."""
MAX_RANKS = 2**16 - 1
"""The most ranks of a world: the runtime numbers a row's source in 16 bits."""
_MOST_BYTES = 2**32 - 1  # the most bytes of a row: the runtime counts them in 32 bits
_RESULT_ALIGNMENT = 128  # a cache line, as coded_result_bytes of kernels/element_formats.hpp
_BETWEEN_SHARES = 2  # times the rows of even routing have places between the GEMMs
_RING_SHARES = 2  # times the rows of even routing have places in a cell
_RING_TILES = 4  # the fewest tiles that have places in a cell
LARGE_EXPERT = 20 << 20
"""An expert whose two matrices have more bytes is a large one: a GPU's L2 cache of 50 MiB does not
hold the weights of two at once. (A gated expert has half as many more.)"""


def routed_alone(cfg: MoEConfig) -> MoEConfig:
    """The layer without its shared experts."""
    return dataclasses.replace(cfg, shared_experts=0, shared_intermediate=0, shared_gate=False)


def of_gradients(sent: int, kept: int) -> dict[str, int]:
    """Fields of Geometry that a call of gradients has of its own: bytes of a row that is sent, and
    of one that is kept between the products.

    A row comes back in the place of one that is sent, so both have as many bytes.
    """
    return {
        "row_bytes": sent,
        "sent_bytes": sent,
        "returned_bytes": sent,
        "hidden_bytes": kept,
        "window_rows": _runtime.WINDOW_BYTES // sent,
        "alters_rows": 1,
        "between_rows": 0,  # what is kept between the products is read when the call is over,
        "ring_rows": 0,  # and so are the rows
    }


def layer_sizes(
    cfg: MoEConfig,
    world_size: int,
    processors: int,
    cut: Mapping[str, int],
    *,
    couriers: int = 0,
    remote: bool = False,
    trace_events: int = 0,
    places: int = 0,
    rows: Mapping[str, int] | None = None,
) -> _runtime.Sizes:
    """Buffers and bounds of one rank of a layer.

    `cut`: how a machine cuts its work, by the names of runtime/words/geometry.def; what it leaves
    out is
    0. `couriers`: actors that do nothing but Dispatch and Replicate; with none, processors do it.
    `places`: the most experts of a rank, where a table says which; 0: they lie in order.
    `rows`: fields that say what a row is, where it is not what a forward call sends.

    Raises `ValueError` when there are too few or too many ranks, `cut` names no field, or a bound
    does not fit the runtime's words.
    """
    local = places or cfg.experts_per_rank(world_size)
    if world_size > MAX_RANKS:
        raise ValueError(f"the world's size is {world_size}; it must be at most {MAX_RANKS}")
    capacity = cfg.capacity(cfg.max_tokens)
    _require_countable(cfg)
    row_bytes = cfg.hidden * cfg.dtype.itemsize
    return _runtime.Sizes(
        {
            **cut,
            **_once(cfg, world_size, local, cut),
            "between_rows": _between_rows(cfg, world_size, local, cut["tile_rows"]),
            "ring_rows": _ring_rows(cfg, world_size, local, cut["tile_rows"]),
            "world": world_size,
            "experts": world_size * places if places > 0 else cfg.experts,
            "placed_experts": cfg.experts if places > 0 else 0,
            "top_k": cfg.slots,
            "max_tokens": cfg.max_tokens,
            "row_bytes": row_bytes,
            "sent_bytes": sent_bytes(cfg),
            "returned_bytes": returned_bytes(cfg),
            "hidden_bytes": _between_bytes(cfg),
            "row_map": int(cfg.resolved_row_map == "capacity"),
            "capacity": cfg.max_tokens if capacity is None else capacity,
            "chunk_rows": CHUNK_ROWS,
            "large_experts": int(
                2 * cfg.hidden * cfg.intermediate * _bits_of_a_weight(cfg) > 8 * LARGE_EXPERT
            ),
            "processors": processors,
            "couriers": couriers,
            "remote": int(remote),
            "window_rows": _runtime.WINDOW_BYTES // row_bytes,
            "in_place_tokens": _runtime.IN_PLACE_TOKENS,
            "gathers_rows": 0,
            "between_pairs": 0,
            "trace_events": trace_events,
            "alters_rows": int(
                cfg.apply_router_weight_on_input or cfg.activation_format is not None
            ),
            **(rows or {}),
        },
        _layer_shape(cfg),
    )


def sent_bytes(cfg: MoEConfig) -> int:
    """Bytes of a token as it is sent."""
    return sent_row_bytes(cfg.hidden, cfg.dtype, cfg.activation_format)


def sent_row_bytes(hidden: int, dtype: torch.dtype, activation_format: str | None) -> int:
    """`sent_bytes` from the config's fields alone, for a trace, which has no more."""
    if activation_format is None:
        return hidden * dtype.itemsize
    return _coded_bytes(hidden, TOKEN_GROUP)


def returned_bytes(cfg: MoEConfig) -> int:
    """Bytes of one result of a token as it returns."""
    if cfg.result_format is None:
        return cfg.hidden * cfg.dtype.itemsize
    return _coded_bytes(cfg.hidden, RESULT_GROUP, _RESULT_ALIGNMENT)


def _between_bytes(cfg: MoEConfig) -> int:
    """Bytes of a row between GEMM0 and GEMM1."""
    if cfg.activation_format is None:
        return cfg.intermediate * cfg.dtype.itemsize
    return _coded_bytes(cfg.intermediate, HIDDEN_GROUP)


def _coded_bytes(values: int, group: int, multiple: int = 16) -> int:
    """coded_row_bytes of kernels/element_formats.hpp."""
    return -(-(values + values // group * 4) // multiple) * multiple


def _bits_of_a_weight(cfg: MoEConfig) -> int:
    """Bits of a weight, without scales."""
    if cfg.weight_format is None:
        return 8 * cfg.dtype.itemsize
    return FORMATS[cfg.weight_format].code_bits


def _require_countable(cfg: MoEConfig) -> None:
    """Raises unless the runtime can count the bytes of a layer's rows."""
    widths = {
        "hidden": 1,
        "intermediate": 1,
        "shared_intermediate": max(1, cfg.shared_experts),
    }
    for name, times in widths.items():
        size, most = getattr(cfg, name), _MOST_BYTES // (times * cfg.dtype.itemsize)
        if size > most:
            raise ValueError(
                f"{name} is {size}; it must be at most {most}, as a row of {cfg.dtype} has at most "
                f"{_MOST_BYTES} bytes"
            )


def parts(cfg: MoEConfig, product0_columns: int, product1_columns: int) -> tuple[int, int]:
    """N-tiles of the two GEMMs' results, by the columns of one."""
    return -(-cfg.intermediate // product0_columns), -(-cfg.hidden // product1_columns)


def shared_cut(cfg: MoEConfig, wide: int, narrow: int | None = None) -> dict[str, int]:
    """Fields of runtime/words/geometry.def that shared experts have: none where there are none.

    `wide`, `narrow`: columns of GEMM0's results in an N-tile of either kind. The last N-tile is
    that of their gate.
    """
    if cfg.shared_experts == 0:
        return {}
    cut = {"shared_bytes": cfg.shared_experts * cfg.shared_intermediate * cfg.dtype.itemsize}
    for kind, columns in (("", wide), ("narrow_", narrow)):
        if columns is not None:
            of_one = -(-cfg.shared_intermediate // columns)
            cut[f"shared0_{kind}parts"] = cfg.shared_experts * of_one + cfg.shared_gate
    return cut


def _layer_shape(cfg: MoEConfig) -> dict[str, object]:
    """Fields of kernels/shape.def; kernels/shape.hpp has the enumerators in the order of names."""
    limit = cfg.resolved_swiglu_limit
    return {
        "hidden": cfg.hidden,
        "intermediate": cfg.intermediate,
        "activation": {
            "curve": get_args(Curve).index(cfg.formula.curve),
            "is_gated": cfg.gated,
            "alpha": cfg.resolved_swiglu_alpha,
            "up_offset": cfg.formula.up_offset,
            "limit": math.inf if limit is None else limit,
            "clamps_after": cfg.swiglu_clamp == "after",
        },
        "scoring": get_args(Scoring).index(cfg.scoring),
        "renormalize": cfg.renormalize,
        "routed_scaling": cfg.routed_scaling,
        "expert_groups": cfg.expert_groups,
        "top_groups": cfg.top_groups,
        "group_score": get_args(GroupScore).index(cfg.group_score),
        "zero_experts": cfg.zero_experts,
        "weight_on_input": cfg.apply_router_weight_on_input,
        "fp32_router": cfg.router_dtype == torch.float32,
        "shared_experts": cfg.shared_experts,
        "shared_intermediate": cfg.shared_intermediate,
        "shared_gate": cfg.shared_gate,
        "weight_format": _number_of(NAMES, cfg.weight_format),
        "activation_format": _number_of(ACTIVATION_NAMES, cfg.activation_format),
        "shared_weight_format": _number_of(NAMES, cfg.shared_weight_format),
        "result_format": _number_of(ACTIVATION_NAMES, cfg.result_format),
        "transposed": cfg.transposed,
        "gate_up": get_args(GateUp).index(cfg.gate_up),
    }


def _number_of(names: Sequence[str], name: str | None) -> int:
    """The kernels' number: 0 for none, and 1 for the first."""
    return 0 if name is None else 1 + names.index(name)


def _between_rows(cfg: MoEConfig, world_size: int, local: int, tile_rows: int) -> int:
    """Geometry's `between_rows`: places for twice the rows of even routing, and for tiles' padding.
    A more uneven call reuses places. None where no call can be more uneven, as with two ranks.
    """
    pairs = world_size * cfg.max_tokens
    rows = _BETWEEN_SHARES * -(-pairs * cfg.slots * local // max(cfg.experts, local))
    return 0 if pairs * min(cfg.slots, local) <= rows else rows + local * tile_rows


def _ring_rows(cfg: MoEConfig, world_size: int, local: int, tile_rows: int) -> int:
    """Geometry's `ring_rows`: places for twice the rows that even routing has for a rank, but for
    some tiles at least. A source with more rows reuses places. None where none can have more.
    """
    even = -(-cfg.max_tokens * cfg.slots * local // max(cfg.experts, local))
    rows = max(_RING_SHARES * even, _RING_TILES * tile_rows)
    return 0 if cfg.max_tokens * min(cfg.slots, local) <= rows else rows


def _once(cfg: MoEConfig, world_size: int, local: int, cut: Mapping[str, int]) -> dict[str, int]:
    """Fields by which calls send a token to a peer once: none, unless a rank can have several
    experts of a token. A call does so if it has `dedup_rows` rows for the peer."""
    rows_of_token = min(cfg.slots, local)
    most = cfg.max_tokens * rows_of_token
    can = world_size > 1 and rows_of_token > 1 and 0 < cut["dedup_rows"] <= most
    return {name: cut[name] if can else 0 for name in ("dedup_rows", "dedup_after")}
