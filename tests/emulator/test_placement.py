# SPDX-License-Identifier: Apache-2.0
"""Placements on the emulated GPU: experts anywhere, some on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import Placement
from moeos.config import reference
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import (
    Call,
    Weights,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but

PROCESSORS = 3
COPIES = Placement([[6, 1, 3, 0], [0, 8, 4, 1], [7, 2, 5, 0]])  # type: ignore[arg-type]
LAYERS: dict[str, tuple[dict[str, Any], Placement]] = {
    "replicas, zero experts": ({"zero_experts": 3, "top_k": 4}, COPIES),
    "zero experts, groups": (
        {"zero_experts": 3, "top_k": 4},
        Placement([[4, 0, 8, 2], [], [1, 7, 6, 3, 5]]),  # type: ignore[arg-type]
    ),
    "a rank alone": ({}, Placement([[6, 1, 3, 0, 8, 4, 7, 2, 5]])),  # type: ignore[arg-type]
    "ids that the gate weighs": ({"routing": "ids"}, COPIES),
    "more places than a router has columns": (
        {"experts": 64},
        Placement.propose([64 - expert for expert in range(64)], 2, 40),
    ),
}
"""Of a config, what is not usual."""


def assert_routing_is_told(weights: Weights, call: Call, ids: Tensor, factors: Tensor) -> None:
    """A call that keeps a gradient learns experts, not places, and which zero experts."""
    if call.ids is None:
        routed, sure = weights.routed(call), weights.sure(call)
        assert torch.equal(ids[sure].long(), routed.ids[sure])
        assert reference.relative_error(factors[sure], routed.weights[sure]) < 1e-2
    else:
        assert call.weights is not None
        assert torch.equal(ids.long(), call.ids)
        used = ids >= 0
        assert torch.equal(factors[used], call.weights[used])


@pytest.mark.parametrize("name", all_but((), LAYERS))
def test_outputs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    changes, placement = LAYERS[name]
    sizes = {
        **{"hidden": 128, "intermediate": 64, "experts": 9, "top_k": 3, "max_tokens": 100},
        **{"dtype": torch.bfloat16, "bias": True},
    }
    cfg = config(**(sizes | changes))
    weights, ranks = draw_weights(cfg), placement.world_size
    library = build(cfg, ranks, PROCESSORS, tmp_path, places=placement.most)
    emulated = EmulatedLayer(library, weights, ranks, patience=40, placement=placement)
    for number, tokens in enumerate((100, 3, 70, 0)):
        calls = [
            draw_call(cfg, max(0, tokens - rank), 10 * number + rank)
            if number % 2 == 0 and cfg.routing == "layer"
            else draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank, unused=0.3)
            for rank in range(ranks)
        ]
        for call, y in zip(calls, emulated(calls, number), strict=True):
            assert_matches(weights, call, y, f"call {number}")
        for rank, call in enumerate(calls):
            assert_routing_is_told(weights, call, *emulated.routing(rank, PROCESSORS, len(call.x)))
        stats = [emulated.stats(rank, PROCESSORS) for rank in range(ranks)]
        for rank, of in enumerate(stats):
            assert len(of.expert_pairs) == len(placement.ranks[rank])
            assert list(of.pairs_received) == [other.pairs_sent[rank] for other in stats]
            if number == 0 and placement is COPIES:  # each replica has some of many
                assert all(of.expert_pairs)
