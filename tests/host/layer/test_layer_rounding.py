# SPDX-License-Identifier: Apache-2.0
"""A layer with rounding: whole tiles in training mode, and the reference's choice in eval mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moeos import Experts, MoEConfig, MoELayer, NumericalError, World
from moeos.call.rounded_routing import GateTensors, route
from moeos.config import reference
from moeos.config.config import Rounding, Scoring
from moeos.world import virtual
from tests.layers import TOLERANCE, Weights, config, draw_call, draw_weights

TILE = 8


def rounding_config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "experts": 6,
        "max_tokens": 64,
        "rounding": "NR-f",
        "rounding_tile": TILE,
    }
    return config(**(sizes | changes))


def gate_of(weights: Weights) -> GateTensors:
    return GateTensors(
        weights.gate, weights.selection_bias, weights.router_bias, weights.expert_scale
    )


def expected(weights: Weights, x: Tensor, ids: Tensor | None = None) -> Tensor:
    """What the reference makes of its own choice, or of these experts, weighed by the gate."""
    rules = {"router_bias": weights.router_bias, "expert_scale": weights.expert_scale}
    given = None
    if ids is not None:
        given = reference.weigh(x, weights.gate, ids, weights.cfg, **rules)
    return reference.moe(
        x,
        weights.gate,
        weights.w1,
        weights.w2,
        weights.cfg,
        ids,
        given,
        b1=weights.b1,
        b2=weights.b2,
        selection_bias=weights.selection_bias,
        **rules,
    )


@pytest.mark.parametrize("way", get_args(Rounding))
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_get_whole_tiles_of_each_rank_in_training(ranks: int, way: Any) -> None:
    cfg = rounding_config(rounding=way, bias=True)
    weights = draw_weights(cfg, 1)

    def rank_main(world: World) -> list[int]:
        layer = weights.layer(world)
        assert layer.training
        x = draw_call(cfg, 64 - 7 * world.rank, world.rank).x
        torch.manual_seed(5)
        y = layer(x)
        pairs: list[int] = layer.stats()["expert_pairs"]
        if world.size == 1 or way in ("SR-f", "NR-s"):  # one generator serves all threads
            return pairs
        ids, _ = route(cfg, gate_of(weights), x, None, rounds=True)
        assert reference.relative_error(y, expected(weights, x, ids)) <= TOLERANCE[cfg.dtype]
        return pairs

    pairs = [count for mine in virtual.run(rank_main, ranks=ranks) for count in mine]
    assert sum(pairs) > 0
    assert all(count % TILE == 0 for count in pairs)


@pytest.mark.parametrize("way", ["SR-f", "NR-s"])
def test_pytorchs_seed_decides_what_is_drawn(way: Any) -> None:
    cfg = rounding_config(rounding=way, experts=16)
    weights = draw_weights(cfg, 1)
    x = draw_call(cfg, 64, 0).x

    def rank_main(world: World) -> list[list[int]]:
        layer = weights.layer(world)
        found = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            y = layer(x)
            torch.manual_seed(seed)
            ids, _ = route(cfg, gate_of(weights), x, None, rounds=True)
            assert reference.relative_error(y, expected(weights, x, ids)) <= TOLERANCE[cfg.dtype]
            found.append(layer.stats()["expert_pairs"])
        return found

    [[first, second, third]] = virtual.run(rank_main, ranks=1)
    assert first == third != second


def test_a_selection_bias_has_no_part_in_the_scores_that_chance_goes_by() -> None:
    """It makes what is chosen by negative, and negative sums are no chances."""
    cfg = rounding_config(rounding="NR-s", scoring="sigmoid", selection_bias=True)
    weights = draw_weights(cfg, 1)
    gates = [
        gate_of(weights)._replace(selection_bias=torch.full((cfg.experts,), bias))
        for bias in (0.0, -8.0)
    ]
    for seed in range(20):
        x = draw_call(cfg, 60, seed).x
        found = []
        for gate in gates:
            torch.manual_seed(seed)
            found.append(route(cfg, gate, x, None, rounds=True)[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("scoring", get_args(Scoring))
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_nothing_is_rounded_in_eval_mode(scoring: Any, renormalize: bool, biased: bool) -> None:
    cfg = rounding_config(
        scoring=scoring,
        renormalize=renormalize,
        selection_bias=biased,
        router_bias=biased,
        expert_scale=biased,
        routed_scaling=2.5,
    )
    weights = draw_weights(cfg, 2)
    x = draw_call(cfg, 50, 3).x

    def rank_main(world: World) -> None:
        layer = weights.layer(world).eval()
        y = layer(x.view(5, 10, -1)).view(x.shape)
        sure = weights.margin_in_errors(x) > 1
        assert int(sure.sum()) > 40
        wanted = expected(weights, x)
        assert reference.relative_error(y[sure], wanted[sure]) <= TOLERANCE[cfg.dtype]
        trained = layer.train()(x)
        ids, found = route(cfg, gate_of(weights), x, None, rounds=True)
        assert reference.relative_error(trained, expected(weights, x, ids)) <= TOLERANCE[cfg.dtype]
        given = layer(x, topk_ids=ids, topk_weights=found)
        assert torch.equal(given, trained)
        assert torch.equal(layer(x, topk_ids=ids, topk_weights=found), layer.eval()(x, ids, found))

    virtual.run(rank_main, ranks=2)


def test_rows_beyond_the_tokens_take_no_place_and_pieces_are_rounded_alone() -> None:
    cfg = rounding_config(max_tokens=32)
    weights = draw_weights(cfg, 1)
    x = draw_call(cfg, 32, 0).x

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        first, second = layer(x[:24]), layer(x[24:])
        some = torch.cat([x[:24], torch.full_like(x[24:], torch.nan)])
        found = layer(some, tokens=torch.tensor([24], dtype=torch.int32))
        assert torch.equal(found[:24], first)
        assert not found[24:].any()
        whole = torch.cat([x, x[:24]])
        both = layer(whole, pieces=2)
        assert torch.equal(both, torch.cat([layer(x), first]))
        assert layer(x[:0]).shape == (0, cfg.hidden)
        # Fewer tokens than a tile stay as they are.
        few = layer(x[:5])
        assert reference.relative_error(few, expected(weights, x[:5])) <= TOLERANCE[cfg.dtype]
        assert len(second) == 8

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("renormalize", [False, True])
def test_rows_beyond_the_tokens_have_no_gradient_whatever_they_hold(renormalize: bool) -> None:
    cfg = rounding_config(max_tokens=32, renormalize=renormalize)
    weights = draw_weights(cfg, 1)
    x = draw_call(cfg, 24, 0).x

    def rank_main(world: World) -> list[tuple[Tensor, Tensor]]:
        found = []
        for beyond in (0, 8):
            layer = weights.layer(world).requires_grad_()
            rows = torch.cat([x, torch.full_like(x[:beyond], torch.nan)]).requires_grad_()
            y = layer(rows, tokens=torch.tensor([24], dtype=torch.int32) if beyond else None)
            y.backward(torch.ones_like(y))
            assert rows.grad is not None
            assert layer.gate.weight.grad is not None
            assert not rows.grad[24:].any()
            found.append((rows.grad[:24], layer.gate.weight.grad))
        return found

    [(alone, padded)] = virtual.run(rank_main, ranks=1)
    assert all(bool(one.any()) for one in alone)
    for one, wanted in zip(padded, alone, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_rounded_is_named() -> None:
    cfg = rounding_config()

    def rank_main(world: World) -> None:
        with pytest.raises(ValueError, match="rounding is 'NR-f'; Experts route nothing"):
            Experts(cfg, world)
        layer = MoELayer(cfg, world)
        x = torch.zeros(3, cfg.hidden)
        with pytest.raises(ValueError, match=r"\[3, 2\]; it must be \[3, 4\], \[rows, slots\]"):
            layer(x, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
        with pytest.raises(ValueError, match="x has shape"):
            layer(x[0])
        with pytest.raises(NumericalError, match="logits of token 1 are not finite"):
            layer(x.index_fill(0, torch.tensor([1]), torch.nan))
        assert not layer(x).any()

    virtual.run(rank_main, ranks=1)


def test_a_layer_with_rounding_is_compiled_and_computes_the_same() -> None:
    cfg = rounding_config()
    weights = draw_weights(cfg, 1)
    x = draw_call(cfg, 64, 0).x

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x))

    torch._dynamo.reset()
    virtual.run(rank_main, ranks=1)
