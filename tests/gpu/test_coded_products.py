# SPDX-License-Identifier: Apache-2.0
"""Rows and weights that are both codes on the GPU: products of FP8 by FP8, and by 4 bits, are the
reference's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.cases import (
    Case,
    assert_computes,
    blocks,
    compile_cases,
    given_and_routed,
    why_not,
)
from tests.layers import Call, coded_call, config, draw_weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

_SIZES: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "max_tokens": 600,
    "experts": 8,
    "top_k": 2,
    "weight_format": "fp8_block128",
    "activation_format": "fp8_group128",
}
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "swiglu": ({"hidden": 512, "intermediate": 384}, 2),
    "blocks that parts share, float16": (
        {"hidden": 256, "intermediate": 320, "dtype": torch.float16},
        1,
    ),
    "biases and channels": (
        {"hidden": 384, "intermediate": 192, "bias": True, "weight_format": "fp8_channel"},
        2,
    ),
    "relu2, a part that is not whole": (
        {
            "activation": "relu2",
            "hidden": 128,
            "intermediate": 64,
            "weight_format": "fp8_tensor",
        },
        1,
    ),
    "shared experts": (
        {"hidden": 512, "intermediate": 128, "shared_experts": 1, "shared_intermediate": 192},
        1,
    ),
    "shared experts of codes": (
        {
            "hidden": 512,
            "intermediate": 128,
            "shared_experts": 2,
            "shared_intermediate": 192,
            "shared_gate": True,
            "shared_weight_format": "fp8_block128",
        },
        2,
    ),
    "results of codes": (
        {"hidden": 512, "intermediate": 384, "result_format": "fp8_group128"},
        2,
    ),
    "results of codes beside others, float16": (
        {
            "hidden": 384,
            "intermediate": 128,
            "bias": True,
            "zero_experts": 2,
            "shared_experts": 1,
            "shared_intermediate": 192,
            "result_format": "fp8_group128",
            "dtype": torch.float16,
        },
        1,
    ),
    "long results of codes": (
        {
            "hidden": 7168,
            "intermediate": 128,
            "experts": 16,
            "top_k": 8,
            "result_format": "fp8_group128",
        },
        2,
    ),
    "4 bits": ({"hidden": 512, "intermediate": 384, "weight_format": "mxfp4"}, 2),
    "4 bits with two scales, float16": (
        {
            "hidden": 384,
            "intermediate": 320,
            "bias": True,
            "weight_format": "nvfp4",
            "dtype": torch.float16,
        },
        1,
    ),
    "integers of 4 bits, relu2, a part that is not whole": (
        {
            "activation": "relu2",
            "hidden": 128,
            "intermediate": 64,
            "weight_format": "int4_group32",
            "result_format": "fp8_group128",
        },
        2,
    ),
    "4 bits beside shared experts' of 4 bits": (
        {
            "hidden": 512,
            "intermediate": 128,
            "weight_format": "nvfp4",
            "shared_experts": 2,
            "shared_intermediate": 192,
            "shared_gate": True,
            "shared_weight_format": "nvfp4",
        },
        2,
    ),
    "4 bits, experts of many rows": (
        {
            "hidden": 256,
            "intermediate": 128,
            "experts": 2,
            "top_k": 1,
            "weight_format": "int4_group32",
        },
        2,
    ),
    "experts of many rows": ({"hidden": 256, "intermediate": 128, "experts": 2, "top_k": 1}, 2),
}
CASES = {
    name: Case(ranks, config(**{**_SIZES, **changes})) for name, (changes, ranks) in LAYERS.items()
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())


@pytest.mark.parametrize("name", CASES)
def test_products_of_codes_are_the_references(name: str) -> None:
    case = CASES[name]
    weights = draw_weights(case.cfg, seed=1)

    def calls_of(rank: int) -> list[Call]:
        calls = given_and_routed(weights, (1, 8, 0, 600, 77))(rank)
        if case.cfg.shared_experts + case.cfg.zero_experts == 0:
            calls += [coded_call(given) for given in calls[::2]]
        return calls

    assert_computes(case, weights, calls_of)
