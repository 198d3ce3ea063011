# SPDX-License-Identifier: Apache-2.0
"""Experts in slices: virtual ranks of one GPU, and, where there are several, a process for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeos import World
from moeos.partition.slicing import Slicing
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    STARTED,
    assert_matches,
    draw_routed_call,
    draw_weights_on_gpu,
    why_not,
)
from tests.gradients import assert_match, gradients_of
from tests.layers import config, draw_given_call, draw_weights
from tests.processes import torchrun

GPUS = 0 if why_not() else torch.cuda.device_count()

pytestmark = pytest.mark.skipif(GPUS < 1, reason=why_not() or "there is no GPU")


@pytest.mark.parametrize("ranks", [2, 4])
def test_virtual_ranks_are_right(ranks: int) -> None:
    cfg = config(
        dtype=torch.bfloat16, hidden=512, intermediate=512, experts=16, top_k=4, max_tokens=300
    )
    weights = draw_weights_on_gpu(cfg)
    calls = [draw_routed_call(weights, tokens, tokens) for tokens in (300, 1, 17)]

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel="tensor")
        made = [layer(call.x) for call in calls]
        layer.check()
        return made

    outputs = virtual.run(run, ranks, "cuda", deadline=DEADLINE)
    for number, call in enumerate(calls):
        for mine in outputs:
            assert torch.equal(mine[number], outputs[0][number])
        assert_matches(weights, call, outputs[0][number], f"call {number}")


@pytest.mark.parametrize(
    ("slicing", "ranks"),
    [
        (Slicing(2), 2),
        (Slicing(3, everywhere=False), 3),
        (Slicing(2), 4),
        (Slicing(2, apart=True), 2),
        (Slicing(2, apart=True), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("save", ["nothing", "preactivation"])
def test_gradients_of_virtual_ranks_are_right(slicing: Slicing, ranks: int, save: str) -> None:
    cfg = config(
        **{"dtype": torch.bfloat16, "hidden": 256, "intermediate": 384, "experts": 16, "top_k": 4},
        **{"max_tokens": 300, "bias": True, "save": save},
        **{"shared_experts": 1, "shared_intermediate": 192, "shared_gate": True},
    )
    weights = draw_weights(cfg)
    for tokens in (300, 17):
        calls = [
            draw_given_call(cfg, tokens, rank // slicing.slices if slicing.sums else rank)
            for rank in range(ranks)
        ]
        found = gradients_of(weights, calls, slicing=slicing, backend="cuda")
        assert_match(weights, calls, found, slicing=slicing)


@pytest.mark.skipif(GPUS < 2, reason=f"this host has {GPUS} GPU")
@pytest.mark.timeout(600)
def test_a_process_for_each_gpu() -> None:
    ended = torchrun(
        4 if GPUS >= 4 else 2, "from tests.gpu.slices import main; main()", seconds=STARTED
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "slices are right" in ended.stdout
