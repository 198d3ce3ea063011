# SPDX-License-Identifier: Apache-2.0
"""The GPU's baseline computes the layer: on CPUs over gloo, against the float64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.all_to_all import FEW_TOKENS, AllToAllLayer
from moeos import MoEConfig
from moeos.config import reference
from tests.layers import draw_weights
from tests.processes import ForkedRanks

PLAIN = MoEConfig(
    hidden=32, intermediate=48, experts=8, top_k=2, dtype=torch.float32, max_tokens=40
)
CONFIGS = {
    "swiglu": PLAIN,
    "gelu-not-renormalized": dataclasses.replace(PLAIN, activation="gelu", renormalize=False),
    "groups": dataclasses.replace(
        PLAIN,
        experts=16,
        top_k=3,
        scoring="sigmoid",
        selection_bias=True,
        expert_groups=4,
        top_groups=2,
        routed_scaling=2.5,
    ),
    "best groups": dataclasses.replace(
        PLAIN, experts=16, top_k=3, expert_groups=4, top_groups=2, group_score="max"
    ),
}
LIMIT = 1e-5  # relative error of fp32 arithmetic

Made = tuple[Any, list[list[int]], list[int]]
"""Of a call: the output as an array, rows by source and expert, pairs sent to each rank."""


def layer_of(cfg: MoEConfig, rank: int, ranks: int) -> AllToAllLayer:
    weights = draw_weights(cfg)
    local = cfg.experts // ranks
    mine = slice(rank * local, (rank + 1) * local)
    return AllToAllLayer(
        cfg,
        weights.gate,
        weights.selection_bias,
        weights.w1[mine],
        weights.w2[mine],
        dist.group.WORLD if ranks > 1 else None,
    )


def tokens_of(cfg: MoEConfig, rank: int, count: int) -> Tensor:
    return torch.randn(count, cfg.hidden, generator=torch.Generator().manual_seed(rank))


def run_pair(
    cfg: MoEConfig, counts: list[tuple[int, int]], folder: Path, ids: Tensor | None = None
) -> list[list[Made]]:
    """Two processes make calls with counts[call][rank] tokens: [rank][call] outputs and counts."""

    def rank_main(rank: int) -> list[Made]:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
        )
        layer = layer_of(cfg, rank, 2)
        made = []
        for call in counts:
            x = tokens_of(cfg, rank, call[rank])
            given = None if ids is None else ids[: len(x)]
            y = layer(x, given, None if given is None else torch.ones(given.shape) / 2)
            assert layer.last is not None
            made.append((y.numpy(), layer.last.counts.tolist(), list(layer.last.sent)))
        dist.destroy_process_group()
        return made

    outcomes = ForkedRanks(rank_main, 2).ended(60)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """What the GPU's compiler would fuse runs as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_two_ranks_compute_what_the_reference_does(cfg: MoEConfig, tmp_path: Path) -> None:
    counts = [(40, 40), (40, 3), (0, 17), (1, 0), (0, 0), (40, 40)]
    weights = draw_weights(cfg)
    for rank, outcome in enumerate(run_pair(cfg, counts, tmp_path)):
        for call, (y, _, _) in zip(counts, outcome, strict=True):
            x = tokens_of(cfg, rank, call[rank])
            expected = reference.moe(
                x,
                weights.gate,
                weights.w1,
                weights.w2,
                cfg,
                selection_bias=weights.selection_bias,
            )
            assert y.shape == x.shape
            assert reference.relative_error(torch.as_tensor(y), expected) < LIMIT


def test_routing_given_by_the_caller_is_used_as_it_is(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 0]] * 30 + [[7, 6]] * 10)
    weights = draw_weights(PLAIN)
    outcomes = run_pair(PLAIN, [(40, 33)], tmp_path, ids)
    for rank, (tokens, [(y, _, _)]) in enumerate(zip((40, 33), outcomes, strict=True)):
        expected = reference.moe(
            tokens_of(PLAIN, rank, tokens),
            weights.gate,
            weights.w1,
            weights.w2,
            PLAIN,
            ids[:tokens],
            torch.full((tokens, 2), 0.5),
        )
        assert reference.relative_error(torch.as_tensor(y), expected) < LIMIT


def test_rows_are_counted_where_they_are_computed_and_where_they_were_sent(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 0]] * 30 + [[7, 6]] * 10)
    first, second = run_pair(PLAIN, [(40, 33)], tmp_path, ids)
    assert first[0][1] == [[30, 0, 0, 0], [30, 0, 0, 0]]
    assert second[0][1] == [[0, 30, 10, 10], [0, 30, 3, 3]]
    assert first[0][2] == [30, 50]
    assert second[0][2] == [30, 36]


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_one_rank_exchanges_nothing_and_computes_the_same(cfg: MoEConfig, tokens: int) -> None:
    weights = draw_weights(cfg)
    x = tokens_of(cfg, 0, tokens)
    expected = reference.moe(
        x, weights.gate, weights.w1, weights.w2, cfg, selection_bias=weights.selection_bias
    )
    layer = layer_of(cfg, 0, 1)
    assert reference.relative_error(layer(x), expected) < LIMIT
    layer.grouped_gemms()
    assert layer.last is not None
    assert int(layer.last.counts.sum()) == tokens * cfg.top_k


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_what_is_fused_for_many_tokens_computes_the_same(cfg: MoEConfig) -> None:
    cfg = dataclasses.replace(cfg, max_tokens=FEW_TOKENS + 8)
    weights = draw_weights(cfg)
    x = tokens_of(cfg, 0, FEW_TOKENS + 8)
    expected = reference.moe(
        x, weights.gate, weights.w1, weights.w2, cfg, selection_bias=weights.selection_bias
    )
    assert reference.relative_error(layer_of(cfg, 0, 1)(x), expected) < LIMIT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": True}, "no biases, no capacity"),
        ({"capacity_factor": 1.0}, "no biases, no capacity"),
        ({"swiglu_limit": 7.0}, "no SwiGLU limit"),
        ({"shared_experts": 1, "shared_intermediate": 64}, "no shared experts"),
        ({"expert_scale": True}, "no scales of experts"),
    ],
)
def test_a_layer_that_the_baseline_does_not_compute_is_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layer_of(dataclasses.replace(PLAIN, **change), 0, 1)
