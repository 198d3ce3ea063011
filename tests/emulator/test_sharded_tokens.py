# SPDX-License-Identifier: Apache-2.0
"""Slices of experts, and tokens of each rank's own, on the emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.partition.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 3
LAYERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "two slices": ({}, 2, 2),
    "three slices": ({"renormalize": False, "scoring": "sigmoid"}, 3, 3),
    "one choice": ({"top_k": 1, "apply_router_weight_on_input": True}, 2, 2),
    "shared experts": (
        {"shared_experts": 1, "shared_intermediate": 96, "shared_gate": True},
        *(2, 2),
    ),
    "two groups": ({"experts": 7, "max_tokens": 70}, 4, 2),
    "an empty group": ({"experts": 4, "max_tokens": 70}, 6, 2),
    "codes": (
        {
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
            **{"hidden": 256, "intermediate": 256, "bias": False},
        },
        *(2, 2),
    ),
}
"""Of a config, what is not usual; how many ranks; and how many have slices of the same experts."""


@pytest.mark.parametrize("name", all_but((), LAYERS))
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, ranks, slices = LAYERS[name]
    sizes = {
        **{"hidden": 128, "intermediate": 192, "experts": 6, "top_k": 3, "max_tokens": 300},
        **{"dtype": torch.bfloat16, "bias": True},
    }
    cfg = config(**(sizes | changes))
    slicing = Slicing(slices, apart=True)
    placement = slicing.placement(cfg.experts, ranks)
    weights = draw_weights(cfg)
    library = build(cfg, ranks, PROCESSORS, tmp_path, slicing=slicing, places=placement.most)
    emulated = EmulatedLayer(
        library, weights, ranks, patience=40, placement=placement, slicing=slicing
    )
    for number, tokens in enumerate((min(300, cfg.max_tokens), 3, 67, 0, 1)):
        calls = [
            draw_call(cfg, max(0, tokens - rank), 10 * number + rank)
            if number % 2 == 0
            else draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank, unused=0.5)
            for rank in range(ranks)
        ]
        for rank, (call, y) in enumerate(zip(calls, emulated(calls, number), strict=True)):
            assert_matches(weights, call, y, f"call {number}, rank {rank}")
