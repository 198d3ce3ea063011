# SPDX-License-Identifier: Apache-2.0
"""Random layers, worlds and routings: every output is the reference's, every count adds up."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moeos import MoEConfig, TwinOptions, World
from moeos.config.activations import Activation
from moeos.config.config import GroupScore, Scoring
from moeos.config.element_formats import FORMATS
from moeos.world import virtual
from tests.fuzz.outcomes import MULTIPLE
from tests.layers import (
    PREFERENCES,
    Call,
    assert_matches,
    draw_call,
    draw_given_call,
    draw_weights,
)

pytestmark = pytest.mark.usefixtures("poisoned_output")

CALLS = 3


def multiples_of_8(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low // 8, high // 8).map(lambda eighth: 8 * eighth)


@st.composite
def layers(draw: st.DrawFn) -> tuple[MoEConfig, int]:
    """A config, and a number of ranks, which need not divide its experts."""
    ranks = draw(st.integers(1, 8))
    experts = draw(st.one_of(st.integers(1, 6).map(lambda each: each * ranks), st.integers(1, 48)))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, 8) if experts % g == 0]))
    top_groups = draw(st.integers(1, groups))
    activation = draw(st.sampled_from(("swiglu", *get_args(Activation))))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    # A bfloat16 result of few elements has a rounding error of its own, whatever the layer does.
    smallest = 8 if dtype == torch.float32 else 64
    limit = draw(st.sampled_from([None, 0.5])) if activation == "swiglu" else None
    zero_experts = draw(st.sampled_from([0, 0, 1, 5])) if groups == 1 else 0
    top_k = draw(st.integers(1, min(8, experts // groups * top_groups + zero_experts)))
    shared = draw(st.sampled_from([0, 0, 1, 3]))
    hidden, intermediate = (draw(multiples_of_8(smallest, 336)) for _ in range(2))
    fitting = [
        name
        for name, row in FORMATS.items()
        if hidden % row.multiple == 0 == intermediate % row.multiple
    ]
    weight_format = draw(st.sampled_from([None, *fitting]))
    # Few sizes fit, so that they are drawn.
    codes = weight_format is not None and weight_format.startswith("fp8") and draw(st.booleans())
    if codes:
        hidden, intermediate = 128 * draw(st.integers(1, 2)), 64 * draw(st.integers(1, 5))
    width = draw(multiples_of_8(smallest, 336)) if shared else 0
    shares_format = weight_format is not None and shared > 0 and draw(st.booleans())
    if shares_format:
        width += -width % FORMATS[weight_format].multiple
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        zero_experts=zero_experts,
        apply_router_weight_on_input=top_k == 1 and zero_experts == 0 and draw(st.booleans()),
        router_bias=draw(st.booleans()),
        expert_scale=draw(st.booleans()),
        activation=activation,
        dtype=dtype,
        router_dtype=draw(st.sampled_from([None, None, torch.float32])),
        max_tokens=draw(st.integers(1, 300)),
        scoring=draw(st.sampled_from(get_args(Scoring))),
        renormalize=draw(st.booleans()),
        capacity_factor=draw(st.sampled_from([None, None, 0.3, 1.0, 1.25])),
        row_map=draw(st.sampled_from([None, "ragged", "capacity"])),
        routed_scaling=draw(st.sampled_from([1.0, 2.5])),
        selection_bias=draw(st.booleans()),
        expert_groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(get_args(GroupScore))),
        swiglu_limit=limit,
        bias=draw(st.booleans()),
        shared_experts=shared,
        shared_intermediate=width,
        shared_gate=shared > 0 and draw(st.booleans()),
        weight_format=weight_format,
        activation_format="fp8_group128" if codes else None,
        result_format="fp8_group128" if codes and draw(st.booleans()) else None,
        shared_weight_format=weight_format if shares_format else None,
    )
    return cfg, ranks


@st.composite
def runs(draw: st.DrawFn) -> tuple[MoEConfig, list[list[dict[str, Any]]], dict[str, Any], int]:
    """A config, what each rank passes in each call, how the ranks run, and a seed."""
    cfg, ranks = draw(layers())
    some = st.one_of(st.just(0), st.just(cfg.max_tokens), st.integers(0, cfg.max_tokens))
    calls = [
        [
            {
                "tokens": draw(some),
                "kind": draw(st.sampled_from([*PREFERENCES])),
                "given": draw(st.sampled_from(["nothing", "ids", "all"])),
            }
            for _ in range(CALLS)
        ]
        for _ in range(ranks)
    ]
    twin = TwinOptions(
        processors=draw(st.integers(1, 3)),
        split_os=draw(st.booleans()),
        jitter_us=draw(st.sampled_from([0.0, 0.0, 30.0])),
    )
    way = {"twin": twin, "ranks_per_node": draw(st.sampled_from([None, None, 1, 2]))}
    return cfg, calls, way, draw(st.integers(0, 1 << 16))


@settings(
    max_examples=12 * min(5, MULTIPLE),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(runs())
def test_any_layer_in_any_world(
    run: tuple[MoEConfig, list[list[dict[str, Any]]], dict[str, Any], int],
) -> None:
    cfg, plan, way, seed = run
    ranks = len(plan)
    routed = PREFERENCES[plan[0][0]["kind"]](cfg.experts, ranks).clamp(-3.0, 3.0)
    weights = draw_weights(cfg, seed, routed)

    def draw_one(rank: int, number: int, tokens: int, kind: str, given: str) -> Call:
        own_seed = seed + 1000 * rank + number
        if given == "nothing":
            return draw_call(cfg, tokens, own_seed)
        call = draw_given_call(cfg, tokens, own_seed, PREFERENCES[kind](cfg.experts, ranks))
        return call if given == "all" else dataclasses.replace(call, weights=None)

    calls = [
        [draw_one(rank, number, **one) for number, one in enumerate(rank_plan)]
        for rank, rank_plan in enumerate(plan)
    ]
    if cfg.capacity_factor is not None:  # a token routed otherwise could move others' drops
        assume(all(bool(weights.sure(call).all()) for rank in calls for call in rank))

    def rank_main(world: World) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        layer = weights.layer(world)
        return [(call(layer), layer.stats()) for call in calls[world.rank]]

    results = virtual.run(rank_main, ranks=ranks, **way)
    for rank, rank_results in enumerate(results):
        for number, (y, stats) in enumerate(rank_results):
            call = calls[rank][number]
            assert_matches(weights, call, y, f"rank {rank}, call {number}")
            if cfg.zero_experts == 0 or call.ids is not None or bool(weights.sure(call).all()):
                ids = weights.routed(call).ids if call.ids is None else call.ids
                used = int(((ids >= 0) & (ids < cfg.experts)).sum())
                assert sum(stats["pairs_sent"]) + stats["drops"] == used
            for peer in range(ranks):
                theirs = results[peer][number][1]["pairs_received"][rank]
                assert stats["pairs_sent"][peer] == theirs
