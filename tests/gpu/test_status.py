# SPDX-License-Identifier: Apache-2.0
"""What only the GPU can see ends a call on all ranks, without a wait, and raises on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moeos import MoELayer, NumericalError, World
from moeos.world import virtual
from tests.gpu.cases import (
    CASES,
    Case,
    assert_all_match,
    call_on_gpu,
    on_gpu,
    why_not,
)
from tests.layers import Call, draw_call, draw_given_call, draw_weights

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

DEADLINE = 10.0
TOKENS = 200
EXPERTS, TOP_K = 16, 4  # of both cases

cases = pytest.mark.parametrize(
    "case", [CASES["swiglu-1-rank"], CASES["swiglu-4-ranks"]], ids=["1 rank", "4 ranks"]
)


def given(value: int, slot: int, dtype: torch.dtype = torch.int64) -> Callable[[Case], Call]:
    """A call with an id changed to `value` in token 131."""

    def draw(case: Case) -> Call:
        call = draw_given_call(case.cfg, TOKENS, 77, unused=0.0)
        assert call.ids is not None
        call.ids[131] = torch.arange(TOP_K)
        call.ids[131, slot] = value
        return call_on_gpu(Call(call.x, call.ids.to(dtype), call.weights))

    return draw


def routed(value: float) -> Callable[[Case], Call]:
    """A call with a value in token 131 that makes its logits not finite."""

    def draw(case: Case) -> Call:
        call = draw_call(case.cfg, TOKENS, 77)
        call.x[131, 5] = value
        return call_on_gpu(call)

    return draw


def no_change(case: Case) -> Call:
    return call_on_gpu(draw_call(case.cfg, TOKENS, 77))


BAD: dict[str, tuple[Callable[[Case], Call], int | None, type[Exception], str]] = {
    "an id beyond the experts": (
        given(EXPERTS, 2), None, ValueError, r"topk_ids\[131, 2\] is 16, neither"
    ),
    "an id of 32 bits beyond the experts": (
        given(1 << 30, 0, torch.int32), None, ValueError, r"topk_ids\[131, 0\] is 1073741824,"
    ),
    "an id beyond 32 bits": (
        given(1 << 32, 3), None, ValueError, r"topk_ids\[131, 3\] is 4294967296, neither"
    ),
    "an id below -1": (given(-2, 1), None, ValueError, r"topk_ids\[131, 1\] is -2, neither"),
    "an id of 32 bits below -1": (
        given(-(1 << 31), 1, torch.int32), None, ValueError, r"topk_ids\[131, 1\] is -2147483648,"
    ),
    "an id repeated": (
        given(1, 3), None, ValueError, r"topk_ids\[131, 3\] is 1, which is in that row before"
    ),
    "a NaN in x": (routed(torch.nan), None, NumericalError, "logits of token 131"),
    "a negative count": (no_change, -1, ValueError, "tokens is -1, which is not from 0 to 200"),
    "a count beyond the rows": (no_change, 201, ValueError, "tokens is 201, .* 0 to 200"),
    "the least count": (no_change, -(1 << 31), ValueError, "tokens is -2147483648,"),
}  # fmt: skip


@cases
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_on_all_ranks_until_the_reset(case: Case, name: str) -> None:
    make, count, error, words = BAD[name]
    weights = draw_weights(case.cfg)
    good = [[call_on_gpu(draw_call(case.cfg, TOKENS, rank))] for rank in range(case.ranks)]
    bad = make(case)
    culprit = case.ranks - 1

    def rank_main(world: World) -> Tensor:
        layer = weights.layer(world)
        [call] = good[world.rank]
        call(layer)
        if world.rank == culprit:
            tokens = None
            if count is not None:
                tokens = torch.tensor([count], dtype=torch.int32, device="cuda")
            layer(bad.x, bad.ids, bad.weights, tokens=tokens)
        else:
            call(layer)
        torch.cuda.synchronize()
        world.control.barrier()  # every host has been shown the failure
        for use in (lambda: call(layer), layer.check, lambda: call(layer)):
            with pytest.raises(error, match=words) as raised:
                use()
            assert f"on rank {culprit}" in str(raised.value)
            assert "in call 2" in str(raised.value)
        layer.reset()
        y = call(layer)
        layer.check()
        return y

    outputs = virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
    assert_all_match(on_gpu(weights), good, [[y] for y in outputs])


def test_a_bad_id_in_a_replayed_graph_is_found_by_check() -> None:
    case = CASES["swiglu-1-rank"]
    call = given(0, 0)(case)

    def rank_main(world: World) -> None:
        layer = draw_weights(case.cfg).layer(world)
        assert call.ids is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(call.x, call.ids, call.weights)
        graph.replay()
        layer.check()
        call.ids[131, 2] = 99
        for _ in range(3):
            graph.replay()
        with pytest.raises(ValueError, match=r"topk_ids\[131, 2\] is 99.* in call 2"):
            layer.check()

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)


@pytest.mark.parametrize("name", ["gelu_tanh-4-ranks-capacity", "silu-8-ranks-capacity"])
def test_the_capacity_follows_the_count_and_not_the_rows(name: str) -> None:
    case = CASES[name]
    weights = draw_weights(case.cfg)
    rows = case.cfg.max_tokens
    counts = [(37 * (rank + 1)) % rows for rank in range(case.ranks)]
    padded = [
        call_on_gpu(draw_given_call(case.cfg, rows, rank, unused=0.0)) for rank in range(case.ranks)
    ]
    calls = [call.first(tokens) for call, tokens in zip(padded, counts, strict=True)]

    def rank_main(world: World) -> tuple[Tensor, int]:
        layer: MoELayer = weights.layer(world)
        call = padded[world.rank]
        count = torch.tensor(counts[world.rank], dtype=torch.int32, device="cuda")
        y = layer(call.x, call.ids, call.weights, tokens=count)
        layer.check()
        assert not y[counts[world.rank] :].any()
        return y[: counts[world.rank]], layer.stats()["drops"]

    results = virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
    here = on_gpu(weights)
    assert_all_match(here, [[call] for call in calls], [[y] for y, _ in results])
    assert [drops for _, drops in results] == [here.drops(call) for call in calls]
    assert any(drops for _, drops in results)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_selection_bias_that_is_not_finite_is_safe_and_raises_in_check(value: float) -> None:
    case = CASES["gelu-2-ranks-groups"]
    call = call_on_gpu(draw_call(case.cfg, TOKENS, 0))

    def rank_main(world: World) -> None:
        layer = draw_weights(case.cfg).layer(world)
        assert layer.gate.selection_bias is not None
        layer.gate.selection_bias[3:] = value
        call(layer)
        with pytest.raises(ValueError, match=r"selection_bias\[3\] is .*; it must be finite"):
            layer.check()
        assert sum(layer.stats()["pairs_sent"]) == TOKENS * case.cfg.top_k
        layer.gate.selection_bias.zero_()
        layer.check()

    virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
