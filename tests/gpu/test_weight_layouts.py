# SPDX-License-Identifier: Apache-2.0
"""Weights in the layouts of other frameworks on the GPU: a kernel that reads them where they lie
gives the bits of one that reads the same numbers in moeos' own layout, but for the last ones where
gates and ups are columns in turn, and these are the reference's.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from moeos.config.config import GateUp
from tests.gpu.cases import (
    Case,
    assert_all_match,
    blocks,
    compile_cases,
    draw_calls,
    on_gpu,
    run_calls,
    why_not,
)
from tests.layers import Call, Weights, config, draw_given_call, draw_weights
from tests.weight_layouts import LAYOUTS, assert_same, with_layout

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

TOKENS = (1, 8, 33, 200, 0, 700, 2048)
"""Tokens of the calls of a rank: narrow tiles of few rows and of many, and wide ones."""
UNUSED = 5
"""An expert whose weights are no numbers: what reads beyond its neighbour's matrices has NaN."""
_SIZES: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 2048, "experts": 8, "top_k": 2}
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt-oss' sizes": ({"hidden": 2880, "intermediate": 2880, "bias": True}, 1),
    "whole parts that overlap, biases": ({"hidden": 296, "intermediate": 168, "bias": True}, 2),
    "parts that are not whole, float16": (
        {"hidden": 104, "intermediate": 72, "bias": True, "dtype": torch.float16},
        1,
    ),
    "4 ranks": ({"hidden": 512, "intermediate": 384, "experts": 16, "top_k": 4}, 4),
}
"""What is not usual in a config, and its ranks."""
WITHOUT_GATES = "no gate values"
FORMATS = ("mxfp4", "nvfp4", "int4_group32", "fp8_channel", "fp8_tensor")
"""Those that do not share scales among rows."""


def _case(layout: tuple[GateUp, bool] | None, ranks: int, **changes: Any) -> Case:
    cfg = config(**(_SIZES | changes))
    if layout is not None:
        cfg = dataclasses.replace(cfg, gate_up=layout[0], transposed=layout[1])
    return Case(ranks, cfg)


def _cases() -> dict[str, tuple[Case, Case]]:
    found = {}
    for (name, (changes, ranks)), layout in itertools.product(LAYERS.items(), LAYOUTS):
        both = (_case(layout, ranks, **changes), _case(None, ranks, **changes))
        found[f"{name}, {layout[0]}, transposed {layout[1]}"] = both
    changes = {"activation": "relu2", "hidden": 288, "intermediate": 328}
    both = (_case(("concatenated", True), 1, **changes), _case(None, 1, **changes))
    found[WITHOUT_GATES] = both
    for form, coded in itertools.product(FORMATS, (False, True)):
        changes = {"hidden": 512, "intermediate": 320, "bias": True, "weight_format": form}
        if coded:
            changes["activation_format"] = "fp8_group128"
        both = (_case(("interleaved", False), 2, **changes), _case(None, 2, **changes))
        found[f"{form}{' by fp8' if coded else ''}"] = both
    return found


CASES = _cases()


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All are compiled, side by side, before the first test."""
    compile_cases(dict.fromkeys(itertools.chain(*CASES.values())), blocks())


def _weights(case: Case) -> Weights:
    drawn = draw_weights(case.cfg, seed=1)
    if case.cfg.weight_format is None:
        drawn.w1[UNUSED] = drawn.w2[UNUSED] = torch.nan
    return on_gpu(drawn)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_where_they_lie(name: str) -> None:
    moved, plain = CASES[name]
    weights = _weights(plain)
    never = torch.zeros(plain.cfg.experts).index_fill(0, torch.tensor([UNUSED]), -torch.inf)

    def draw(rank: int, number: int) -> Call:
        seed = 100 * rank + number
        return draw_given_call(plain.cfg, TOKENS[number], seed, never, unused=0.2)

    calls = draw_calls(plain, draw, len(TOKENS))
    layout = with_layout(weights, moved.cfg.gate_up, moved.cfg.transposed)
    outputs, _ = run_calls(moved, layout, calls, poison=True)
    others, _ = run_calls(plain, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)
    for number in range(len(TOKENS)):
        for rank in range(plain.ranks):
            what = f"rank {rank}, {TOKENS[number]} tokens"
            assert_same(moved.cfg, outputs[rank][number], others[rank][number], what)
