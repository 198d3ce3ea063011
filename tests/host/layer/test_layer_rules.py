# SPDX-License-Identifier: Apache-2.0
"""Rules of routers beyond softmax and sigmoid: each is the reference's; what is wrong says so."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from moeos import MoEConfig, MoELayer, TwinOptions, World
from moeos.config import reference
from moeos.config.config import Routing, Scoring
from moeos.world import virtual
from tests.layers import (
    FAR_BELOW,
    Call,
    Weights,
    assert_all_match,
    assert_matches,
    config,
    draw_call,
    draw_far_below,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn

pytestmark = pytest.mark.usefixtures("poisoned_output")

RULES: dict[str, dict[str, Any]] = {
    "sqrtsoftplus": {"scoring": "sqrtsoftplus"},
    "sqrtsoftplus, bias of selection": {"scoring": "sqrtsoftplus", "selection_bias": True},
    "bias of logits": {"router_bias": True},
    "bias of logits, fp32 router": {
        "router_bias": True,
        "router_dtype": torch.float32,
        "dtype": torch.bfloat16,
    },
    "scales": {"expert_scale": True},
    "weight on input": {
        "apply_router_weight_on_input": True,
        "top_k": 1,
        "renormalize": False,
        "scoring": "sigmoid",
    },
    "zero experts": {"zero_experts": 5, "top_k": 4, "renormalize": False},
    "zero experts, bias": {"zero_experts": 3, "selection_bias": True, "routed_scaling": 6.0},
    "all": {
        "scoring": "sqrtsoftplus",
        "selection_bias": True,
        "router_bias": True,
        "expert_scale": True,
        "zero_experts": 4,
        "top_k": 6,
    },
}


def outputs_of(weights: Weights, calls: list[list[Call]], **way: Any) -> list[list[torch.Tensor]]:
    """What each rank's calls return."""

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=len(calls), **way)


@pytest.mark.parametrize(("name", "ranks"), in_turn(RULES, [1, 2, 4]))
def test_a_rule_is_the_references(name: str, ranks: int) -> None:
    cfg = config(**RULES[name])
    weights = draw_weights(cfg, seed=ranks)
    calls = [
        [
            draw_call(cfg, 3, 7 * rank),
            draw_call(cfg, 0 if rank == 0 else 65, 7 * rank + 1),
            draw_given_call(cfg, 37, 7 * rank + 2),
            dataclasses.replace(draw_given_call(cfg, 37, 7 * rank + 3), weights=None),
            dataclasses.replace(draw_given_call(cfg, 1, 7 * rank + 4), weights=None),
        ]
        for rank in range(ranks)
    ]
    twin = TwinOptions(processors=2)
    assert_all_match(weights, calls, outputs_of(weights, calls, twin=twin))


@pytest.mark.parametrize("scoring", get_args(Scoring))
@pytest.mark.parametrize("routing", ["layer", "ids"])
@pytest.mark.parametrize("router_dtype", [None, torch.float32])
def test_weights_are_right_where_all_chosen_scores_are_too_small_for_fp32(
    scoring: Scoring, routing: Routing, router_dtype: torch.dtype | None
) -> None:
    rules = FAR_BELOW | {"scoring": scoring, "routing": routing, "router_dtype": router_dtype}
    weights, call = draw_far_below(config(max_tokens=1024, **rules), 200)
    ((y,),) = outputs_of(weights, [[call]])
    # fp32 has logits of 120 to 4e-6, and weights move as much.
    assert reference.relative_error(y, weights.expected(call)) <= 3e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_token_of_zero_experts_alone_is_itself(ranks: int, tokens: int) -> None:
    cfg = config(zero_experts=4, top_k=4, renormalize=True)
    weights = draw_weights(cfg)
    calls = []
    for rank in range(ranks):
        x = draw_call(cfg, tokens, rank).x
        ids = torch.arange(4).expand(tokens, 4) + cfg.experts
        some = torch.full((tokens, 4), 0.25)
        calls.append([Call(x, ids, some), Call(x, ids, None)])
    for rank, outputs in enumerate(outputs_of(weights, calls)):
        for y in outputs:
            assert reference.relative_error(y, calls[rank][0].x) <= 1e-6


def test_a_gate_of_zero_experts_alone_sends_nothing() -> None:
    cfg = config(zero_experts=4, top_k=2, renormalize=True, selection_bias=True)
    weights = draw_weights(cfg)
    bias = torch.zeros(cfg.router_rows)
    bias[cfg.experts :] = 10.0
    weights = dataclasses.replace(weights, selection_bias=bias)
    call = draw_call(cfg, 50, 3)

    def rank_main(world: World) -> tuple[torch.Tensor, int]:
        layer = weights.layer(world)
        y = call(layer)
        return y, sum(layer.stats()["pairs_sent"])

    for y, sent in virtual.run(rank_main, ranks=2):
        assert sent == 0
        assert reference.relative_error(y, call.x) <= 1e-6


def test_a_capacity_counts_no_zero_expert() -> None:
    cfg = config(zero_experts=8, top_k=4, capacity_factor=0.5)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 64, 1)
    (outputs,) = outputs_of(weights, [[call]])
    assert_matches(weights, call, outputs[0])


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_few_tokens_are_not_read_where_they_are_if_their_weight_is_on_them(tokens: int) -> None:
    cfg = config(apply_router_weight_on_input=True, top_k=1, max_tokens=8, renormalize=False)
    weights = draw_weights(cfg)
    calls = [[draw_call(cfg, tokens, seed) for seed in range(20)]]
    assert_all_match(weights, calls, outputs_of(weights, calls, twin=TwinOptions(processors=3)))


def raised(cfg: MoEConfig, match: str, **arguments: Any) -> None:
    """Asserts that a call raises this."""

    def rank_main(world: World) -> None:
        layer = MoELayer(cfg, world)
        x = torch.ones(2, cfg.hidden)
        ids = torch.tensor([[0, 1], [1, 2]])
        given = {"topk_ids": ids} | arguments
        with pytest.raises(ValueError, match=match):
            layer(x, **given)

    virtual.run(rank_main, ranks=1)


def test_what_cannot_be_weighed_is_refused() -> None:
    raised(config(), "topk_weights is None; give them with topk_ids, or, where a MoELayer")
    raised(config(), "weigh is True: the gate weighs experts", topk_ids=None, weigh=True)
    raised(
        config(),
        "topk_weights is given, and weigh is True",
        topk_weights=torch.ones(2, 2),
        weigh=True,
    )
    raised(config(routing="caller"), "weigh is True, and routing is 'caller'", weigh=True)


def test_an_id_behind_the_zero_experts_is_refused() -> None:
    cfg = config(zero_experts=2)
    ids = torch.tensor([[0, 9], [1, 10]])
    raised(cfg, r"topk_ids\[1, 1\] is 10; it must be -1 .* 0 to 9", topk_ids=ids, weigh=True)


def test_a_layer_whose_caller_chooses_lets_its_gate_weigh() -> None:
    cfg = config(routing="ids", router_bias=True)
    weights = draw_weights(cfg)
    call = dataclasses.replace(draw_given_call(cfg, 30, 5), weights=None)
    (outputs,) = outputs_of(weights, [[call]])
    assert_matches(weights, call, outputs[0])


def test_a_compiled_layer_weighs_a_callers_ids() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    call = dataclasses.replace(draw_given_call(cfg, 30, 5), weights=None)

    def rank_main(world: World) -> torch.Tensor:
        layer = weights.layer(world)
        compiled = torch.compile(
            lambda x, ids: layer(x, topk_ids=ids, weigh=True), backend="eager", fullgraph=True
        )
        y: torch.Tensor = compiled(call.x, call.ids)
        return y

    assert_matches(weights, call, virtual.run(rank_main, ranks=1)[0])
