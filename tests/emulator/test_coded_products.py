# SPDX-License-Identifier: Apache-2.0
"""Rows and weights that are both codes on the emulated GPU: FP8 by FP8, and 4 bits by FP8."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulator.emulated import EmulatedLayer, assert_computes, build
from tests.layers import assert_matches, coded_call, config, draw_given_call, draw_weights

PATIENCE = 80
SIZES: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "max_tokens": 200,
    "weight_format": "fp8_block128",
    "activation_format": "fp8_group128",
}
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "gated, ranks, blocks that parts share": ({"hidden": 256, "intermediate": 320}, 2),
    "biases and channels": (
        {"hidden": 128, "intermediate": 192, "bias": True, "weight_format": "fp8_channel"},
        1,
    ),
    "no gate values, parts that overlap": (
        {"activation": "relu2", "hidden": 384, "intermediate": 192},
        1,
    ),
    "a part that is not whole, a matrix' scale": (
        {
            "activation": "relu2",
            "hidden": 128,
            "intermediate": 64,
            "weight_format": "fp8_tensor",
        },
        2,
    ),
    "beside shared experts, three ranks": (
        {
            "hidden": 128,
            "intermediate": 64,
            "experts": 12,
            "shared_experts": 2,
            "shared_intermediate": 72,
            "shared_gate": True,
        },
        3,
    ),
    "beside shared experts whose weights are codes": (
        {
            "hidden": 256,
            "intermediate": 64,
            "shared_experts": 2,
            "shared_intermediate": 160,
            "shared_gate": True,
            "shared_weight_format": "fp8_block128",
        },
        2,
    ),
    "weights on inputs": (
        {"hidden": 256, "intermediate": 128, "top_k": 1, "apply_router_weight_on_input": True},
        2,
    ),
    "results of codes, two ranks": (
        {"hidden": 384, "intermediate": 192, "result_format": "fp8_group128"},
        2,
    ),
    "results of codes beside shared and zero experts": (
        {
            "hidden": 256,
            "intermediate": 64,
            "shared_experts": 1,
            "shared_intermediate": 72,
            "zero_experts": 2,
            "bias": True,
            "result_format": "fp8_group128",
        },
        1,
    ),
    "results of codes in pieces": (
        {
            "hidden": 1152,
            "intermediate": 64,
            "experts": 24,
            "top_k": 24,
            "zero_experts": 1,
            "result_format": "fp8_group128",
        },
        2,
    ),
    "weights of 4 bits, ranks": ({"hidden": 256, "intermediate": 320, "weight_format": "mxfp4"}, 2),
    "weights of 4 bits, gated, results of codes": (
        {
            "hidden": 256,
            "intermediate": 320,
            "weight_format": "mxfp4",
            "result_format": "fp8_group128",
        },
        2,
    ),
    "weights of 4 bits that have two scales": (
        {"hidden": 256, "intermediate": 192, "weight_format": "nvfp4", "experts": 4},
        1,
    ),
    "weights of 4 bits, no gate values, biases, parts that overlap": (
        {
            "activation": "relu2",
            "hidden": 384,
            "intermediate": 192,
            "bias": True,
            "weight_format": "int4_group32",
        },
        1,
    ),
    "weights of 4 bits, a part that is not whole, results of codes": (
        {
            "activation": "relu2",
            "hidden": 128,
            "intermediate": 64,
            "weight_format": "nvfp4",
            "result_format": "fp8_group128",
        },
        2,
    ),
    "weights of 4 bits beside shared experts' of 4 bits": (
        {
            "hidden": 256,
            "intermediate": 64,
            "weight_format": "int4_group32",
            "shared_experts": 2,
            "shared_intermediate": 160,
            "shared_gate": True,
            "shared_weight_format": "int4_group32",
        },
        2,
    ),
    "weights of 4 bits beside shared experts, weights on inputs": (
        {
            "hidden": 256,
            "intermediate": 128,
            "top_k": 1,
            "apply_router_weight_on_input": True,
            "weight_format": "mxfp4",
            "shared_experts": 1,
            "shared_intermediate": 72,
        },
        1,
    ),
    "slots of experts": ({"hidden": 128, "intermediate": 128, "capacity_factor": 4.0}, 2),
}
"""Of a config, what is not usual, and its ranks."""
IN_EVERY_RUN = ("weights of 4 bits, gated, results of codes",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.nightly])
        for name in LAYERS
    ],
)
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, ranks = LAYERS[name]
    cfg = config(**(SIZES | changes))
    assert_computes(cfg, ranks, tmp_path, PATIENCE)


def test_codes_that_the_caller_brings_are_sent_as_they_are(tmp_path: Path) -> None:
    cfg = config(**SIZES, hidden=256, intermediate=320)  # whose kernel the first layer has, too
    weights = draw_weights(cfg)
    emulated = EmulatedLayer(build(cfg, 2, 3, tmp_path), weights, 2, patience=PATIENCE)
    for number, tokens in enumerate((40, 2)):
        given = [draw_given_call(cfg, tokens - rank, 10 * number + rank) for rank in range(2)]
        calls = [coded_call(call) for call in given]
        outputs = emulated(calls, number)
        for call, y, same in zip(calls, outputs, emulated(given, number), strict=True):
            assert_matches(weights, call, y, f"call {number}")
            assert torch.equal(y, same)


@pytest.mark.nightly
def test_scales_that_lie_far_apart_are_applied_one_by_one(tmp_path: Path) -> None:
    """Of mxfp4 those of 128 columns are put into the codes, but for where one is too small for it:
    in some boxes of the first product, and in the second half of one of the second product."""
    changes, ranks = LAYERS["weights of 4 bits, gated, results of codes"]  # one kernel for both
    cfg = config(**(SIZES | changes))
    drawn = draw_weights(cfg)
    assert drawn.w1_scale is not None
    assert drawn.w2_scale is not None
    w1_scale, w2_scale = drawn.w1_scale.clone(), drawn.w2_scale.clone()
    w1_scale[:, 5::90, 1] = 0  # in some parts alone
    w1_scale[:, 9, 4:] -= 11
    w2_scale[:, 200, 2] -= 14
    w2_scale[:, 7, 5] += 9
    weights = dataclasses.replace(drawn, w1_scale=w1_scale, w2_scale=w2_scale)
    assert_computes(cfg, ranks, tmp_path, PATIENCE, weights)
