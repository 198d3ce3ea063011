# SPDX-License-Identifier: Apache-2.0
"""Experts of 129 to 192 rows, which are one tile each, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos import MoEConfig
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import Call, assert_matches, config, draw_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 2
Rows = Sequence[Sequence[int]]
"""Of each expert: what each rank sends it."""
ALONE: tuple[Rows, ...] = (
    [[129], [132], [136], [200]],
    [[192], [193], [256], [257]],
    [[0], [191], [128], [7]],
)
TWO: tuple[Rows, ...] = (
    [[100, 29], [128, 128], [200, 3], [257, 0]],
    [[0, 130], [63, 66], [5, 9], [130, 129]],
)
THREE: tuple[Rows, ...] = (
    [[50, 40, 42], [60, 61, 64], [1, 2, 250], [129, 0, 0], *[[0, 0, 0]] * 2],
)
EIGHT: tuple[Rows, ...] = ([[17, 16, 19, 15, 20, 18, 31, 9], *[[3] * 8] * 7],)
LAYERS: dict[str, tuple[tuple[Rows, ...], dict[str, Any], dict[str, Any]]] = {
    "a rank alone": (ALONE, {"bias": True}, {}),
    # No part has all columns of its box, and rows end amid a step.
    "ragged sizes": (ALONE, {"hidden": 200, "intermediate": 136, "dtype": torch.float16}, {}),
    "not gated": (ALONE, {"activation": "gelu", "bias": True, "intermediate": 384}, {}),
    "two ranks": (TWO, {"activation": "swigluoai", "bias": True}, {}),
    "two ranks, as rows arrive": (TWO, {}, {"plans_up_front": False}),
    "two ranks, few places": (TWO, {}, {"between_rows": 256}),
    "two ranks, rings": (TWO, {}, {"ring_rows": 160, "plans_up_front": False}),
    "two ranks, large experts": (TWO, {}, {"large_experts": True}),
    "three ranks": (THREE, {}, {}),
    "eight ranks": (EIGHT, {}, {}),
}
IN_EVERY_RUN = ("a rank alone", "two ranks")


def _calls(cfg: MoEConfig, rows: Rows, seed: int) -> list[Call]:
    """Each rank's tokens, in an order of no experts', of which each expert gets so many."""
    calls = []
    for rank in range(len(rows[0])):
        ids = [expert for expert, its in enumerate(rows) for _ in range(its[rank])]
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed + rank))
        call = draw_call(cfg, len(ids), seed + rank)
        weights = torch.full((len(ids), 1), 0.75)
        calls.append(Call(call.x, torch.tensor(ids, dtype=torch.int64)[order][:, None], weights))
    return calls


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_an_expert_of_129_to_192_rows_is_right_with_the_bits_of_two_tiles(
    name: str, tmp_path: Path
) -> None:
    of_calls, changes, built = LAYERS[name]
    ranks = len(of_calls[0][0])
    sizes = {"hidden": 256, "intermediate": 192, "top_k": 1, "dtype": torch.bfloat16}
    most = max(sum(its[rank] for its in rows) for rows in of_calls for rank in range(ranks))
    cfg = config(**(sizes | {"experts": len(of_calls[0]), "max_tokens": most} | changes))
    weights = draw_weights(cfg)
    layers = []
    for tall_rows in (192, 0):
        folder = tmp_path / f"{tall_rows}"
        folder.mkdir()
        library = build(cfg, ranks, PROCESSORS, folder, tall_rows=tall_rows, **built)
        layers.append(EmulatedLayer(library, weights, ranks, patience=40))
    tall, wide = layers
    for number, rows in enumerate(of_calls):
        calls = _calls(cfg, rows, 10 * number)
        outputs = tall(calls, number)
        for rank, (y, same) in enumerate(zip(outputs, wide(calls, number), strict=True)):
            assert_matches(weights, calls[rank], y, f"call {number}, rank {rank}")
            assert torch.equal(y, same), f"call {number}, rank {rank}"
        # Three narrow parts of one tile, or two wide ones of each of two; but the tiles of a source
        # that has more rows than places are made as they come.
        firsts = [
            sum(layer.stats(rank, PROCESSORS).tasks["product0"] for rank in range(ranks))
            for layer in layers
        ]
        assert firsts[0] < firsts[1] or "ring_rows" in built, f"call {number}: {firsts}"
        again = tall(calls, number + 100)  # in another order of turns
        assert all(map(torch.equal, outputs, again)), f"call {number}"
