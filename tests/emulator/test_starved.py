# SPDX-License-Identifier: Apache-2.0
"""The OS block on the emulated GPU while one of its warps is given no turn.

PTX promises that each warp goes on some day, and no more. So a call with a warp that stands still
for a while is right, and so are the calls behind it; and if the warp stands still for too long, the
call ends with a sentence, on all ranks.
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest
import torch

from moeos._runtime import FailureKind
from moeos.config import reference
from tests.emulator.emulated import DEADLINE_NS, FOREVER, TICK_NS, EmulatedLayer, Starved, build
from tests.layers import Call, Weights, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

RANKS = 2
PROCESSORS = 3
OS_WARPS = range(7)
"""The scheduler, counts, arrivals and four that count returned rows."""
CALLS = 3
TOLERANCE = 8e-3

# A call of a few tokens takes some 600 ticks of 100 ns, one of 60 about 1500.
IN_EVERY_RUN = [(6, 10, 4)]
MORE = [(60, 200, 2)]
ALL = itertools.product((1, 6, 16, 60, 100), (0, 5, 10, 30, 60, 150, 300, 600), OS_WARPS)
CASES = all_but(IN_EVERY_RUN, [*MORE, *ALL])
"""Tokens, the first tick without a turn, and the warp."""


@pytest.fixture(scope="module")
def weights() -> Weights:
    return draw_weights(
        config(
            dtype=torch.bfloat16,
            hidden=256,
            intermediate=256,
            experts=8,
            top_k=2,
            max_tokens=100,
        ),
        1,
    )


@pytest.fixture(scope="module")
def library(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(weights.cfg, RANKS, PROCESSORS, tmp_path_factory.mktemp("starved"))


def draw_calls(weights: Weights, tokens: int, number: int) -> list[Call]:
    """The same routing in every call, so that no count tells a row from the last call's; and other
    tokens."""
    calls = []
    for rank in range(RANKS):
        routed = draw_given_call(weights.cfg, tokens, 77 + rank, unused=0.0)
        x = draw_call(weights.cfg, tokens, 1000 * number + rank).x
        calls.append(Call(x, routed.ids, routed.weights))
    return calls


def kinds(layer: EmulatedLayer) -> list[int]:
    """Of the failure that each rank has shown its host."""
    return [struct.unpack_from("<I", shown)[0] for shown in layer.failures()]


def check(weights: Weights, calls: list[Call], outputs: list[torch.Tensor], ranks: range) -> None:
    for rank in ranks:
        error = reference.relative_error(outputs[rank], weights.expected(calls[rank]))
        assert error <= TOLERANCE, f"rank {rank}: error {error}"


@pytest.mark.parametrize(("tokens", "tick", "warp"), CASES)
def test_calls_are_right_when_a_warp_of_the_os_block_stands_still_for_a_while(
    tokens: int, tick: int, warp: int, weights: Weights, library: Path
) -> None:
    layer = EmulatedLayer(library, weights, RANKS)
    # A quarter of the deadline: longer than the rest of the call.
    starved = Starved(PROCESSORS, warp, tick, tick + DEADLINE_NS // TICK_NS // 4)
    for number in range(CALLS):
        calls = draw_calls(weights, tokens, number)
        outputs = layer(calls, tokens + tick + number, starved if number == 0 else None)
        assert kinds(layer) == [FailureKind.NONE] * RANKS
        check(weights, calls, outputs, range(RANKS))


@pytest.mark.parametrize(("tokens", "tick", "warp"), CASES)
def test_a_call_ends_with_a_sentence_when_a_warp_of_the_os_block_stands_still_for_good(
    tokens: int, tick: int, warp: int, weights: Weights, library: Path
) -> None:
    layer = EmulatedLayer(library, weights, RANKS)
    for number in range(CALLS):
        calls = draw_calls(weights, tokens, number)
        starved = Starved(PROCESSORS, warp, tick, FOREVER) if number == 0 else None
        outputs = layer(calls, tokens + tick + number, starved)
        # A rank that has shown no failure has the right result: also where the other one waits for
        # its own warp, and where the call was over before the warp stood still.
        well = [rank for rank, kind in enumerate(kinds(layer)) if kind == FailureKind.NONE]
        for rank in well:
            check(weights, calls, outputs, range(rank, rank + 1))
        if number > 0:
            assert len(well) in (0, RANKS)
