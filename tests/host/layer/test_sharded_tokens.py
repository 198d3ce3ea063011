# SPDX-License-Identifier: Apache-2.0
"""Layers with slices of experts, and with tokens of each rank's own, on the twin."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import Experts, MoELayer, Placement, TwinOptions, World
from moeos.world import virtual
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights

SIZES = {"intermediate": 192, "max_tokens": 300, "bias": True}
SHARED = {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True}
PARALLEL = "sharded_tokens"


def assert_all_match(cfg: Any, calls: list[list[Call]], ranks: int, **options: Any) -> None:
    """`calls`: of a list, one call of each rank."""
    weights = draw_weights(cfg)

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel=PARALLEL)
        return [of_ranks[world.rank](layer) for of_ranks in calls]

    outputs = virtual.run(run, ranks, **options)
    for number, of_ranks in enumerate(calls):
        for rank, call in enumerate(of_ranks):
            assert_matches(weights, call, outputs[rank][number], f"call {number}, rank {rank}")


@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_rank_returns_its_own_tokens(ranks: int) -> None:
    cfg = config(**{**SIZES, "intermediate": 24 * ranks, "max_tokens": 70})
    tokens = ([70, 1, 0, 5, 33], [0, 0, 0, 0, 3], [1] * 5)
    calls = [
        [draw_call(cfg, many[rank % 5], 10 * rank + number) for rank in range(ranks)]
        for number, many in enumerate(tokens)
    ]
    calls.append([draw_given_call(cfg, 3 + rank, rank, unused=0.5) for rank in range(ranks)])
    calls.append([draw_given_call(cfg, 64, rank) for rank in range(ranks)])
    assert_all_match(cfg, calls, ranks)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"activation": "swiglu", **SHARED},
        {"dtype": torch.bfloat16},
        {"capacity_factor": 1.0, "bias": False},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"router_dtype": torch.float32, "selection_bias": True, "scoring": "sigmoid"},
        {"hidden": 128, "intermediate": 256, "bias": False, "weight_format": "fp8_block128"},
        {"bias": False, "weight_format": "mxfp4"},
        {
            **{"hidden": 128, "intermediate": 256, "bias": False, "dtype": torch.bfloat16},
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
        },
    ],
    ids=str,
)
def test_layers_of_all_kinds_may_be_cut(changes: dict[str, Any]) -> None:
    cfg = config(**(SIZES | changes))
    calls = [[draw_call(cfg, tokens, tokens) for tokens in many] for many in ((130, 4), (2, 299))]
    assert_all_match(cfg, calls, 2)


def test_experts_that_are_hashed_are_weighed_by_the_gate() -> None:
    cfg = config(**SIZES)
    given = [draw_given_call(cfg, 20, rank, unused=0.3) for rank in range(3)]
    calls = [[Call(call.x, call.ids) for call in given]]
    assert_all_match(cfg, calls, 3)


def test_bits_do_not_depend_on_processors_or_timing() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (300, 7, 0)]

    def run(world: World) -> Tensor:
        return weights.layer(world, parallel=PARALLEL)(calls[world.rank].x)

    found = []
    for processors, split, jitter in ((1, False, 0.0), (3, True, 0.0), (2, True, 200.0)):
        options = TwinOptions(processors=processors, split_os=split, jitter_us=jitter)
        found.append(virtual.run(run, 3, twin=options))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_token_crosses_once_to_each_rank() -> None:
    cfg = config(**{**SIZES, "top_k": 4, "bias": False})
    weights = draw_weights(cfg)

    def run(world: World) -> dict[str, Any]:
        layer = weights.layer(world, parallel=PARALLEL)
        layer(draw_call(cfg, 300, world.rank).x)
        return layer.stats()

    stats = virtual.run(run, 3)[0]
    assert stats["pairs_sent"] == [1200] * 3
    # But the rows of the first chunk, which lie there as pairs.
    assert all(300 <= rows < 300 + 2 * 32 for rows in stats["rows_sent"][1:])


def test_layers_of_all_kinds_alternate_in_one_world() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    same = draw_call(cfg, 40, 1)
    own = [draw_call(cfg, 9 * rank, rank) for rank in range(3)]

    def run(world: World) -> list[Tensor]:
        sharded = weights.layer(world, parallel=PARALLEL)
        tensor, whole = weights.layer(world, parallel="tensor"), weights.layer(world)
        mine = own[world.rank].x
        return [made for _ in range(3) for made in (sharded(mine), tensor(same.x), whole(mine))]

    for rank, outputs in enumerate(virtual.run(run, 3)):
        for number, y in enumerate(outputs):
            assert_matches(weights, same if number % 3 == 1 else own[rank], y)


def test_experts_take_slices_and_a_whole_b2() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 33 - rank, rank) for rank in range(2)]

    def run(world: World) -> Tensor:
        experts = Experts(cfg, world, parallel=PARALLEL)
        mine = weights.of_slice(experts.slicing, world.rank, world.size)
        call = calls[world.rank]
        return experts(call.x, call.ids, call.weights, mine.w1, mine.w2, mine.b1, weights.b2)

    for call, y in zip(calls, virtual.run(run, 2), strict=True):
        assert_matches(weights, call, y)


def test_state_dicts_are_those_of_the_same_slices() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 11, 0)

    def saved(world: World, parallel: Any) -> dict[str, Tensor]:
        return dict(weights.layer(world, parallel=parallel).state_dict())

    parts = virtual.run(functools.partial(saved, parallel=PARALLEL), 2)
    assert parts[0].keys() & {"w1", "w1.0of2", "b2", "shared_w1"} == {"w1.0of2", "b2", "shared_w1"}
    of_tensor = virtual.run(functools.partial(saved, parallel="tensor"), 2)
    every, others = parts[0] | parts[1], of_tensor[0] | of_tensor[1]

    def run(world: World, parallel: Any, state: dict[str, Tensor]) -> Tensor:
        layer = MoELayer(cfg, world, parallel=parallel)
        layer.load_state_dict(state)
        return layer(call.x)

    for ranks, parallel, state in (
        (2, "tensor", every),
        (2, PARALLEL, others),
        (3, PARALLEL, every),
    ):
        made = functools.partial(run, parallel=parallel, state=state)
        for y in virtual.run(made, ranks):
            assert_matches(weights, call, y, f"{parallel}, {ranks} ranks")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_gradients_are_those_of_whole_experts(bias: bool, given: bool) -> None:
    cfg = config(**{**SIZES, **SHARED, "bias": bias})
    weights = draw_weights(cfg)
    draw = draw_given_call if given else draw_call
    calls = [draw(cfg, tokens, tokens) for tokens in (130, 0, 7)]

    def run(world: World, parallel: Any) -> dict[str, Tensor]:
        layer = weights.layer(world, parallel=parallel).requires_grad_(True)
        call = calls[world.rank]
        x = call.x.clone().requires_grad_(True)
        chosen = None if call.weights is None else call.weights.clone().requires_grad_(True)
        y = layer(x, call.ids, chosen)
        y.backward(torch.sin(torch.arange(y.numel())).view_as(y))
        found = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
        found["x"] = x.grad
        if chosen is not None:
            found["topk_weights"] = chosen.grad
        return found

    whole = virtual.run(functools.partial(run, parallel="expert"), 3)
    sliced = virtual.run(functools.partial(run, parallel=PARALLEL), 3)
    own = ("w1", "w2", "b1", "b2")
    for mine, its in zip(sliced, whole, strict=True):
        assert mine.keys() == its.keys()
        for name in mine.keys() - set(own):
            torch.testing.assert_close(mine[name], its[name], rtol=1e-4, atol=1e-5)
    for name in own if bias else own[:2]:
        every = torch.cat([rank[name] for rank in whole])
        if name == "b2":  # whole on each rank, and so is its gradient
            for rank in sliced:
                torch.testing.assert_close(rank[name], every, rtol=1e-4, atol=1e-5)
            continue
        if name == "w2":
            joined = torch.cat([rank[name] for rank in sliced], 2)
        else:
            halves = [rank[name].unflatten(1, (2, -1)) for rank in sliced]
            joined = torch.cat(halves, 2).flatten(1, 2)
        torch.testing.assert_close(joined, every, rtol=1e-4, atol=1e-5)


def test_few_of_the_rows_are_tokens_and_pieces_are_calls() -> None:
    cfg = config(**{**SIZES, "max_tokens": 16})
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (40, 9)]

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel=PARALLEL)
        x = calls[world.rank].x
        padded = torch.cat([x[:9], torch.full((5, cfg.hidden), torch.nan)])
        count = torch.tensor([9], dtype=torch.int32)
        out = torch.empty_like(padded)
        return [layer(x, pieces=3), layer(padded, tokens=count, out=out)]

    for call, (y, few) in zip(calls, virtual.run(run, 2), strict=True):
        assert_matches(weights, call, y)
        assert_matches(weights, Call(call.x[:9]), few[:9])
        assert torch.equal(few[9:], torch.zeros(5, cfg.hidden))


def test_what_does_not_work_is_refused() -> None:
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"output": "scattered"}, "with parallel='sharded_tokens' each rank returns its own"),
        ({"zero_experts": 2}, {}, "a layer with parallel='sharded_tokens' has none"),
        ({"intermediate": 104}, {}, "2 ranks with parallel='sharded_tokens' take equal"),
    ]
    for changes, arguments, match in refused:
        cfg = config(**changes)

        def run(world: World, cfg: Any = cfg, arguments: Any = arguments) -> None:
            MoELayer(cfg, world, parallel=PARALLEL, **arguments)

        with pytest.raises(ValueError, match=match):
            virtual.run(run, 2)


def test_slices_cannot_be_moved() -> None:
    cfg = config()

    def run(world: World) -> None:
        MoELayer(cfg, world, parallel=PARALLEL).replace(Placement.chunk(cfg.experts, 2))

    with pytest.raises(RuntimeError, match=r"parallel is 'sharded_tokens'.*none can move"):
        virtual.run(run, 2)
