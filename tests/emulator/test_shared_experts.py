# SPDX-License-Identifier: Apache-2.0
"""Shared experts on the emulated GPU: what every token passes is added to what its experts make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulator.emulated import assert_computes
from tests.layers import config

PATIENCE = 40
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "whole parts, a gate": (
        {"hidden": 256, "intermediate": 128, "shared_intermediate": 320, "shared_gate": True},
        1,
    ),
    "several, not whole parts, a gate, ranks": (
        {
            "intermediate": 64,
            "shared_experts": 2,
            "shared_intermediate": 72,
            "shared_gate": True,
            "bias": True,
        },
        2,
    ),
    "no gate values, a capacity": (
        {"activation": "relu2", "shared_intermediate": 136, "capacity_factor": 0.5},
        2,
    ),
    "beside zero experts": (
        {"shared_intermediate": 64, "zero_experts": 5, "top_k": 4, "renormalize": False},
        1,
    ),
}
"""Of a config, what is not usual, and its ranks."""


@pytest.mark.nightly  # other files have shared experts beside slices, rings and codes in every run
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, ranks = LAYERS[name]
    sizes = {"hidden": 128, "max_tokens": 200, "shared_experts": 1, "dtype": torch.bfloat16}
    cfg = config(**(sizes | changes))
    assert_computes(cfg, ranks, tmp_path, PATIENCE)
