# SPDX-License-Identifier: Apache-2.0
"""Rules beyond softmax and sigmoid, and shared experts, on the GPU: each is the reference's."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from moeos.config.config import Scoring
from tests.gpu.cases import (
    Case,
    assert_computes,
    blocks,
    compile_cases,
    draw_routed_call,
    why_not,
)
from tests.layers import (
    FAR_BELOW,
    Call,
    config,
    draw_far_below,
    draw_given_call,
    draw_weights,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

RULES: dict[str, dict[str, Any]] = {
    "sqrtsoftplus": {
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
    "zero experts, 768 rows": {"experts": 512, "zero_experts": 256, "top_k": 12},
    "a shared expert": {"shared_experts": 1, "shared_intermediate": 640, "shared_gate": True},
    "shared experts beside narrow parts": {"shared_experts": 2, "shared_intermediate": 72},
    "ids weighed": {"routing": "ids", "router_bias": True, "zero_experts": 3, "renormalize": False},
}
CASES = {
    f"{name}, {ranks} ranks": Case(
        ranks,
        config(
            **{"dtype": torch.bfloat16, "hidden": 512, "intermediate": 128, "max_tokens": 300},
            **rules,
        ),
    )
    for name, rules in RULES.items()
    for ranks in (1, 2)
}


FAR_BELOW_CASES = {
    f"{scoring}, {routing}": Case(
        1,
        config(
            dtype=torch.bfloat16,
            hidden=512,
            intermediate=128,
            experts=8,
            max_tokens=300,
            scoring=scoring,
            routing=routing,
            **FAR_BELOW,
        ),
    )
    for scoring in get_args(Scoring)
    for routing in ("layer", "ids")
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All are compiled, side by side, before the first test."""
    compile_cases([*CASES.values(), *FAR_BELOW_CASES.values()], blocks())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_on_the_gpu_is_the_references(name: str) -> None:
    case = CASES[name]
    cfg = case.cfg
    weights = draw_weights(cfg, seed=1)

    def calls_of(rank: int) -> list[Call]:
        calls = []
        for number, tokens in enumerate((1, 8, 0, 300, 77)):
            seed = 100 * rank + 10 * number
            given = draw_given_call(cfg, tokens, seed)
            weighed = dataclasses.replace(given, weights=None)
            routed = (
                weighed if cfg.routing == "ids" else draw_routed_call(weights, tokens, seed + 1)
            )
            calls += [given, routed]
        return calls

    assert_computes(case, weights, calls_of)


@pytest.mark.parametrize("name", FAR_BELOW_CASES)
def test_weights_are_right_where_all_chosen_scores_are_too_small_for_fp32(name: str) -> None:
    case = FAR_BELOW_CASES[name]
    weights, call = draw_far_below(case.cfg, 300)
    assert_computes(case, weights, lambda rank: [call])
