# SPDX-License-Identifier: Apache-2.0
"""Experts in slices on the emulated GPU: tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.partition.policies import LAYOUTS, Policy
from moeos.partition.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 3
LAYERS: dict[str, tuple[dict[str, Any], Slicing, int]] = {
    "two slices": ({}, Slicing(2), 1),
    "scattered": ({}, Slicing(3, everywhere=False), 1),
    "more slices than summands": ({"top_k": 1}, Slicing(4), 1),
    "shared experts": (
        {"shared_experts": 1, "shared_intermediate": 96, "shared_gate": True},
        *(Slicing(2), 1),
    ),
    "codes": (
        {
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
            **{"hidden": 256, "intermediate": 256, "bias": False},
        },
        *(Slicing(2), 1),
    ),
    "two groups": ({"experts": 7, "max_tokens": 70}, Slicing(2), 2),
    "three groups": ({"experts": 7, "max_tokens": 70}, Slicing(2, everywhere=False), 3),
}
"""Of a config, what is not usual; and how many groups of ranks share out the experts."""
IN_EVERY_RUN = ("shared experts",)
"""tests/emulator/test_slice_gradients.py has slices of which each has some tokens in every run."""


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, slicing, groups = LAYERS[name]
    sizes = {
        **{"hidden": 128, "intermediate": 192, "experts": 6, "top_k": 3, "max_tokens": 300},
        **{"dtype": torch.bfloat16, "bias": True},
    }
    cfg = config(**(sizes | changes))
    weights, slices = draw_weights(cfg), slicing.slices
    ranks = groups * slices
    library = build(cfg, ranks, PROCESSORS, tmp_path, slicing=slicing)
    emulated = EmulatedLayer(library, weights, ranks, patience=40, slicing=slicing)
    for number, tokens in enumerate((min(300, cfg.max_tokens), 3, 67, 0, 1, 2, 66)):
        emulated.leaves_partials = number in (2, 5)
        draw: Callable[..., Call] = draw_call
        if number % 2 == 1:
            draw = functools.partial(draw_given_call, unused=0.5)
        calls = [draw(cfg, max(0, tokens - group), number + 10 * group) for group in range(groups)]
        outputs = emulated([calls[rank // slices] for rank in range(ranks)], number)
        for group, call in enumerate(calls):
            mine = outputs[group * slices : (group + 1) * slices]
            y = mine[0]
            if emulated.leaves_partials:
                y = torch.stack(mine).float().sum(0).to(cfg.dtype)
            elif slicing.everywhere:
                assert all(torch.equal(one, y) for one in mine)
            else:
                own = [slicing.tokens_of(rank, len(call.x)) for rank in range(slices)]
                y = torch.cat(
                    [one[its.start : its.stop] for one, its in zip(mine, own, strict=True)]
                )
            assert_matches(weights, call, y, f"call {number}, group {group}")


@pytest.mark.nightly
def test_layouts_have_the_same_bits(tmp_path: Path) -> None:
    cfg = config(
        **{"hidden": 128, "intermediate": 192, "experts": 6, "top_k": 3, "max_tokens": 4},
        **{"dtype": torch.bfloat16, "bias": True},
    )
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (4, 1, 0, 3)]
    found: dict[str, list[torch.Tensor]] = {}
    for layout in LAYOUTS:
        slicing, folder = Slicing(2, policy=Policy(layout)), tmp_path / layout
        folder.mkdir()
        library = build(cfg, 2, PROCESSORS, folder, slicing=slicing)
        emulated = EmulatedLayer(library, weights, 2, patience=40, slicing=slicing)
        found[layout] = [emulated([call, call], seed)[0] for seed, call in enumerate(calls)]
    for number, call in enumerate(calls):
        assert_matches(weights, call, found["auto"][number])
        for layout, outputs in found.items():
            assert torch.equal(outputs[number], found["auto"][number]), layout
