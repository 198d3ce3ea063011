# SPDX-License-Identifier: Apache-2.0
"""What kernels are compiled for: layers that the GPU has, and how their work is cut."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeos import MoEConfig, World
from moeos.compile import kernel_shape
from moeos.compile.kernel_shape import KernelShape, route_columns
from moeos.layer.experts import check_supported
from moeos.partition.slicing import Slicing
from tests.gpu import multi
from tests.gpu.cases import LARGE_EXPERTS
from tests.host.compile.kernel_shapes import LAYER, shape
from tests.layers import draw_given_call
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32; .* torch.bfloat16 or torch.float16"),
        ({"experts": 1025}, 'experts is 1025; .* at most 1024 .* "twin"'),
        ({"experts": 64, "top_k": 33}, 'top_k is 33; .* at most 32 .* "twin"'),
        (
            {"experts": 64, "expert_groups": 64, "top_groups": 64},
            'expert_groups is 64; .* at most 32 .* "twin"',
        ),
        (
            {"experts": 64, "top_k": 32, "shared_experts": 1, "shared_intermediate": 64},
            'top_k is 32; .* at most 31 .* "twin"',
        ),
        (
            {"experts": 64, "top_k": 17, "rounding": "NR-f"},
            'slots is 34; .* at most 32 .* "twin"',
        ),
    ],
    ids=["float32", "experts", "top_k", "groups", "top_k beside shared experts", "slots"],
)
def test_a_layer_that_the_gpu_does_not_have_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shape(**changes)
    world = cast(World, SimpleNamespace(backend="cuda", rank=3))
    with pytest.raises(ValueError, match=f"^rank 3: {message}"):
        check_supported(MoEConfig(**(LAYER | changes)), world)


@pytest.mark.parametrize("changes", [{"experts": 1024}, {"experts": 64, "top_k": 32}])
def test_the_gpu_has_1024_experts_and_32_choices(changes: dict[str, Any]) -> None:
    shape(**changes).sizes  # noqa: B018 - raises if a bound does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_80"}, "arch is 'sm_80'; .* sm_90a"),
        ({"world_size": 0}, "world_size is 0; it must be at least 1"),
        ({"virtual_ranks": 3}, "virtual_ranks is 3; allowed: 1, or all 2"),
        ({"processors": 0}, "processors is 0"),
        ({"places": 513}, "placement has 1026 places, 513 on each of 2 ranks; .* at most 1024"),
        (
            {"places": 513, "slicing": Slicing(2, apart=True)},
            "slices of experts have 1026 places, .* lower tensor_ranks",
        ),
        (
            {"world_size": 33, "slicing": Slicing(33, apart=True)},
            "a token has .* rows, of 33 slices of each of its experts .* at most 32",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_shape_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(shape(), **changes)


@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=["16 bits", "fp32"])
@pytest.mark.parametrize("experts", [64, 128, 256, 384, 512, 1000, 1024])
def test_each_slice_of_a_router_has_a_step(experts: int, router_dtype: torch.dtype | None) -> None:
    for hidden in range(64, 8200, 8):
        cfg = dataclasses.replace(shape().cfg, router_dtype=router_dtype)
        cfg = dataclasses.replace(cfg, hidden=hidden, experts=experts)
        banks = -(-experts // 256)
        slices, rest = divmod(kernel_shape._route_slices(cfg), banks)
        assert rest == 0
        columns = (64 if router_dtype is None else 32) * (1 if experts > 128 else 2)
        steps = -(-hidden // columns)
        each = -(-steps // slices)  # kSliceSteps of kernels/sm90/route/router_products.cuh
        assert 1 <= slices <= 8
        assert (slices - 1) * each < steps <= slices * each, hidden
        # They fit a row of the output, with a sum of each warpgroup but for fp32; or, if not even
        # one slice of each of several banks does, they have memory of their own.
        logits = experts if banks == 1 else 256 * banks
        kept = slices * (2 if router_dtype is None else 1) * logits * 4
        if slices > 1:
            assert kept <= hidden * 2, hidden
        is_long = banks > 1 and kept > hidden * 2
        assert kernel_shape._kept_bytes(cfg) == (kept if is_long else 0), hidden


def test_sums_that_a_tokens_row_is_too_short_for_are_counted_with_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = 2 * 1024 * 4  # a sum of each warpgroup
    rows = [shape(experts=1024, hidden=hidden) for hidden in (4088, 4096)]
    assert [made.sizes.kept_bytes for made in rows] == [kept, 0]
    counted = shape(experts=1024).sizes.memory_bytes
    monkeypatch.setattr(kernel_shape, "_kept_bytes", lambda cfg: 0)
    left_out = shape(experts=1024).sizes.memory_bytes
    assert counted - left_out == LAYER["max_tokens"] * kept


@pytest.mark.parametrize(
    ("changes", "world_size", "dedup_rows"),
    [
        ({}, 2, 10),
        ({}, 4, 10),
        ({"hidden": 2048}, 2, 1),
        ({"top_k": 1}, 2, 0),
        ({}, 8, 0),
        ({}, 1, 0),
        ({"max_tokens": 4}, 2, 0),
        ({"max_tokens": 3, "hidden": 2048}, 2, 0),
    ],
    ids=["two", "four", "long", "top-1", "one expert a rank", "one rank", "few rows", "few tokens"],
)
def test_tokens_go_once_where_a_call_can_have_many_rows_and_a_token_several(
    changes: dict[str, Any], world_size: int, dedup_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_shape, "ONCE_BYTES", 10 * 64 * 2)
    monkeypatch.setattr(kernel_shape, "DEDUP_TOKENS", 4)
    sizes = dataclasses.replace(shape(**changes), world_size=world_size).sizes
    assert sizes.dedup_rows == dedup_rows
    assert [sizes.deduplicates(rows) for rows in (9, 10)] == [0 < dedup_rows <= 9, dedup_rows > 0]
    assert (sizes.dedup_after > 0) == (dedup_rows > 0)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("qwen3-30b-a3b", 2, 44), ("qwen3-30b-a3b", 4, 22), ("qwen3-235b-a22b", 4, 11)],
)
def test_the_rows_with_which_processors_begin_come_without_copies(
    name: str, ranks: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """132 processors begin with 22 tiles of six parts, or 11 of twelve, of rows of all ranks."""
    monkeypatch.setattr(kernel_shape, "HOPPER_BLOCKS", 132)  # as it is without tests.gpu.cases
    cfg = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    assert dataclasses.replace(shape(), cfg=cfg, world_size=ranks).sizes.dedup_after == chunks


@pytest.mark.parametrize(
    ("name", "dispatch_tokens"),
    [
        ("qwen3-30b-a3b", 2),
        ("deepseek-v3", 1),  # whose rows are long
        ("thesis", 16),  # a pair for each lane
    ],
)
def test_few_tokens_are_spread_as_many_by_a_courier_as_have_lanes_and_rows_that_are_short(
    name: str, dispatch_tokens: int
) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    sizes = KernelShape(cfg=cfg, world_size=1, processors=131).sizes
    assert sizes.dispatch_tokens == dispatch_tokens
    assert sizes.dispatches_tokens(dispatch_tokens * 131)
    assert not sizes.dispatches_tokens(dispatch_tokens * 131 + 1)


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "gib", "between"),
    [
        ("qwen3-30b-a3b", 8, 8192, 0.95, 0.20),
        ("deepseek-v3", 64, 4096, 1.68, 0.26),
        ("deepseek-v3", 512, 512, 3.81, 0.26),  # pieces of 4096
    ],
)
def test_what_a_rank_holds_hardly_grows_with_the_world(
    name: str, ranks: int, tokens: int, gib: float, between: float
) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    cfg = dataclasses.replace(cfg, max_tokens=tokens)
    transport = "none" if ranks <= 8 else "nvshmem"
    sizes = KernelShape(cfg=cfg, world_size=ranks, processors=131, transport=transport).sizes
    assert sizes.intermediate_bytes <= between * 2**30
    assert sizes.heap_bytes + sizes.intermediate_bytes <= gib * 2**30


@pytest.mark.parametrize(("ranks", "local"), [(1, 128), (2, 64), (3, 43), (4, 32), (128, 1)])
def test_worlds_of_two_have_places_between_the_products_for_every_row(
    ranks: int, local: int
) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / "qwen3-30b-a3b.toml")
    sizes = KernelShape(cfg=cfg, world_size=ranks, processors=131).sizes
    share = -(-ranks * cfg.max_tokens * cfg.top_k * local // cfg.experts)
    assert sizes.between_rows == (0 if ranks <= 2 else 2 * share + 128 * local)
    assert sizes.intermediate_rows >= min(sizes.between_rows, ranks * cfg.max_tokens)


@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_calls_of_several_gpus_have_more_rows_than_places(ranks: int) -> None:
    """So `tests.gpu.multi` makes calls that use places in turn."""
    cfg = multi.UNEVEN
    with multi.few_places():
        places = KernelShape(cfg=cfg, world_size=ranks, processors=131).sizes.between_rows
    every = [
        draw_given_call(cfg, cfg.max_tokens, 1000 * rank + 2, multi.POPULAR)
        for rank in range(ranks)
    ]
    of_first = cfg.experts_per_rank(ranks)
    ids = torch.cat([call.ids for call in every if call.ids is not None])
    assert int(((ids >= 0) & (ids < of_first)).sum()) > 1.3 * places > 0


@pytest.mark.parametrize(("ranks", "local"), [(1, 128), (2, 64), (3, 43), (4, 32), (128, 1)])
def test_worlds_of_two_have_places_in_cells_for_every_row(ranks: int, local: int) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / "qwen3-30b-a3b.toml")
    sizes = KernelShape(cfg=cfg, world_size=ranks, processors=131).sizes
    most = cfg.max_tokens * min(cfg.top_k, local)
    twice = 2 * -(-cfg.max_tokens * cfg.top_k * local // cfg.experts)
    assert sizes.cell_rows == most
    assert sizes.ring_rows == (0 if ranks <= 2 else max(twice, 4 * 128))
    assert sizes.cell_places == (most if ranks <= 2 else align(sizes.ring_rows, 32) + 128)


def align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def test_experts_are_large_where_a_cache_cannot_hold_those_of_two() -> None:
    for name, large in {"qwen3-30b-a3b": False, "qwen3-235b-a22b": True}.items():
        cfg = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
        sizes = KernelShape(cfg=cfg, world_size=4, processors=131).sizes
        assert sizes.large_experts == large, name
    assert shape(**LARGE_EXPERTS).sizes.large_experts
    assert not shape().sizes.large_experts


@pytest.mark.parametrize(
    ("changes", "align"),
    [
        ({"hidden": 256, "intermediate": 128}, 1),
        ({"hidden": 264, "intermediate": 136}, 1),
        ({"hidden": 256, "intermediate": 256, "activation": "gelu"}, 1),
        ({"hidden": 256, "intermediate": 248, "activation": "gelu"}, 8),
        ({"hidden": 248, "intermediate": 128}, 8),
        ({"hidden": 256, "intermediate": 120}, 8),
        (
            {
                "hidden": 256,
                "intermediate": 128,
                "shared_experts": 1,
                "shared_intermediate": 120,
            },
            8,
        ),
    ],
)
def test_segments_are_padded_where_a_gemm_has_fewer_columns_than_a_tile(
    changes: dict[str, Any], align: int
) -> None:
    assert shape(**changes).sizes.segment_align == align


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("qwen3-30b-a3b", 4),  # as many as fit a row of the output
        ("deepseek-v3", 7),
    ],
)
@pytest.mark.parametrize("max_tokens", [64, 8192])
def test_the_slices_of_a_router_are_those_of_the_layer_whatever_a_call_has(
    name: str, slices: int, max_tokens: int
) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    cfg = dataclasses.replace(cfg, max_tokens=max_tokens)
    sizes = KernelShape(cfg=cfg, world_size=4, processors=131).sizes
    assert sizes.route_slices == slices
    assert 2 * slices * route_columns(cfg) * 4 <= cfg.hidden * cfg.dtype.itemsize


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (0, 0),
        (1, 4),
        (512, 16 * 4),  # 16 blocks of 32 tokens, a part for each slice
        (2048, 64 * 2),  # 64 blocks, whose parts have two slices each
        (4192, 131),  # a block for every processor
        (4193, 66 * 2),  # blocks of 64 tokens
        (8192, 128),
    ],
)
def test_a_calls_router_is_cut_so_that_most_processors_have_a_part(tokens: int, parts: int) -> None:
    cfg = MoEConfig.from_toml(ROOT / "configs" / "qwen3-30b-a3b.toml")
    cfg = dataclasses.replace(cfg, max_tokens=8192)
    sizes = KernelShape(cfg=cfg, world_size=4, processors=131).sizes
    assert sizes.route_parts(tokens) == parts
