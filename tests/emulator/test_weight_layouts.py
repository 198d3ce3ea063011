# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU reads the caller's weights in every layout: outputs have the bits that the same
numbers have with gate rows, then up rows, and an element for every input.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig
from tests.emulator.emulated import EmulatedLayer, build
from tests.emulator.test_gradients import PROCESSORS, draw, made
from tests.emulator.test_gradients import check as check_gradients
from tests.gradients import FAR_LIMIT
from tests.layers import assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but
from tests.weight_layouts import LAYOUTS, assert_same

PATIENCE = 80
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "whole parts that overlap, biases": (
        {"hidden": 288, "intermediate": 160, "bias": True, "activation": "swigluoai"},
        1,
    ),
    "parts that are not whole, ranks": ({"hidden": 104, "intermediate": 72}, 2),
    "small experts, biases": ({"hidden": 72, "intermediate": 40, "bias": True}, 1),
    "float16": ({"hidden": 264, "intermediate": 136, "dtype": torch.float16}, 2),
}
"""What is not usual in a config, and its ranks. Where a size is no multiple of 64, a step reaches
beyond its matrix."""
UNUSED = 5
"""An expert without tokens, whose weights are no numbers: a read of them gives NaN."""
FORMATS = ("mxfp4", "nvfp4", "int4_group32", "fp8_channel", "fp8_tensor")
"""Those that do not share scales among rows."""
NO_GATE = ("concatenated", True)
BY_DAY = [("small experts, biases", ("interleaved", True))]


def outputs_of(cfg: MoEConfig, ranks: int, folder: Path) -> list[Tensor]:
    """Outputs of calls of many and of few tokens, routed by the layer and by the caller."""
    folder.mkdir()
    weights = draw_weights(cfg)
    never = torch.zeros(cfg.experts).index_fill(0, torch.tensor([UNUSED]), -torch.inf)
    weights.gate[UNUSED] = 0
    weights.gate[UNUSED, 0] = -100  # times the 1 that every token begins with
    if cfg.weight_format is None:
        weights.w1[UNUSED] = weights.w2[UNUSED] = torch.nan
    emulated = EmulatedLayer(build(cfg, ranks, 3, folder), weights, ranks, patience=PATIENCE)
    found = []
    for number, tokens in enumerate((200, 3, 70, 0)):
        calls = [
            draw_call(cfg, max(0, tokens - rank), 10 * number + rank)
            if number % 2 == 0
            else draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank, never, unused=0.5)
            for rank in range(ranks)
        ]
        for call, y in zip(calls, emulated(calls, number), strict=True):
            assert_matches(weights, call, y, f"call {number}")
            found.append(y)
    return found


def check(cfg: MoEConfig, ranks: int, folder: Path) -> None:
    plain = dataclasses.replace(cfg, gate_up="concatenated", transposed=False)
    wanted = outputs_of(plain, ranks, folder / "plain")
    for found, right in zip(outputs_of(cfg, ranks, folder / "laid out"), wanted, strict=True):
        assert_same(cfg, found, right)


@pytest.mark.parametrize(
    ("shape", "layout"), all_but(BY_DAY, list(itertools.product(SHAPES, LAYOUTS)))
)
def test_outputs_have_the_bits_of_the_plain_layout(
    shape: str, layout: tuple[Any, bool], tmp_path: Path
) -> None:
    changes, ranks = SHAPES[shape]
    sizes = {"dtype": torch.bfloat16, "max_tokens": 200} | changes
    cfg = config(**sizes, gate_up=layout[0], transposed=layout[1])
    check(cfg, ranks, tmp_path)


GRADIENTS: dict[str, dict[str, Any]] = {
    "parts of a tile, biases": {"hidden": 96, "intermediate": 72, "bias": True},
    "several parts, clamped": {
        **{"hidden": 264, "intermediate": 200, "activation": "swigluoai"},
        **{"swiglu_limit": 0.5, "bias": True},
    },
    "no gate": {"hidden": 64, "intermediate": 72, "activation": "relu2"},
}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("shape", "layout"),
    all_but(
        [], [(s, one) for s in GRADIENTS for one in LAYOUTS if s != "no gate" or one == NO_GATE]
    ),
)
def test_gradients_have_the_bits_of_the_plain_layout(
    shape: str, layout: tuple[Any, bool], saves: bool, tmp_path: Path
) -> None:
    sizes = {"dtype": torch.bfloat16, "max_tokens": 200} | GRADIENTS[shape]
    if saves and "swiglu_limit" in sizes:  # a saved value is rounded, beyond the clamp or not
        sizes["swiglu_limit"] = FAR_LIMIT
    plain = config(**sizes, save="preactivation" if saves else "nothing")
    cfg = dataclasses.replace(plain, gate_up=layout[0], transposed=layout[1])
    ranks = 1 if saves else 2
    found: list[list[dict[str, Tensor]]] = []
    for number, one in enumerate((plain, cfg)):
        folder = tmp_path / str(number)
        folder.mkdir()
        emulated = made(one, ranks, folder, saves=saves)
        calls = draw(one, [130, 3][:ranks], 5)
        if saves:
            (folder / "forward").mkdir()
            library = build(one, 1, PROCESSORS, folder / "forward", saves=True)
            forward = EmulatedLayer(library, emulated._weights, 1, patience=PATIENCE)
            rows = 2 * 130
            forward.saved = [torch.full((rows, one.w1_rows), torch.nan, dtype=one.dtype)]
            forward.saved_of_source = rows
            forward(calls, 3)
            emulated.saved, emulated.saved_of_source = forward.saved, rows
        check_gradients(emulated, calls, 7)
        found.append(emulated.gradients(calls, 7))
    for ours, right in zip(found[1], found[0], strict=True):
        assert ours.keys() == right.keys()
        for name, gradient in right.items():
            # With transposed weights the depth of dX, and a thread's columns of h, are in another
            # order.
            if not (cfg.transposed and name in ("x", "topk_weights")):
                assert_same(cfg, ours[name], gradient, name)


@pytest.mark.nightly
def test_transposed_experts_without_a_gate_have_the_bits_of_the_plain_layout(
    tmp_path: Path,
) -> None:
    sizes: dict[str, Any] = {"hidden": 288, "intermediate": 320, "activation": "relu2"}
    cfg = config(dtype=torch.bfloat16, max_tokens=200, **sizes, transposed=True)
    check(cfg, 1, tmp_path)


@pytest.mark.parametrize(
    ("form", "rounds"),
    all_but(
        [],
        itertools.product(
            ("mxfp4", "nvfp4", "int4_group32", "fp8_channel", "fp8_tensor"), (False, True)
        ),
    ),
)
def test_codes_whose_gate_and_up_rows_take_turns_have_the_bits_of_the_plain_layout(
    form: str, rounds: bool, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden": 256, "intermediate": 192, "bias": True}
    formats = {"weight_format": form, "activation_format": "fp8_group128" if rounds else None}
    cfg = config(**(sizes | formats), dtype=torch.bfloat16, max_tokens=200, gate_up="interleaved")
    check(cfg, 1, tmp_path)
