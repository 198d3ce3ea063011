# SPDX-License-Identifier: Apache-2.0
"""The output is bitwise the same, however the actors of a call happen to meet (invariant 5)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeos import MoEConfig, TwinOptions, World
from moeos.config import sizes
from moeos.world import virtual
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but, in_turn, spread

pytestmark = pytest.mark.usefixtures("poisoned_output")

RANKS = 4
ONE_PROCESSOR = TwinOptions(processors=1)
CASES = {
    "float32": config(hidden=136, experts=16, top_k=4, bias=True, max_tokens=256),
    "bfloat16": config(hidden=136, experts=16, top_k=4, max_tokens=256, dtype=torch.bfloat16),
    "drops": config(experts=16, top_k=3, capacity_factor=0.7, max_tokens=256),
    "drops, ragged": config(
        experts=16, top_k=3, capacity_factor=0.7, row_map="ragged", max_tokens=256
    ),
    "codes": config(
        hidden=128,
        intermediate=192,
        experts=16,
        top_k=4,
        max_tokens=256,
        dtype=torch.bfloat16,
        weight_format="fp8_block128",
        activation_format="fp8_group128",
    ),
    "codes of results": config(
        hidden=128,
        intermediate=64,
        experts=16,
        top_k=4,
        max_tokens=256,
        weight_format="fp8_channel",
        activation_format="fp8_group128",
        result_format="fp8_group128",
    ),
}
IN_EVERY_RUN = ("bfloat16", "drops, ragged", "codes of results")
"""Of what takes many worlds of a case."""


def draw_calls(cfg: MoEConfig, ranks: int = RANKS) -> list[list[Call]]:
    """Three calls of each rank, the middle one with routing from the caller."""
    sizes = [(256, 31, 90), (7, 256, 0), (0, 64, 200), (129, 1, 33)]
    return [
        [
            draw_call(cfg, sizes[rank % 4][0], 3 * rank),
            draw_given_call(cfg, sizes[rank % 4][1], 3 * rank + 1),
            draw_call(cfg, sizes[rank % 4][2], 3 * rank + 2),
        ]
        for rank in range(ranks)
    ]


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


def run(
    weights: Weights,
    calls: list[list[Call]],
    twin: TwinOptions,
    ranks_per_node: int | None = None,
) -> list[list[torch.Tensor]]:
    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        return [bits(call(layer)) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=len(calls), twin=twin, ranks_per_node=ranks_per_node)


def assert_same(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for call, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            different = (one != other).any(dim=1).nonzero().flatten().tolist()
            assert not different, f"rank {rank}, call {call}: tokens {different[:8]} differ"


def test_tiles_expert_by_expert_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(hidden=136, experts=4, top_k=2, max_tokens=700)  # full tiles of every source
    weights = draw_weights(cfg)
    calls = [[draw_call(cfg, 700 - 150 * rank, rank)] for rank in range(2)]
    as_rows_arrive = run(weights, calls, ONE_PROCESSOR)
    monkeypatch.setattr(sizes, "LARGE_EXPERT", 0)
    assert_same(run(weights, calls, ONE_PROCESSOR), as_rows_arrive)


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, CASES))
def test_repeated_runs_give_the_same_bits(name: str) -> None:
    cfg = CASES[name]
    weights, calls = draw_weights(cfg, 1, PREFERENCES["zipf"](16, RANKS)), draw_calls(cfg)
    first = run(weights, calls, ONE_PROCESSOR)
    assert not any(y.eq(0).all() for rank in first for y in rank if y.numel())
    for _ in range(3):
        assert_same(run(weights, calls, ONE_PROCESSOR), first)


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "split_os"), in_turn(CASES, [None, 1, 2], [False, True])
)
def test_any_number_of_processors_gives_the_same_bits(
    name: str, split_os: bool, ranks_per_node: int | None
) -> None:
    cfg = CASES[name]
    weights, calls = draw_weights(cfg, 1, PREFERENCES["zipf"](16, RANKS)), draw_calls(cfg)
    first = run(weights, calls, ONE_PROCESSOR)
    for processors in (1, 3):
        twin = TwinOptions(processors=processors, split_os=split_os)
        assert_same(run(weights, calls, twin, ranks_per_node), first)


@pytest.mark.parametrize(
    ("name", "seed"), spread(3, [(name, seed) for name in CASES for seed in range(4)])
)
def test_random_delays_give_the_same_bits(name: str, seed: int) -> None:
    cfg = dataclasses.replace(CASES[name], max_tokens=256)
    weights, calls = draw_weights(cfg, 1, PREFERENCES["zipf"](16, RANKS)), draw_calls(cfg)
    twin = TwinOptions(
        processors=1 + seed % 3,
        split_os=seed % 2 == 1,
        jitter_us=150.0,
        jitter_seed=seed,
    )
    delayed = run(weights, calls, twin, ranks_per_node=1 if seed >= 2 else None)
    assert_same(delayed, run(weights, calls, ONE_PROCESSOR))


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, CASES))
def test_a_token_has_the_same_bits_whoever_else_is_there(name: str) -> None:
    """The tokens of rank 0 in worlds of 1 to 16 ranks, which all have tokens of their own."""
    cfg = CASES[name]
    weights = draw_weights(cfg, 1, PREFERENCES["zipf"](16, RANKS))
    calls = draw_calls(cfg, 16)
    [alone] = run(weights, calls[:1], ONE_PROCESSOR)
    for ranks in (2, 4, 8, 16):
        first = run(weights, calls[:ranks], ONE_PROCESSOR)[0]
        assert_same([first], [alone])


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    """Without a capacity a token's output depends on no other token of its call."""
    cfg = CASES["bfloat16"]
    weights = draw_weights(cfg)
    whole = draw_call(cfg, 150, 0)
    places = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    calls = [[whole, Call(whole.x[places]), Call(whole.x[40:41])]]
    [[all_at_once, shuffled, alone]] = run(weights, calls, ONE_PROCESSOR)
    assert_same([[shuffled, alone]], [[all_at_once[places], all_at_once[40:41]]])
