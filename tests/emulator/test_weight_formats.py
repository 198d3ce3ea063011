# SPDX-License-Identifier: Apache-2.0
"""Weights that are codes and scales on the emulated GPU: the consumers decode what TMA lands."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.formats import NAMES
from tests.emulator.emulated import assert_computes
from tests.layers import config
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
IN_EVERY_RUN = (
    ("nvfp4", "parts that are not whole, ranks"),
    ("fp8_block128", "shared experts of codes, ranks"),
)


@pytest.mark.parametrize(("form", "name"), all_but(IN_EVERY_RUN, itertools.product(NAMES, LAYERS)))
def test_outputs_are_those_of_the_reference(form: str, name: str, tmp_path: Path) -> None:
    changes, ranks = LAYERS[name]
    sizes = {"dtype": torch.bfloat16, "max_tokens": 200, "weight_format": form}
    if "shared experts of codes" in name:
        sizes["shared_weight_format"] = form
    cfg = config(**(sizes | changes))
    assert_computes(cfg, ranks, tmp_path, PATIENCE)
