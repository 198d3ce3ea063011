# SPDX-License-Identifier: Apache-2.0
"""A router in fp32: the layer chooses float64's experts, whatever type all else has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeos import MoEConfig, World
from moeos.config import reference
from moeos.world import virtual
from tests.layers import (
    Call,
    Weights,
    assert_matches,
    chosen,
    config,
    draw_call,
    draw_weights,
    pair_experts,
    routed_by_reference,
    telling_experts,
)

pytestmark = pytest.mark.usefixtures("poisoned_output")

TOKENS = 300

RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"scoring": "sigmoid"},
    "not renormalised": {"renormalize": False, "routed_scaling": 16.0},
    "best groups": {"expert_groups": 8, "top_groups": 5, "group_score": "max"},
}
BY_SCORES: dict[str, dict[str, Any]] = {
    "softmax, bias": {"selection_bias": True},
    "sigmoid, bias": {"scoring": "sigmoid", "selection_bias": True},
    "groups": {"scoring": "sigmoid", "expert_groups": 8, "top_groups": 5},
    "groups, bias": {
        "scoring": "sigmoid",
        "expert_groups": 8,
        "top_groups": 5,
        "selection_bias": True,
    },
}


def router_config(**changes: Any) -> MoEConfig:
    """A layer whose odd top_k divides pairs of experts, and whose experts cost nothing."""
    sizes: dict[str, Any] = {"hidden": 512, "intermediate": 8, "experts": 64, "top_k": 7}
    sizes |= {"max_tokens": TOKENS, "dtype": torch.bfloat16, "router_dtype": torch.float32}
    return config(**(sizes | {"activation": "identity"} | changes))


def choices_of(weights: Weights, call: Call) -> Tensor:
    """Which experts the layer sends the tokens of a call to: bool [S, E]."""

    def rank_main(world: World) -> Tensor:
        y: Tensor = call(weights.layer(world))
        return y

    return chosen(weights.cfg, virtual.run(rank_main, ranks=1)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_experts_that_16_bits_cannot_tell_apart_are_float64s(
    rules: dict[str, Any], dtype: torch.dtype
) -> None:
    cfg = router_config(dtype=dtype, **rules)
    weights = telling_experts(pair_experts(draw_weights(cfg)))
    call = draw_call(cfg, TOKENS, 0)
    exact = routed_by_reference(weights, call)
    sure = weights.sure(call)
    assert sure.sum() > 0.7 * TOKENS
    assert torch.equal(choices_of(weights, call)[sure], exact[sure])
    # Rounded to 16 bits, as the layer's other weights are, it chooses others of most pairs.
    rounded = dataclasses.replace(weights, gate=weights.gate.bfloat16())
    differs = (routed_by_reference(rounded, call) != exact).any(dim=1)
    assert differs[sure].sum() > 0.2 * TOKENS


@pytest.mark.parametrize("rules", BY_SCORES.values(), ids=BY_SCORES)
def test_experts_chosen_by_scores_are_float64s(rules: dict[str, Any]) -> None:
    cfg = router_config(**rules)
    weights = telling_experts(draw_weights(cfg))
    call = draw_call(cfg, TOKENS, 0)
    sure = weights.sure(call)
    assert sure.sum() >= 0.99 * TOKENS
    assert torch.equal(choices_of(weights, call)[sure], routed_by_reference(weights, call)[sure])


def test_a_rounded_router_sends_a_share_of_tokens_elsewhere_and_an_fp32_one_none() -> None:
    cfg = router_config(experts=256, top_k=8, max_tokens=1000)
    weights = telling_experts(draw_weights(cfg))
    call = draw_call(cfg, 1000, 1)
    exact = routed_by_reference(weights, call)
    rounded = dataclasses.replace(
        weights,
        cfg=dataclasses.replace(cfg, router_dtype=None),
        gate=weights.gate.bfloat16(),
    )
    elsewhere = (choices_of(rounded, call) != exact).any(dim=1)
    assert elsewhere.float().mean() > 0.005
    sure = weights.sure(call)
    assert sure.float().mean() > 0.99
    assert torch.equal(choices_of(weights, call)[sure], exact[sure])


def test_outputs_are_those_of_the_reference() -> None:
    cfg = config(hidden=256, experts=16, top_k=3, dtype=torch.bfloat16, router_dtype=torch.float32)
    weights = pair_experts(draw_weights(cfg))
    calls = [draw_call(cfg, tokens, tokens) for tokens in (100, 0, 33, 1)]

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [calls[world.rank](layer)]

    for call, (y,) in zip(calls, virtual.run(rank_main, ranks=4), strict=True):
        sure = weights.sure(call)
        error = reference.relative_error(y[sure], weights.expected(call)[sure])
        assert error <= 8e-3


def test_a_change_of_the_router_in_place_is_seen_by_the_next_call() -> None:
    cfg = router_config()
    weights = telling_experts(pair_experts(draw_weights(cfg)))
    other = telling_experts(pair_experts(draw_weights(cfg, seed=1)))
    call = draw_call(cfg, TOKENS, 0)

    def rank_main(world: World) -> Tensor:
        layer = weights.layer(world)
        call(layer)
        layer.gate.weight.data.copy_(other.gate)  # which no version counter counts
        y: Tensor = call(layer)
        return y

    y = virtual.run(rank_main, ranks=1)[0]
    sure = other.sure(call)
    assert torch.equal(chosen(cfg, y)[sure], routed_by_reference(other, call)[sure])


def test_the_router_stays_fp32_with_its_bits_where_a_module_is_cast() -> None:
    cfg = router_config(selection_bias=True)
    weights = telling_experts(draw_weights(cfg))
    call = draw_call(cfg, TOKENS, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        before = call(layer)
        for cast in (nn.Module.bfloat16, nn.Module.half, nn.Module.double):
            cast(layer.gate)
            assert torch.equal(layer.gate.weight, weights.gate)
            assert layer.gate.weight.dtype == torch.float32
        nn.Sequential(layer).to(torch.bfloat16)
        assert torch.equal(call(layer), before)
        layer.gate.weight = nn.Parameter(weights.gate.bfloat16(), requires_grad=False)
        with pytest.raises(TypeError, match=r"gate\.weight has dtype torch\.bfloat16; .*float32"):
            call(layer)

    virtual.run(rank_main, ranks=1)


def test_a_layer_without_it_has_its_router_in_the_layers_dtype() -> None:
    cfg = config(dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 50, 0)

    def rank_main(world: World) -> Tensor:
        layer = weights.layer(world)
        assert layer.gate.weight.dtype == torch.bfloat16
        y: Tensor = call(layer)
        return y

    assert_matches(weights, call, virtual.run(rank_main, ranks=1)[0])
