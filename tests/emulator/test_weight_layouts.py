# SPDX-License-Identifier: Apache-2.0
"""Weights in the layouts of other frameworks on the emulated GPU: a kernel that reads them where
they lie gives the bits of one that reads the same numbers in moeos' own layout.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.config import GateUp
from moeos.policies import Policy
from moeos.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import (
    Weights,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but
from tests.weight_layouts import LAYOUTS, with_layout

PATIENCE = 80
PROCESSORS = 3
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    # Neither size is a multiple of a step's depth: what lies beyond a matrix is the next expert's.
    "whole parts that overlap, biases": ({"hidden": 296, "intermediate": 168, "bias": True}, 1),
    "parts that are not whole, ranks, biases": (
        {"hidden": 104, "intermediate": 72, "bias": True, "activation": "swigluoai"},
        2,
    ),
    "no gate values": ({"activation": "relu2", "hidden": 288, "intermediate": 328}, 1),
    "float16": ({"dtype": torch.float16, "hidden": 256, "intermediate": 128}, 2),
    "rows that are gathered": ({"hidden": 264, "intermediate": 128, "row_map": "ragged"}, 2),
}
"""Of a config, what is not usual, and its ranks."""
CASES = [
    (name, *layout)
    for name, layout in itertools.product(LAYERS, LAYOUTS)
    if "activation" not in LAYERS[name][0]
    or LAYERS[name][0]["activation"] != "relu2"
    or layout[0] == "concatenated"
]
IN_EVERY_RUN = (("parts that are not whole, ranks, biases", "interleaved", True),)
FORMATS = ("mxfp4", "nvfp4", "int4_group32", "fp8_channel", "fp8_tensor")
"""Those that do not share scales among rows."""
SIZES: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 200}
UNUSED = 5
"""An expert whose weights are no numbers."""


def draw_beside_nan(changes: dict[str, Any]) -> Weights:
    """Weights of which one expert's are NaN: whose neighbour reads them, too, has NaN."""
    drawn = draw_weights(config(**(SIZES | changes)))
    made = dataclasses.replace(drawn, w1=drawn.w1.clone(), w2=drawn.w2.clone())
    made.w1[UNUSED] = made.w2[UNUSED] = torch.nan
    return made


def assert_reads_in_place(
    weights: Weights,
    gate_up: GateUp,
    transposed: bool,
    ranks: int,
    folder: Path,
    *,
    beside_plain: bool,
    slicing: Slicing,
) -> None:
    """Calls of many and of few tokens are the reference's, and have the plain layout's bits;
    `beside_plain`: whether the latter are compared.
    """
    moved = with_layout(weights, gate_up, transposed)
    layers = []
    for number, of in enumerate([moved, weights] if beside_plain else [moved]):
        place = folder / str(number)
        place.mkdir()
        library = build(of.cfg, ranks, PROCESSORS, place, slicing=slicing)
        layers.append(EmulatedLayer(library, of, ranks, patience=PATIENCE, slicing=slicing))
    cfg = weights.cfg
    never = torch.zeros(cfg.experts).index_fill(0, torch.tensor([UNUSED]), -torch.inf)
    for number, tokens in enumerate((200, 3, 70, 0)):
        calls = [
            draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank, never, unused=0.3)
            for rank in range(ranks)
        ]
        outputs = [layer(calls, number) for layer in layers]
        for call, y, *others in zip(calls, *outputs, strict=True):
            assert_matches(weights, call, y, f"call {number}")
            assert all(torch.equal(y, other) for other in others), f"call {number}"


@pytest.mark.parametrize(("name", "gate_up", "transposed"), all_but(IN_EVERY_RUN, CASES))
def test_weights_are_read_where_they_lie(
    name: str, gate_up: GateUp, transposed: bool, tmp_path: Path
) -> None:
    changes, ranks = LAYERS[name]
    assert_reads_in_place(
        draw_beside_nan(changes),
        gate_up,
        transposed,
        ranks,
        tmp_path,
        beside_plain=(name, gate_up, transposed) not in IN_EVERY_RUN,
        slicing=Slicing(1, policy=Policy("gathered")) if "gathered" in name else Slicing(1),
    )


@pytest.mark.parametrize(
    ("form", "coded"),
    all_but([("mxfp4", False)], itertools.product(FORMATS, (False, True))),
)
def test_codes_and_their_scales_alternate_too(form: str, coded: bool, tmp_path: Path) -> None:
    sizes = {"hidden": 384, "intermediate": 192, "bias": True, "weight_format": form}
    if coded:
        sizes["activation_format"] = "fp8_group128"
    weights = draw_weights(config(**(SIZES | sizes)))
    assert_reads_in_place(
        weights,
        "interleaved",
        False,
        1,
        tmp_path,
        beside_plain=(form, coded) != ("mxfp4", False),
        slicing=Slicing(1),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("gate_up", "transposed"), LAYOUTS)
def test_what_is_saved_is_all_gates_then_all_ups(
    gate_up: GateUp, transposed: bool, tmp_path: Path
) -> None:
    cfg = config(**SIZES, hidden=264, intermediate=168, bias=True)
    weights = draw_weights(cfg)
    saved = []
    call = draw_call(cfg, 150, 3)
    for number, of in enumerate((with_layout(weights, gate_up, transposed), weights)):
        place = tmp_path / str(number)
        place.mkdir()
        layer = EmulatedLayer(
            build(of.cfg, 1, PROCESSORS, place, saves=True), of, 1, patience=PATIENCE
        )
        layer.saved_of_source = 150 * cfg.top_k
        rows = torch.full((layer.saved_of_source, cfg.w1_rows), torch.nan, dtype=cfg.dtype)
        layer.saved = [rows]
        (y,) = layer([call], 1)
        assert_matches(weights, call, y)
        assert rows.isfinite().all()
        saved.append(rows)
    assert torch.equal(*saved)
