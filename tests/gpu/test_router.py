# SPDX-License-Identifier: Apache-2.0
"""An fp32 router on the GPU chooses float64's experts, wherever the margin is what the config
promises. Prints how many tokens differ at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig, World
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    Case,
    blocks,
    compile_cases,
    draw_weights_on_gpu,
    run_calls,
    why_not,
)
from tests.layers import (
    Call,
    Weights,
    chosen,
    draw_call,
    pair_experts,
    routed_by_reference,
    telling_experts,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

TOKENS = (4096, 1, 130)
"""Of a rank's calls: blocks that have a part each, and ones that several share. An odd top_k
divides a pair of experts of each token, where these are paired.
"""


def _case(ranks: int = 1, **changes: Any) -> Case:
    sizes: dict[str, Any] = {"hidden": 2048, "intermediate": 64, "experts": 64, "top_k": 7}
    rules: dict[str, Any] = {"activation": "identity", "max_tokens": max(TOKENS)}
    types = {"dtype": torch.bfloat16, "router_dtype": torch.float32}
    return Case(ranks, MoEConfig(**(sizes | rules | types | changes)))


GROUPS: dict[str, Any] = {"expert_groups": 8, "top_groups": 4}
CASES = {
    "64-softmax": _case(),
    "64-sigmoid-bias": _case(scoring="sigmoid", selection_bias=True),
    "128-softmax-2-ranks": _case(2, experts=128, hidden=4096),
    "128-softmax-bias": _case(experts=128, hidden=2056, selection_bias=True),
    "256-softmax": _case(experts=256, hidden=7168),
    "256-softmax-top-8": _case(experts=256, hidden=7168, top_k=8),
    "256-sigmoid-groups-bias": _case(
        experts=256, hidden=7168, scoring="sigmoid", selection_bias=True, **GROUPS
    ),
    "256-best-groups": _case(experts=256, hidden=5120, group_score="max", **GROUPS),
    "200-softmax": _case(experts=200, hidden=1000),
    "384-sigmoid-bias": _case(
        experts=384, hidden=7168, top_k=9, scoring="sigmoid", selection_bias=True
    ),
    "512-softmax": _case(experts=512, top_k=11),
    "1024-sigmoid-groups-bias": _case(
        experts=1024, top_k=31, scoring="sigmoid", selection_bias=True, **GROUPS
    ),
    "256-softmax-float16": _case(experts=256, hidden=4096, dtype=torch.float16),
    "64-sigmoid-float16": _case(scoring="sigmoid", dtype=torch.float16),
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The kernels of all cases are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())


def calls_of(cfg: MoEConfig, rank: int, factor: float) -> list[Call]:
    """Calls whose tokens have one element that is `factor` times as large as the others."""
    calls = [draw_call(cfg, tokens, 10 * rank + n) for n, tokens in enumerate(TOKENS)]
    for call in calls:
        call.x[:, 17] *= factor
    return [Call(call.x.cuda()) for call in calls]


@pytest.mark.parametrize("factor", [1.0, 40.0], ids=["", "outliers"])
@pytest.mark.parametrize("pairs", [False, True], ids=["random", "pairs"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chosen_experts_are_float64s(
    case: Case, pairs: bool, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = case.cfg
    drawn = draw_weights_on_gpu(cfg)
    if pairs:
        drawn = pair_experts(drawn)
    weights = telling_experts(drawn)
    rounded = dataclasses.replace(weights, gate=weights.gate.to(cfg.dtype))
    calls = [calls_of(cfg, rank, factor) for rank in range(case.ranks)]
    outputs, _ = run_calls(case, weights, calls, poison=True)
    differing = unsure = by_rounding = wrong = tokens = 0
    for rank in range(case.ranks):
        for call, y in zip(calls[rank], outputs[rank], strict=True):
            exact = routed_by_reference(weights, call)
            differs = (chosen(cfg, y) != exact).any(dim=1)
            sure = margins(weights, call) > 1
            wrong += int((differs & sure).sum())
            differing += int(differs.sum())
            unsure += int((~sure).sum())
            by_rounding += int((routed_by_reference(rounded, call) != exact).any(dim=1).sum())
            tokens += len(y)
    with capsys.disabled():
        print(
            f"\n{tokens} tokens: {differing} differ, {unsure} have a margin of at most 1e-6; "
            f"{by_rounding} would with a rounded router",
            end="",
        )
    assert wrong == 0
    assert unsure <= 0.5 * tokens


def margins(weights: Weights, call: Call) -> Tensor:
    return weights.margin_in_errors(call.x)


def test_a_change_in_place_is_seen_by_the_next_call() -> None:
    case = CASES["64-softmax"]
    weights = telling_experts(draw_weights_on_gpu(case.cfg))
    call = calls_of(case.cfg, 0, 1.0)[0]
    for seed in range(2):
        weights.gate.data.copy_(draw_weights_on_gpu(case.cfg, seed).gate)
        outputs, _ = run_calls(case, weights, [[call]])
        sure = margins(weights, call) > 1
        found = chosen(case.cfg, outputs[0][0])
        assert torch.equal(found[sure], routed_by_reference(weights, call)[sure])


def test_a_replayed_graph_reads_the_router_as_it_is() -> None:
    """The weight has no second copy that a captured launch could read instead."""
    case = CASES["64-softmax"]
    weights = telling_experts(draw_weights_on_gpu(case.cfg))
    changed = dataclasses.replace(weights, gate=draw_weights_on_gpu(case.cfg, 1).gate)
    call = calls_of(case.cfg, 0, 1.0)[2]

    def rank_main(world: World) -> Tensor:
        layer = weights.layer(world)
        layer(call.x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y: Tensor = layer(call.x)
        layer.gate.weight.data.copy_(changed.gate)
        graph.replay()
        layer.check()
        return y

    y = virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)[0]
    sure = margins(changed, call) > 1
    assert torch.equal(chosen(case.cfg, y)[sure], routed_by_reference(changed, call)[sure])
