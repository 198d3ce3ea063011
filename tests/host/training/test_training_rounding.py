# SPDX-License-Identifier: Apache-2.0
"""Token rounding: whole tiles, less than a tile of difference, and what the six ways decide."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moeos
from moeos import training
from moeos.call.rounding import Rounding

WAYS = get_args(Rounding)


def counts(ids: Tensor, experts: int) -> list[int]:
    return [int((ids == expert).sum()) for expert in range(experts)]


def by_hand(
    scores: Tensor, ids: Tensor, tile: int, rises: list[bool], tokens: int
) -> list[set[int]]:
    """The tokens of each expert by algorithm 4, with lists."""
    result = []
    for expert, up in enumerate(rises):
        own = [t for t in range(tokens) if expert in ids[t].tolist()]
        others = [t for t in range(tokens) if t not in own]
        for some in (own, others):
            some.sort(key=lambda t: -float(scores[t, expert]))
        below = len(own) // tile * tile
        above = below if len(own) == below else below + tile
        result.append(set((own + others)[: above if up else below]))
    return result


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(1, 12))
    k = draw(st.integers(1, min(4, experts)))
    count = draw(st.integers(0, 60))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, experts, generator=generator)
    if draw(st.booleans()):  # ties
        scores = scores.round()
    if draw(st.booleans()):  # a hot expert
        scores[:, 0] += 3.0
    scores = scores.softmax(dim=1)
    ids = moeos.topk(scores, k).indices
    if draw(st.booleans()):
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1)
    return {
        "scores": scores,
        "topk_ids": ids.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        "rounding": draw(st.sampled_from(WAYS)),
        "tile": draw(st.integers(1, 16)),
        "slots": draw(st.one_of(st.none(), st.integers(k, experts))),
        "tokens": draw(st.one_of(st.none(), st.integers(0, count))),
        "seed": seed,
    }


def rounded(call: dict[str, Any], **changes: Any) -> Tensor:
    call = call | changes
    seed, tokens = call.pop("seed"), call.pop("tokens")
    call["tokens"] = None if tokens is None else torch.tensor([tokens], dtype=torch.int32)
    return training.round_tokens(**call, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=100)
@given(call=calls())
def test_experts_get_whole_tiles_and_differ_by_less_than_one(call: dict[str, Any]) -> None:
    scores, ids, tile = call["scores"], call["topk_ids"], call["tile"]
    count, experts = scores.shape
    tokens = count if call["tokens"] is None else call["tokens"]
    found = rounded(call)
    slots = experts if call["slots"] is None else call["slots"]
    assert found.shape == (count, slots)
    assert found.dtype == ids.dtype
    assert torch.equal(found, rounded(call))  # by the seed alone
    assert bool((found[tokens:] == -1).all())
    before, after = (counts(one[:tokens], experts) for one in (ids, found))
    for row, (mine, had) in enumerate(zip(found.tolist(), ids.tolist(), strict=True)):
        used = [one for one in mine if one >= 0]
        assert len(set(used)) == len(used)
        assert mine == used + [-1] * (slots - len(used))
        descending = [float(scores[row, one]) for one in used]
        assert descending == sorted(descending, reverse=True)
        if tokens < tile and row < tokens:
            assert set(used) == {one for one in had if one >= 0}
    if tokens < tile:
        return
    for was, now in zip(before, after, strict=True):
        assert now % tile == 0
        assert abs(now - was) < tile
        assert (now == was) == (was % tile == 0)
    way = call["rounding"]
    open_to = [was for was in before if was % tile and was - was % tile + tile <= tokens]
    if way == "DOWN":
        assert all(now <= was for was, now in zip(before, after, strict=True))
    if call["slots"] not in (None, experts):
        return
    rises = [now > was for was, now in zip(before, after, strict=True)]
    if way == "UP":
        assert sum(rises) == len(open_to)
    if way == "NR-f":
        assert sum(rises) == sum(2 * (was % tile) > tile for was in open_to)
    if way == "Balance-f":
        total = 0
        for was, now in zip(before, after, strict=True):
            if was in open_to:
                total += now - was
                assert abs(total) <= tile / 2
    wanted = by_hand(scores, ids, tile, rises, tokens)
    for expert in range(experts):
        mine = {t for t in range(tokens) if expert in found[t].tolist()}
        assert mine == wanted[expert]
    # One slot at a time is the same where slots are enough.
    fits = int((found >= 0).sum(dim=1).max()) if count else 0
    least = max(fits, ids.shape[1])
    if least < experts:
        narrow = rounded(call, slots=least)
        for row in range(count):
            pad = [-1] * (experts - least)
            if way == "DOWN":
                assert narrow[row].tolist() + pad == found[row].tolist()


def one_expert(pairs: int, tokens: int, tile: int, way: Any, scores: Tensor | None = None) -> int:
    """How many tokens an expert gets that `pairs` of so many chose, the first ones."""
    if scores is None:
        scores = torch.linspace(1.0, 0.1, tokens)
    both = torch.stack([scores, torch.zeros(tokens)], dim=1)
    ids = torch.full((tokens, 1), -1)
    ids[:pairs] = 0
    return counts(training.round_tokens(both, ids, way, tile), 2)[0]


def test_nearest_takes_the_multiple_above_if_that_is_nearer() -> None:
    assert [one_expert(pairs, 64, 8, "NR-f") for pairs in (8, 9, 12, 13, 15, 16, 17)] == [
        *(8, 8, 8, 16, 16, 16, 16)
    ]


def test_too_few_tokens_for_the_multiple_above_are_rounded_down() -> None:
    assert [one_expert(15, tokens, 8, "UP") for tokens in (15, 16)] == [8, 16]


@pytest.mark.parametrize("way", ["SR-f", "NR-s"])
def test_chance_follows_the_share_of_the_last_tile(way: Any) -> None:
    tokens, tile, pairs = 32, 8, 10
    scores = torch.linspace(1.0, 0.1, tokens)
    ids = torch.full((tokens, 1), -1)
    ids[:pairs] = 0
    both = torch.stack([scores, torch.zeros(tokens)], dim=1)
    generator = torch.Generator().manual_seed(0)
    times = 500
    up = sum(
        counts(training.round_tokens(both, ids, way, tile, generator=generator), 2)[0] == 16
        for _ in range(times)
    )
    share = 2 / 8 if way == "SR-f" else float(scores[8:10].sum() / scores[8:16].sum())
    assert up / times == pytest.approx(share, abs=0.09)  # four deviations


@settings(deadline=None, max_examples=100)
@given(call=calls(), negative=st.booleans())
def test_what_is_drawn_decides_by_the_share_of_the_last_tile(
    call: dict[str, Any], negative: bool
) -> None:
    call = call | {"slots": None}
    scores, ids, tile = call["scores"], call["topk_ids"], call["tile"]
    count, experts = scores.shape
    tokens = count if call["tokens"] is None else call["tokens"]
    if tokens < tile:
        return
    summed = scores - 0.5 * negative
    drawn = torch.rand(
        experts, dtype=torch.float64, generator=torch.Generator().manual_seed(call["seed"])
    ).tolist()
    own_first = by_hand(scores, ids, tile, [True] * experts, tokens)
    before = counts(ids[:tokens], experts)
    expected: dict[Rounding, list[bool]] = {"SR-f": [], "NR-s": []}
    for expert, (was, above) in enumerate(zip(before, own_first, strict=True)):
        below = by_hand(scores, ids, tile, [False] * experts, tokens)[expert]
        own = {t for t in range(tokens) if expert in ids[t].tolist()}
        s0, s, s1 = (
            sum(max(float(summed[t, expert]), 0.0) for t in some) for some in (below, own, above)
        )
        can = was % tile != 0 and len(above) % tile == 0
        expected["SR-f"].append(can and drawn[expert] < (was % tile) / tile)
        expected["NR-s"].append(can and s > s0 and drawn[expert] < (s - s0) / (s1 - s0))
    for way, rises in expected.items():
        found = counts(rounded(call, rounding=way, summed=summed)[:tokens], experts)
        assert [now > was for was, now in zip(before, found, strict=True)] == rises
    equal = [rounded(call, rounding=way, summed=torch.ones_like(scores)) for way in expected]
    assert torch.equal(*equal)  # the share of equal scores is that of tokens


@pytest.mark.parametrize("way", ["SR-f", "NR-s"])
def test_pytorchs_own_seed_decides_without_a_generator(way: Any) -> None:
    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(3))
    ids = moeos.topk(scores, 3).indices
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        found.append(training.round_tokens(scores, ids, way, 8))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_experts_take_tokens_with_a_free_slot_the_lowest_first() -> None:
    # Tokens 0 to 2 chose expert 0, and token 3 expert 1; a tile is two tokens.
    scores = torch.tensor([[9.0, 5.0, 1.0], [8.0, 4.0, 1.0], [7.0, 6.0, 1.0], [1.0, 9.0, 8.0]])
    ids = torch.tensor([[0], [0], [0], [1]])
    # One token beside a whole tile is as far from both multiples: both experts drop theirs.
    assert training.round_tokens(scores, ids, "NR-f", 2, slots=1).tolist() == [[0], [0], [-1], [-1]]
    # Expert 0 takes the token that expert 1 drops.
    assert training.round_tokens(scores, ids, "Balance-f", 2, slots=1).tolist() == [[0]] * 4
    up = training.round_tokens(scores, ids, "UP", 2, slots=1)
    # Nobody is free for expert 0, which drops token 2; expert 1 takes it.
    assert up.tolist() == [[0], [0], [1], [1]]
    assert training.round_tokens(scores, ids, "UP", 2, slots=2).tolist() == [
        *([0, -1], [0, -1], [0, 1], [1, 0])
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"scores": torch.ones(4, 3).long()}, "scores have dtype torch.int64"),
        ({"topk_ids": torch.ones(4, 2)}, "topk_ids have dtype torch.float32"),
        ({"scores": torch.ones(4)}, r"scores is \[4\]; it must be \[S, E\]"),
        ({"topk_ids": torch.ones(5, 2).long()}, r"topk_ids is \[5, 2\]; it must be \[4, k\]"),
        ({"topk_ids": torch.ones(4, 4).long()}, "k at most 3"),
        ({"rounding": "NR"}, "rounding is 'NR'; it must be one of NR-f, SR-f"),
        ({"tile": 0}, "tile is 0"),
        ({"slots": 1}, "slots is 1; it must be 2, those of topk_ids, to 3"),
        ({"slots": 4}, "slots is 4"),
        ({"summed": torch.ones(3, 4)}, r"summed is \[3, 4\]; it must be as scores, \[4, 3\]"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: str) -> None:
    given = {
        "scores": torch.ones(4, 3),
        "topk_ids": torch.zeros(4, 2, dtype=torch.int64),
        "rounding": "NR-f",
        "tile": 2,
    }
    with pytest.raises((TypeError, ValueError), match=error):
        training.round_tokens(**(given | changes))
