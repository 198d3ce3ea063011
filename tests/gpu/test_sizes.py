# SPDX-License-Identifier: Apache-2.0
"""Layers of real sizes: every config that the GPU has, whole outputs against float64.

Weights are drawn on the GPU, and the reference runs there, so that whole calls can be compared.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from moeos import MoEConfig
from moeos.compile import kernel_shape
from tests.gpu.cases import (
    Case,
    assert_all_match,
    blocks,
    compile_cases,
    draw_calls,
    draw_routed_call,
    draw_weights_on_gpu,
    run_calls,
    why_not,
)
from tests.layers import PREFERENCES, Call, Weights, draw_given_call
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


def _cases() -> dict[str, Case]:
    found = {}
    for path in sorted((ROOT / "configs").glob("*.toml")):
        cfg = MoEConfig.from_toml(path)
        if cfg.dtype in kernel_shape.DTYPES:
            found[f"{path.stem}-1-rank"] = Case(1, cfg)
            found[f"{path.stem}-4-ranks"] = Case(4, dataclasses.replace(cfg, max_tokens=1024))
    qwen = MoEConfig.from_toml(ROOT / "configs" / "qwen3-30b-a3b.toml")
    found["qwen3-30b-a3b-float16"] = Case(1, dataclasses.replace(qwen, dtype=torch.float16))
    return found


CASES = _cases()


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The kernels of all cases are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())


@functools.lru_cache(maxsize=1)
def weights_of(cfg: MoEConfig) -> Weights:
    """A config's weights; those of one config at a time."""
    return draw_weights_on_gpu(cfg)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whole_outputs_are_those_of_the_reference(case: Case) -> None:
    cfg = case.cfg
    weights = weights_of(cfg)
    zipf = PREFERENCES["zipf"](cfg.experts, case.ranks)

    def draw(rank: int, call: int) -> Call:
        seed = 10 * rank + call
        match call:
            case 0:
                return draw_routed_call(weights, cfg.max_tokens - 57 * rank, seed)
            case 1:
                return draw_given_call(cfg, cfg.max_tokens // 2 + rank, seed, zipf)
            case _:
                return draw_routed_call(weights, 8 * rank + 1, seed)

    calls = draw_calls(case, draw, 3)
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)
