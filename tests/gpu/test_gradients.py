# SPDX-License-Identifier: Apache-2.0
"""A layer's gradients on the GPU are those of the float64 reference, and have the same bits every
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moeos import MoEConfig, Placement, World
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    Case,
    blocks,
    call_on_gpu,
    compile_cases,
    draw_routed_call,
    why_not,
)
from tests.gradients import FAR_LIMIT, Gradients, assert_match, drawn, found_of, leaves_of
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

_SIZES: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "hidden": 256,
    "intermediate": 256,
    "experts": 16,
    "top_k": 4,
    "max_tokens": 300,
}
_ON_INPUT = {
    "apply_router_weight_on_input": True,
    "top_k": 1,
    "scoring": "sigmoid",
    "renormalize": False,
}
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "gated": ({}, 1),
    "gated, parts that are not whole, biases": (
        {"hidden": 328, "intermediate": 200, "bias": True},
        1,
    ),
    "one curve, experts that no token chooses": (
        {"activation": "gelu", "experts": 100, "top_k": 2},
        1,
    ),
    "float16, biases, a limit": (
        {"dtype": torch.float16, "activation": "swigluoai", "swiglu_limit": 0.5, "bias": True},
        1,
    ),
    "two ranks": ({}, 2),
    "three ranks, uneven, biases": ({"bias": True, "activation": "relu2"}, 3),
    "a capacity": ({"capacity_factor": 1.0, "row_map": "capacity"}, 2),
    "zero experts": ({"zero_experts": 6}, 1),
    "weights on inputs, biases": ({"bias": True, **_ON_INPUT}, 2),
    "experts anywhere, a rank without one": ({}, 3),
    "experts anywhere, a capacity, zero experts": ({"zero_experts": 4, "capacity_factor": 1.0}, 2),
    "two nodes, biases": ({"bias": True}, 2),
}
PLACED = {
    "experts anywhere, a rank without one": Placement(
        [[9, 0, 14, 3, 7, 1], [], [15, 2, 4, 5, 6, 8, 10, 11, 12, 13]]  # type: ignore[arg-type]
    ),
    "experts anywhere, a capacity, zero experts": Placement(
        [[15, 0, 14, 3, 7], [1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13]]  # type: ignore[arg-type]
    ),
}
RANKS_PER_NODE = {"two nodes, biases": 1}


def case_of(name: str, **saving: object) -> Case:
    """A layer of the table; `saving`: what its calls save."""
    changes, ranks = LAYERS[name]
    if saving.get("save") == "preactivation" and "swiglu_limit" in changes:
        saving = {**saving, "swiglu_limit": FAR_LIMIT}
    cfg = config(**{**_SIZES, **changes, **saving})
    nodes, placement = RANKS_PER_NODE.get(name), PLACED.get(name)
    return Case(ranks, cfg, ranks_per_node=nodes, placement=placement)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All layers' kernels are compiled, side by side, before the first test."""
    saves = ("nothing", "preactivation")
    cases = [case_of(name, save=save) for name in LAYERS for save in saves]
    compile_cases(cases, blocks(), gradients=True)


def gradients_of(case: Case, weights: Weights, calls: Sequence[Sequence[Call]]) -> list[Any]:
    """What calls [rank][call] have, [rank][call], on the CPU."""

    def rank_main(world: World) -> list[Gradients]:
        layer = weights.layer(world, placement=case.placement).requires_grad_()
        made = []
        for call in calls[world.rank]:
            layer.zero_grad()
            there = leaves_of(call_on_gpu(call))
            there(layer).backward(drawn(call, world.rank).cuda())
            found = found_of(there, layer)
            made.append({name: gradient.cpu() for name, gradient in found.items()})
        layer.check()
        return made

    return virtual.run(
        rank_main,
        ranks=case.ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=case.ranks_per_node,
    )


def check(case: Case, counts: Sequence[int]) -> None:
    weights = draw_weights(case.cfg, seed=1)

    def calls_of(rank: int) -> list[Call]:
        calls = []
        for number, count in enumerate(counts):
            tokens, seed = max(0, count - 7 * rank), 100 * rank + 10 * number
            calls.append(draw_given_call(case.cfg, tokens, seed))
            calls.append(draw_routed_call(weights, tokens, seed + 1))
        favoured = PREFERENCES["one-expert"](case.cfg.experts, case.ranks)
        calls.append(draw_given_call(case.cfg, case.cfg.max_tokens, rank, favoured))
        return calls

    calls = [calls_of(rank) for rank in range(case.ranks)]
    found = gradients_of(case, weights, calls)
    for number in range(len(calls[0])):
        mine = [calls[rank][number] for rank in range(case.ranks)]
        its = [found[rank][number] for rank in range(case.ranks)]
        assert_match(weights, mine, its, placement=case.placement)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_references(name: str) -> None:
    check(case_of(name), (300, 1, 0, 77))


@pytest.mark.parametrize("saved_rows", [33, None])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_call_saves_is_found(name: str, saved_rows: int | None) -> None:
    check(case_of(name, save="preactivation", saved_rows=saved_rows), (300, 1, 0, 77))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_call_has_the_same_bits(ranks: int) -> None:
    case = Case(ranks, config(**_SIZES))
    weights = draw_weights(case.cfg)
    calls = [[draw_given_call(case.cfg, 250 + rank, rank)] * 5 for rank in range(ranks)]
    for first, *others in gradients_of(case, weights, calls):
        for other in others:
            assert all(torch.equal(other[name], gradient) for name, gradient in first.items())


@pytest.mark.parametrize("save", ["nothing", "preactivation"])
def test_a_call_in_pieces(save: str) -> None:
    cfg: MoEConfig = config(**{**_SIZES, "max_tokens": 64, "save": save})
    weights = draw_weights(cfg)
    whole = dataclasses.replace(cfg, max_tokens=150)
    call = draw_given_call(whole, 150, 3)

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        there = leaves_of(Call(call.x.cuda(), call.ids.cuda(), call.weights.cuda()))
        y = layer(there.x, topk_ids=there.ids, topk_weights=there.weights, pieces=3)
        y.backward(drawn(call, 0).cuda())
        return {name: gradient.cpu() for name, gradient in found_of(there, layer).items()}

    found = virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)
    assert_match(weights, [call], found)


def test_shared_experts() -> None:
    cfg = config(**_SIZES, shared_experts=1, shared_intermediate=192, shared_gate=True)
    weights = draw_weights(cfg)
    call = draw_routed_call(weights, 200, 5)

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        there = leaves_of(Call(call.x.cuda()))
        there(layer).backward(drawn(call, 0).cuda())
        return {name: gradient.cpu() for name, gradient in found_of(there, layer).items()}

    found = virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)
    assert_match(weights, [call], found)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_has_the_gradients_of_the_model_in_one_graph(backend: str) -> None:
    cfg = config(**_SIZES, bias=True)
    weights = draw_weights(cfg)
    call = draw_routed_call(weights, 200, 5)

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        there = leaves_of(Call(call.x.cuda()))
        compiled = torch.compile(lambda x: 1.0 * layer(x), fullgraph=True, backend=backend)
        for _ in range(2):
            layer.zero_grad()
            there.x.grad = None
            compiled(there.x).backward(drawn(call, 0).cuda())
        return {name: gradient.cpu() for name, gradient in found_of(there, layer).items()}

    torch._dynamo.reset()
    found = virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)
    assert_match(weights, [call], found)


def test_what_has_none_says_so() -> None:
    cfg = config(**{**_SIZES, "experts": 4, "top_k": 2})
    weights = draw_weights(cfg)
    copies = Placement([[0, 1, 2], [2, 3, 0]])  # type: ignore[arg-type]

    def rank_main(world: World) -> None:
        layer = weights.layer(world, placement=copies).requires_grad_()
        with pytest.raises(RuntimeError, match="no backward where several ranks hold an expert"):
            layer(draw_call(cfg, 8, 0).x.cuda())

    virtual.run(rank_main, ranks=2, backend="cuda", deadline=DEADLINE)


def test_experts_that_move_take_their_gradients_along() -> None:
    """A call behind a `replace` learns experts, not the places that they had."""
    cfg = config(**_SIZES, zero_experts=2)
    weights = draw_weights(cfg, seed=1)
    first = Placement([range(8), range(8, 16)])  # type: ignore[arg-type]
    then = Placement([range(0, 16, 2), range(1, 16, 2)])  # type: ignore[arg-type]
    calls = [draw_routed_call(weights, 100, rank) for rank in range(2)]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world, placement=first).requires_grad_()
        for placement in (None, then):
            if placement is not None:
                layer.replace(placement)
            layer.zero_grad()
            there = leaves_of(call_on_gpu(calls[world.rank]))
            there(layer).backward(drawn(calls[world.rank], world.rank).cuda())
        return {name: gradient.cpu() for name, gradient in found_of(there, layer).items()}

    found = virtual.run(rank_main, ranks=2, backend="cuda", deadline=DEADLINE)
    assert_match(weights, calls, found, placement=then)
