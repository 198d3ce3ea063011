# SPDX-License-Identifier: Apache-2.0
"""Weights that are codes and scales on the emulated GPU: the consumers decode what TMA lands."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.config.element_formats import NAMES
from tests.emulator.emulated import EmulatedLayer, assert_computes, build
from tests.layers import config, draw_given_call, draw_weights
from tests.nightly import all_but

PATIENCE = 80
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "whole parts that overlap, biases": ({"hidden": 288, "intermediate": 160, "bias": True}, 1),
    "parts that are not whole, ranks": ({"hidden": 96, "intermediate": 64}, 2),
    "no gate values": ({"activation": "relu2", "hidden": 288, "intermediate": 320}, 1),
    "beside shared experts": (
        {
            "hidden": 128,
            "intermediate": 64,
            "shared_experts": 2,
            "shared_intermediate": 72,
            "shared_gate": True,
        },
        2,
    ),
    "shared experts of codes, ranks": (
        {
            "hidden": 96,
            "intermediate": 64,
            "shared_experts": 2,
            "shared_intermediate": 160,
            "shared_gate": True,
        },
        2,
    ),
    "shared experts of codes, whole parts": (
        {"hidden": 288, "intermediate": 160, "shared_experts": 1, "shared_intermediate": 288},
        1,
    ),
    "shared experts of codes, no gate values": (
        {
            "activation": "relu2",
            "hidden": 128,
            "intermediate": 64,
            "shared_experts": 3,
            "shared_intermediate": 96,
        },
        1,
    ),
}
"""Of a config, what is not usual, and its ranks."""
IN_EVERY_RUN = (("nvfp4", "parts that are not whole, ranks"),)
"""tests/emulator/test_coded_products.py has codes of 8 bits in every run."""


@pytest.mark.parametrize(("form", "name"), all_but(IN_EVERY_RUN, itertools.product(NAMES, LAYERS)))
def test_outputs_are_those_of_the_reference(form: str, name: str, tmp_path: Path) -> None:
    changes, ranks = LAYERS[name]
    sizes = {"dtype": torch.bfloat16, "max_tokens": 200, "weight_format": form}
    if "shared experts of codes" in name:
        sizes["shared_weight_format"] = form
    cfg = config(**(sizes | changes))
    assert_computes(cfg, ranks, tmp_path, PATIENCE)


@pytest.mark.nightly
def test_scales_of_any_power_of_two_mean_what_they_say(tmp_path: Path) -> None:
    """One multiplication makes a weight of an e8m0 scale below 2, and two make it of another one:
    some scales of a row are far below the others, and one of it is 2 or more."""
    cfg = config(
        hidden=288, intermediate=160, dtype=torch.bfloat16, max_tokens=200, weight_format="mxfp4"
    )
    drawn = draw_weights(cfg)
    assert drawn.w1_scale is not None
    assert drawn.w2_scale is not None
    w1_scale, w2_scale = drawn.w1_scale.clone(), drawn.w2_scale.clone()
    w1_scale[..., 1] = 0
    w1_scale[:, ::7, 2] = 129
    w2_scale[:, ::5, 0] = 128
    w2_scale[:, 3::64, 4] = 131
    weights = dataclasses.replace(drawn, w1_scale=w1_scale, w2_scale=w2_scale)
    assert_computes(cfg, 1, tmp_path, PATIENCE, weights)


@pytest.mark.nightly
@pytest.mark.parametrize("form", NAMES)
def test_a_scale_that_is_nan_makes_the_rows_of_its_expert_nan_and_no_others(
    form: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 64, "top_k": 1}
    cfg = config(hidden=288, intermediate=160, weight_format=form, **sizes)
    drawn = draw_weights(cfg)
    assert drawn.w1_scale is not None
    scale = drawn.w1_scale.clone()
    first = scale[1].flatten()[:1]
    if form == "mxfp4":
        first.fill_(0xFF)
    elif form == "nvfp4":
        first.view(torch.uint8).fill_(0x7F)
    else:
        first.fill_(torch.nan)
    weights = dataclasses.replace(drawn, w1_scale=scale)
    emulated = EmulatedLayer(build(cfg, 1, 3, tmp_path), weights, 1, patience=PATIENCE)
    call = draw_given_call(cfg, 64, 0)
    (y,) = emulated([call], 0)
    assert call.ids is not None
    hit = call.ids.flatten() == 1
    assert 0 < int(hit.sum()) < 64
    assert y[hit].isnan().all()
    assert y[~hit].isfinite().all()
