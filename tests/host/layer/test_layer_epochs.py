# SPDX-License-Identifier: Apache-2.0
"""Calls follow each other without a barrier, however unequal the ranks (invariants 2, 3 and 4)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch

from moeos import TwinOptions, World
from moeos.config import reference
from moeos.world import virtual
from tests.layers import TOLERANCE, Call, Weights, config, draw_given_call, draw_weights
from tests.nightly import all_but

pytestmark = pytest.mark.usefixtures("poisoned_output")

RANKS = 4
CFG = config(hidden=16, intermediate=8, experts=8, top_k=2, max_tokens=70)


def draw_calls(calls: int, seed: int) -> list[list[Call]]:
    """[rank][call], with token counts that differ in every call; often 0, often max_tokens."""
    chance = random.Random(seed)
    largest = CFG.max_tokens

    def tokens() -> int:
        return chance.choice([0, 0, 1, largest, *(chance.randint(0, largest) for _ in range(4))])

    return [
        [
            draw_given_call(CFG, tokens(), (rank * calls + call) ^ seed << 20)
            for call in range(calls)
        ]
        for rank in range(RANKS)
    ]


def assert_every_call_right(
    weights: Weights, calls: Sequence[Call], outputs: Sequence[torch.Tensor]
) -> None:
    """Each output against the reference, whose tokens are computed all at once: it is dropless."""
    ids = [call.ids for call in calls if call.ids is not None]
    factors = [call.weights for call in calls if call.weights is not None]
    together = Call(torch.cat([call.x for call in calls]), torch.cat(ids), torch.cat(factors))
    expected = weights.expected(together).split([len(call.x) for call in calls])
    for number, (y, right) in enumerate(zip(outputs, expected, strict=True)):
        error = reference.relative_error(y, right)
        assert error <= TOLERANCE[CFG.dtype], f"call {number}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("number", "remote"), all_but([(250, False)], [(250, False), (1000, False), (1000, True)])
)
def test_many_calls_with_random_tokens_and_delays(number: int, remote: bool) -> None:
    calls = draw_calls(number, seed=1)
    weights = draw_weights(CFG)

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        chance = random.Random(world.rank)
        outputs = []
        for call in calls[world.rank]:
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0.0, 4e-3))
            outputs.append(call(layer))
        return outputs

    results = virtual.run(rank_main, ranks=RANKS, ranks_per_node=1 if remote else None)
    for rank, outputs in enumerate(results):
        assert_every_call_right(weights, calls[rank], outputs)


def test_calls_under_random_delays_of_every_actor() -> None:
    calls = draw_calls(60, seed=2)
    weights = draw_weights(CFG)

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    for seed in range(3):
        twin = TwinOptions(processors=2, split_os=True, jitter_us=80.0, jitter_seed=seed)
        results = virtual.run(
            rank_main, ranks=RANKS, twin=twin, ranks_per_node=1 if seed == 2 else None
        )
        for rank, outputs in enumerate(results):
            assert_every_call_right(weights, calls[rank], outputs)


@pytest.mark.parametrize("slow", all_but([1], range(RANKS)))
def test_one_rank_that_is_always_late(slow: int) -> None:
    """The others run as far ahead of it as the protocol allows, which is one call."""
    calls = draw_calls(100, seed=3)
    weights = draw_weights(CFG)
    begun = [0] * RANKS
    ahead: list[int] = []

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        outputs = []
        for number, call in enumerate(calls[world.rank]):
            if world.rank == slow:
                time.sleep(3e-3)
                ahead.append(max(begun) - number)
            begun[world.rank] = number
            outputs.append(call(layer))
        return outputs

    for rank, outputs in enumerate(virtual.run(rank_main, ranks=RANKS)):
        assert_every_call_right(weights, calls[rank], outputs)
    # A rank that has begun call n has ended n - 1, for which it needed this rank to begin n - 1.
    assert max(ahead) == 0


def test_two_layers_of_a_world_in_turn() -> None:
    """Ranks pass from one to the other at their own pace."""
    first, second = draw_weights(CFG, 1), draw_weights(CFG, 2)
    calls = draw_calls(200, seed=4)

    def rank_main(world: World) -> list[torch.Tensor]:
        layers = [first.layer(world), second.layer(world)]
        chance = random.Random(10 + world.rank)
        outputs = []
        for number, call in enumerate(calls[world.rank]):
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0.0, 4e-3))
            outputs.append(call(layers[number % 2]))
        return outputs

    for rank, outputs in enumerate(virtual.run(rank_main, ranks=RANKS)):
        for parity, weights in enumerate((first, second)):
            assert_every_call_right(weights, calls[rank][parity::2], outputs[parity::2])


def test_the_output_of_one_call_may_be_the_input_of_the_next() -> None:
    """As in a model of ten layers: each rank goes on as soon as it can."""
    weights = draw_weights(CFG)
    inputs = [draw_given_call(CFG, tokens, seed) for seed, tokens in enumerate((70, 1, 0, 33))]

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        call, outputs = inputs[world.rank], []
        for _ in range(10):
            outputs.append(call(layer))
            call = Call((call.x + outputs[-1]).tanh(), call.ids, call.weights)
        return outputs

    for call, outputs in zip(inputs, virtual.run(rank_main, ranks=RANKS), strict=True):
        for y in outputs:
            error = reference.relative_error(y, weights.expected(call))
            assert error <= TOLERANCE[CFG.dtype]
            call = Call((call.x + y).tanh(), call.ids, call.weights)
