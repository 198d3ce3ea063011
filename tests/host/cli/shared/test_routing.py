# SPDX-License-Identifier: Apache-2.0
"""The patterns of --routing: each follows its law, and gives the layer routing that it accepts."""

from typing import Any

import pytest
import torch

from moeos.cli.shared.routing import Pattern, check_pattern, draw_routing, parse_pattern
from tests.layers import config

TOKENS = 4000


def drawn(text: str, ranks: int = 4, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cfg = config(**({"experts": 16, "top_k": 3} | changes))
    generator = torch.Generator().manual_seed(1)
    routing = draw_routing(parse_pattern(text), cfg, ranks, TOKENS, generator)
    assert routing is not None
    return routing


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("uniform", Pattern("uniform")),
        ("one-expert", Pattern("one-expert")),
        ("zipf:1.5", Pattern("zipf", exponent=1.5)),
        ("empty-rank:12", Pattern("empty-rank", rank=12)),
    ],
)
def test_a_pattern_is_read_by_its_name(text: str, pattern: Pattern) -> None:
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    "text",
    ["", "zip", "zipf", "zipf:", "zipf:0", "zipf:-1", "zipf:nan", "uniform:1", "empty-rank:-1"],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"--routing is .*; allowed: uniform, zipf:A"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["zipf:1", "empty-rank:1"])
def test_a_token_has_distinct_experts_and_weights_that_sum_to_one(text: str) -> None:
    ids, weights = drawn(text)
    ordered = ids.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert ordered[:, 0].min() >= 0
    assert ordered[:, -1].max() < 16
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(TOKENS))


def test_zipf_draws_an_expert_with_odds_that_fall_with_its_number() -> None:
    ids, _ = drawn("zipf:1", top_k=1)
    odds = 1 / torch.arange(1, 17)
    share = ids.flatten().bincount(minlength=16) / TOKENS
    assert (share - odds / odds.sum()).abs().max() < 0.03


def test_one_expert_takes_each_tokens_one_pair() -> None:
    ids, weights = drawn("one-expert")
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:] == -1).all()
    assert weights.sum() == TOKENS


def test_an_empty_ranks_experts_get_no_pair_and_all_others_do() -> None:
    ids, _ = drawn("empty-rank:2")
    pairs = ids.flatten().bincount(minlength=16)
    assert (pairs[8:12] == 0).all()
    assert (pairs[:8] > 0).all()
    assert (pairs[12:] > 0).all()


def test_uniform_leaves_routing_to_the_layer() -> None:
    cfg = config()
    assert draw_routing(Pattern("uniform"), cfg, 2, 8, torch.Generator()) is None


def test_a_rank_that_does_not_exist_cannot_be_empty() -> None:
    with pytest.raises(ValueError, match=r"empty-rank:4; ranks are 0 to 3"):
        check_pattern(Pattern("empty-rank", rank=4), config(), ranks=4)


def test_a_rank_without_which_there_are_too_few_experts_cannot_be_empty() -> None:
    with pytest.raises(ValueError, match=r"the other ranks have 4 experts, too few for top_k 5"):
        check_pattern(Pattern("empty-rank"), config(top_k=5), ranks=2)


@pytest.mark.parametrize("text", ["one-expert", "zipf:1", "empty-rank:0"])
def test_slots_behind_the_kth_are_unused(text: str) -> None:
    ids, weights = drawn(text)
    more, and_weights = drawn(text, rounding="NR-f")
    assert more.shape == and_weights.shape == (TOKENS, 6)
    assert torch.equal(more[:, :3], ids)
    assert torch.equal(and_weights[:, :3], weights)
    assert bool((more[:, 3:] == -1).all())
    assert not and_weights[:, 3:].any()
