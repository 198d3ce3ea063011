# SPDX-License-Identifier: Apache-2.0
"""Experts in slices on the emulated GPU: tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 3
LAYERS: dict[str, tuple[dict[str, Any], Slicing]] = {
    "two slices": ({}, Slicing(2)),
    "scattered": ({}, Slicing(3, everywhere=False)),
    "more slices than summands": ({"top_k": 1}, Slicing(4)),
    "shared experts": (
        {"shared_experts": 1, "shared_intermediate": 96, "shared_gate": True},
        Slicing(2),
    ),
    "codes": (
        {
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
            **{"hidden": 256, "intermediate": 256, "bias": False},
        },
        Slicing(2),
    ),
}
"""Of a config, what is not usual."""
IN_EVERY_RUN = ("two slices",)


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, slicing = LAYERS[name]
    sizes = {
        **{"hidden": 128, "intermediate": 192, "experts": 6, "top_k": 3, "max_tokens": 300},
        **{"dtype": torch.bfloat16, "bias": True},
    }
    cfg = config(**(sizes | changes))
    weights, ranks = draw_weights(cfg), slicing.slices
    library = build(cfg, ranks, PROCESSORS, tmp_path, slicing=slicing)
    emulated = EmulatedLayer(library, weights, ranks, patience=40, slicing=slicing)
    for number, tokens in enumerate((300, 3, 67, 0, 1)):
        call = (
            draw_call(cfg, tokens, number)
            if number % 2 == 0
            else draw_given_call(cfg, tokens, number, unused=0.5)
        )
        outputs = emulated([call] * ranks, number)
        if slicing.everywhere:
            assert all(torch.equal(y, outputs[0]) for y in outputs)
            y = outputs[0]
        else:
            own = [slicing.tokens_of(rank, tokens) for rank in range(ranks)]
            parts = [y[mine.start : mine.stop] for y, mine in zip(outputs, own, strict=True)]
            y = torch.cat(parts)
        assert_matches(weights, call, y, f"call {number}")
