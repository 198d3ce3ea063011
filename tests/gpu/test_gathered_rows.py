# SPDX-License-Identifier: Apache-2.0
"""Own rows that first products read where the caller left their tokens, and rows between the
products in the order of tokens: virtual ranks of one GPU.

Every output has the bits of a layer that copies its rows, and is the reference's.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig, World
from moeos.partition.policies import Layout
from moeos.partition.slicing import Parallel
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    assert_matches,
    call_on_gpu,
    draw_routed_call,
    draw_weights_on_gpu,
    why_not,
)
from tests.layers import config, draw_given_call

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

CFG = config(
    **{"dtype": torch.bfloat16, "hidden": 1024, "intermediate": 512, "experts": 16, "top_k": 4},
    max_tokens=3000,
)
CASES: dict[str, tuple[MoEConfig, int, Parallel]] = {
    "a rank alone": (CFG, 1, "expert"),
    "rows that end amid a step": (
        dataclasses.replace(CFG, hidden=1000, intermediate=488, dtype=torch.float16, bias=True),
        *(1, "expert"),
    ),
    "many experts": (dataclasses.replace(CFG, experts=256, top_k=8), 1, "expert"),
    "two ranks": (CFG, 2, "expert"),
    "four ranks, odd sizes": (dataclasses.replace(CFG, hidden=328), 4, "expert"),
    "two slices": (CFG, 2, "tensor"),
    "shared experts": (
        dataclasses.replace(CFG, shared_experts=1, shared_intermediate=512),
        *(2, "expert"),
    ),
}
TOKENS = (3000, 1, 700, 64, 9, 0, 129)
TOKEN_MAJOR = ("a rank alone", "rows that end amid a step", "many experts", "two slices")
"""Cases in which nobody else has rows for a rank."""
LAYERS = [(name, "gathered") for name in CASES] + [(name, "token_major") for name in TOKEN_MAJOR]


@pytest.mark.parametrize(("name", "layout"), LAYERS)
def test_rows_by_index_give_the_bits_of_copied_ones(name: str, layout: Layout) -> None:
    cfg, ranks, parallel = CASES[name]
    weights = draw_weights_on_gpu(cfg)
    calls = [draw_routed_call(weights, tokens, tokens) for tokens in TOKENS]
    calls.append(call_on_gpu(draw_given_call(cfg, 900, 1, unused=0.3)))

    def run(world: World) -> tuple[list[Tensor], list[Tensor]]:
        copied = weights.layer(world, parallel=parallel, layout="expert_major_persistent")
        gathered = weights.layer(world, parallel=parallel, layout=layout)
        pairs = [
            (copied(*given), gathered(*given))
            for call in calls
            for given in [(call.x, call.ids, call.weights)]
        ]
        first = pairs[0][1]
        for _ in range(50):  # back to back, few and many tokens
            gathered(calls[1].x)
            again = gathered(calls[0].x)
        copied.check()
        gathered.check()
        assert torch.equal(again, first)
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    for copied, gathered in virtual.run(run, ranks, "cuda", deadline=DEADLINE):
        for number, call in enumerate(calls):
            what = f"call {number}, {len(call.x)} tokens"
            assert torch.equal(copied[number], gathered[number]), what
            assert_matches(weights, call, gathered[number], what)
