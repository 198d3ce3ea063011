# SPDX-License-Identifier: Apache-2.0
"""Peers whose memory is not written directly: rows are staged, and put within a window.

Virtual ranks on one GPU, whose puts are stores, run everything but the network. Processes, which
put by NVSHMEM, are in test_multi.py.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from moeos import World
from moeos.system.errors import NumericalError
from moeos.world import virtual
from tests.gpu.cases import (
    CASES,
    DEADLINE,
    REMOTE_CASES,
    Case,
    RankLayer,
    assert_all_match,
    assert_matches,
    blocks,
    compile_cases,
    draw_calls,
    draw_routed_call,
    on_gpu,
    run_calls,
    why_not,
)
from tests.layers import Call, Weights, draw_given_call, draw_weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

COUNTS = (300, 37, 0, 1, 128, 129, 250, 8)

cases = pytest.mark.parametrize("case", REMOTE_CASES.values(), ids=REMOTE_CASES)


@pytest.fixture(scope="module", autouse=True)
def remote_kernels() -> None:
    """The kernels are compiled side by side, and those that they are compared with."""
    direct = [CASES["swiglu-4-ranks"], CASES["gelu_tanh-4-ranks-capacity"]]
    compile_cases([*REMOTE_CASES.values(), *direct], blocks())


@functools.cache
def weights_of(case: Case) -> Weights:
    """A case's weights, on the GPU."""
    return on_gpu(draw_weights(case.cfg))


def draw(case: Case, count: int) -> list[list[Call]]:
    """Calls [rank][call] with token counts among which are none, one, a tile and the most."""
    weights = weights_of(case)
    return draw_calls(
        case,
        lambda rank, call: draw_routed_call(
            weights, COUNTS[(3 * rank + call) % len(COUNTS)], 1000 * rank + call
        ),
        count,
    )


@cases
def test_outputs_are_those_of_the_reference(case: Case) -> None:
    calls = draw(case, 4)
    outputs, _ = run_calls(case, weights_of(case), calls)
    assert_all_match(weights_of(case), calls, outputs)


@pytest.mark.parametrize("name", [name for name in REMOTE_CASES if "long" not in name])
def test_outputs_have_the_bits_of_direct_stores(name: str) -> None:
    case = REMOTE_CASES[name]
    calls = draw(case, 3)
    put, _ = run_calls(case, weights_of(case), calls)
    direct = dataclasses.replace(case, ranks_per_node=None)
    stored, _ = run_calls(direct, weights_of(case), calls)
    for ours, theirs in zip(put, stored, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@cases
def test_200_calls_whose_token_counts_change_every_time(case: Case) -> None:
    drawn = random.Random(7)
    calls = [[drawn.choice(of_rank) for _ in range(200)] for of_rank in draw(case, 8)]
    outputs, _ = run_calls(case, weights_of(case), calls)
    for rank in range(case.ranks):
        for number in range(0, 200, 19):
            what = f"rank {rank}, call {number}"
            assert_matches(weights_of(case), calls[rank][number], outputs[rank][number], what)
    assert not any(y.isnan().any() for rank_outputs in outputs for y in rank_outputs)


@pytest.mark.parametrize("name", ["swiglu-4-nodes", "long-rows-2-nodes-of-4"])
def test_one_expert_that_takes_every_token(name: str) -> None:
    """All rows go to one rank, windows of them, and come back from it."""
    case = REMOTE_CASES[name]
    only = torch.full((case.cfg.experts,), -torch.inf)
    only[case.cfg.experts // 2] = 0.0
    calls = draw_calls(
        case,
        lambda rank, call: draw_given_call(case.cfg, 300 - call, 10 * rank + call, only, unused=0),
        3,
    )
    outputs, _ = run_calls(case, weights_of(case), calls)
    assert_all_match(weights_of(case), calls, outputs)


@cases
def test_logits_that_are_not_finite_raise_on_all_ranks_until_reset(case: Case) -> None:
    weights = weights_of(case)
    good = draw(case, 1)
    culprit = 0  # which has 300 tokens
    bad = [[Call(call.x.clone()) for call in of_rank] for of_rank in good]
    bad[culprit][0].x[131, 5] = torch.nan

    def rank_main(world: World) -> tuple[str, Tensor]:
        layer = RankLayer(weights, world)
        layer(bad[world.rank][0])
        with pytest.raises(NumericalError) as raised:
            layer.engine.check()
        world.reset()
        y = layer(good[world.rank][0])
        layer.engine.check()
        return str(raised.value), y

    results = virtual.run(
        rank_main,
        ranks=case.ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=case.ranks_per_node,
    )
    for message, _ in results:
        assert f"token 131 on rank {culprit}" in message
    assert_all_match(weights, good, [[y] for _, y in results])
