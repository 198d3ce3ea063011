# SPDX-License-Identifier: Apache-2.0
"""Rules of routers beyond softmax and sigmoid on the emulated GPU: each is the reference's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moeos import MoEConfig
from moeos.config.config import Routing, Scoring
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import (
    FAR_BELOW,
    Call,
    assert_matches,
    config,
    draw_call,
    draw_far_below,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but

PATIENCE = 40
RULES: dict[str, dict[str, Any]] = {
    "sqrtsoftplus, bias, scales": {
        "scoring": "sqrtsoftplus",
        "selection_bias": True,
        "router_bias": True,
        "expert_scale": True,
        "top_k": 3,
    },
    "fp32 router with a bias": {
        "scoring": "sqrtsoftplus",
        "router_bias": True,
        "router_dtype": torch.float32,
    },
    "weight on input": {
        "apply_router_weight_on_input": True,
        "top_k": 1,
        "renormalize": False,
        "scoring": "sigmoid",
    },
    "zero experts": {"zero_experts": 5, "top_k": 4, "renormalize": False, "selection_bias": True},
    "zero experts, a capacity": {"zero_experts": 8, "top_k": 4, "capacity_factor": 0.5},
    "ids weighed, softmax": {"routing": "ids", "top_k": 3},
    "ids weighed, not renormalised": {
        "routing": "ids",
        "renormalize": False,
        "router_bias": True,
        "zero_experts": 3,
        "expert_scale": True,
    },
}
IN_EVERY_RUN = ("fp32 router with a bias",)


def _config(rules: dict[str, Any]) -> MoEConfig:
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 64, "max_tokens": 80}
    return config(dtype=torch.bfloat16, **(sizes | rules))


def _calls(cfg: MoEConfig, ranks: int, tokens: int, seed: int) -> list[list[Call]]:
    """Of each number: what each rank passes."""
    found = []
    for kind in range(3):
        calls = []
        for rank in range(ranks):
            own, count = seed + 10 * kind + rank, max(0, tokens - 3 * rank)
            given = draw_given_call(cfg, count, own)
            if kind == 1:
                calls.append(given)
            elif cfg.routing == "ids":
                calls.append(dataclasses.replace(given, weights=None))
            else:
                calls.append(draw_call(cfg, count, own))
        found.append(calls)
    return found


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, RULES))
@pytest.mark.parametrize("ranks", all_but([1], [1, 2]))
def test_a_rule_is_the_references(name: str, ranks: int, tmp_path: Path) -> None:
    cfg = _config(RULES[name])
    weights = draw_weights(cfg, seed=3)
    library = build(cfg, ranks, 3, tmp_path)
    layer = EmulatedLayer(library, weights, ranks, patience=PATIENCE)
    for tokens in (1, 7, 40):
        for calls in _calls(cfg, ranks, tokens, seed=tokens):
            outputs = layer(calls, seed=tokens)
            for rank, (call, y) in enumerate(zip(calls, outputs, strict=True)):
                assert_matches(weights, call, y, f"{tokens} tokens, rank {rank}")


@pytest.mark.nightly
def test_tokens_of_zero_experts_alone_are_themselves(tmp_path: Path) -> None:
    cfg = _config({"zero_experts": 4, "top_k": 2, "selection_bias": True})
    bias = torch.zeros(cfg.router_rows)
    bias[cfg.experts :] = 10.0
    weights = dataclasses.replace(draw_weights(cfg), selection_bias=bias)
    layer = EmulatedLayer(build(cfg, 1, 3, tmp_path), weights, 1, patience=PATIENCE)
    for tokens in (1, 50):
        call = draw_call(cfg, tokens, tokens)
        (y,) = layer([call], seed=tokens)
        assert_matches(weights, call, y)
        assert (y - call.x).abs().max() <= 0.02


@pytest.mark.nightly  # the twin, of the same source, has it in every run
@pytest.mark.parametrize("scoring", get_args(Scoring))
@pytest.mark.parametrize("routing", ["layer", "ids"])
def test_weights_are_right_where_all_chosen_scores_are_too_small_for_fp32(
    scoring: Scoring, routing: Routing, tmp_path: Path
) -> None:
    cfg = _config(FAR_BELOW | {"scoring": scoring, "routing": routing, "experts": 8})
    weights, call = draw_far_below(cfg, 60)
    layer = EmulatedLayer(build(cfg, 1, 3, tmp_path), weights, 1, patience=PATIENCE)
    (y,) = layer([call], seed=0)
    assert_matches(weights, call, y)
