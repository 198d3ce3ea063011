# SPDX-License-Identifier: Apache-2.0
"""More experts than a tile has columns: the emulated GPU routes them in banks, as the reference.

Few tokens are enough, and more would take long: most experts that are chosen have a tile each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeos import MoEConfig
from moeos.config import reference
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import (
    TOLERANCE,
    Call,
    Weights,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
    pair_experts,
)
from tests.nightly import all_but

PATIENCE = 40
"""Of a call of hundreds of tiles on few processors."""


@dataclasses.dataclass(frozen=True)
class Banks:
    """A layer, the GPU that it is emulated on, and how many tokens each rank has in a call."""

    cfg: MoEConfig
    ranks: int
    processors: int
    tokens: tuple[int, ...]


def _banks(ranks: int, processors: int, tokens: tuple[int, ...], **changes: object) -> Banks:
    sizes = {"hidden": 128, "intermediate": 64, "max_tokens": 100, "dtype": torch.bfloat16}
    return Banks(config(**{**sizes, **changes}), ranks, processors, tokens)


LAYERS = {
    "a second bank that is not full": _banks(
        2, 2, (9, 4), experts=300, top_k=9, activation="gelu", dtype=torch.float16
    ),
    "an fp32 router": _banks(1, 3, (12,), experts=512, top_k=9, router_dtype=torch.float32),
    "all experts and choices that a GPU has": _banks(2, 3, (3, 5), experts=1024, top_k=32),
    "groups that lie across banks": _banks(
        1,
        3,
        (7,),
        experts=1000,
        top_k=32,
        scoring="sigmoid",
        selection_bias=True,
        expert_groups=8,
        top_groups=4,
        routed_scaling=2.5,
    ),
    "sums that fit a row": _banks(1, 3, (9,), hidden=2048, experts=512, top_k=10),
    "an fp32 router in slices": _banks(
        1, 4, (40,), hidden=2056, experts=512, top_k=9, router_dtype=torch.float32
    ),
}
IN_EVERY_RUN = ("groups that lie across banks",)


def made(name: str, folder: Path) -> tuple[Banks, Weights, EmulatedLayer]:
    layer = LAYERS[name]
    weights = draw_weights(layer.cfg)
    if layer.cfg.router_dtype is not None:
        weights = pair_experts(weights)
    library = build(layer.cfg, layer.ranks, layer.processors, folder)
    return layer, weights, EmulatedLayer(library, weights, layer.ranks, patience=PATIENCE)


def drawn(layer: Banks) -> Iterator[list[Call]]:
    """A call of the gate's routing, then one of the caller's, each of all ranks."""
    for draw in (draw_call, draw_given_call):
        yield [draw(layer.cfg, n, rank) for rank, n in enumerate(layer.tokens)]


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_outputs_are_those_of_the_reference_whoever_routes(name: str, tmp_path: Path) -> None:
    layer, weights, emulated = made(name, tmp_path)
    for seed, calls in enumerate(drawn(layer)):
        outputs = emulated(calls, seed)
        assert not any(map(any, emulated.failures()))
        for call, y in zip(calls, outputs, strict=True):
            sure = weights.sure(call)
            assert sure.any()
            error = reference.relative_error(y[sure], weights.expected(call)[sure])
            assert error <= TOLERANCE[torch.bfloat16]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["an fp32 router", "sums that fit a row"])
def test_a_tokens_output_does_not_depend_on_how_many_others_there_are(
    name: str, tmp_path: Path
) -> None:
    layer, _, emulated = made(name, tmp_path)
    whole = draw_call(layer.cfg, 66, 7)  # two blocks
    whole.x.mul_(2)  # larger logits, whose last bits count
    y = emulated([whole], 0)[0]
    for tokens in (40, 1):
        few = dataclasses.replace(whole, x=whole.x[:tokens].clone())
        assert torch.equal(emulated([few], tokens)[0], y[:tokens]), tokens
