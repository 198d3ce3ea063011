# SPDX-License-Identifier: Apache-2.0
"""Which bar a case of the GPU benchmark is judged by, and the floor that nothing gets below."""

from typing import Any

import pytest

from bench.report import bars

MICRO = 1e-6


def case(shape: str, tokens: int, routing: str = "gate", links: float | None = 50.0) -> Any:
    """A case in which G is 100 µs, F 60, W 40 and N 50."""
    return {
        "shape": shape,
        "tokens": tokens,
        "routing": routing,
        "lone": False,
        "times": {"moeos": {"median": 120 * MICRO}, "grouped": {"median": 100 * MICRO}},
        "limits": {
            "F": 60 * MICRO,
            "W": 40 * MICRO,
            "N": None if links is None else links * MICRO,
        },
    }


@pytest.mark.parametrize(
    ("found", "words", "microseconds"),
    [
        (case("mixtral-8x7b", 0), "a call", 20),
        (case("mixtral-8x7b", 128), "1.2 W + 20 µs", 68),
        (case("deepseek-v3", 1), "1.2 W + 20 µs", 68),
        (case("qwen3-235b-a22b", 2048), "1.05 G", 105),
        (case("deepseek-v3", 8192), "1.05 G", 105),
        (case("qwen3-30b-a3b", 8192), "max(0.95 G, 1.25 N)", 95),
        (case("qwen3-30b-a3b", 8192, links=90), "max(0.95 G, 1.25 N)", 112.5),
        (case("qwen3-30b-a3b", 8192, links=None), "max(0.95 G, 1.25 N)", 95),
        (case("qwen3-30b-a3b", 2048), "max(1 G, 1.25 N)", 100),
        (case("thesis-e32", 4096), "max(1 G, 1.25 N)", 100),
        (case("qwen3-30b-a3b", 8192, "zipf:1.2"), "1.1 × max(0.95 G, 1.25 N)", 104.5),
    ],
)
def test_a_case_has_the_bar_of_its_shape_and_size(
    found: Any, words: str, microseconds: float
) -> None:
    bar = bars.time_bar(found)
    assert bar is not None
    assert bar.words == words
    assert bar.seconds == pytest.approx(microseconds * MICRO)


def test_a_layer_with_formats_may_take_what_it_takes_without() -> None:
    found = case("qwen3-30b-a3b", 128, "zipf:1.2")
    found["times"]["in_numbers"] = {"median": 110 * MICRO}
    assert bars.time_bar(found) == bars.Bar("moeos in BF16", 110 * MICRO)
    assert bars.speed_bar(found) is None


@pytest.mark.parametrize("found", [case("mixtral-8x7b", 8192), case("thesis-e8", 2048)])
def test_a_case_that_nobody_set_a_bar_for_has_none(found: Any) -> None:
    assert bars.time_bar(found) is None


def test_several_gpus_must_not_take_much_longer_than_one() -> None:
    alone = case("mixtral-8x7b", 8192)
    [bar] = bars.bars_of(case("mixtral-8x7b", 8192), alone, full=False)
    assert (bar.words, bar.seconds) == ("1.06 T(1 GPU)", pytest.approx(1.06 * 120 * MICRO))
    assert bars.bars_of(case("mixtral-8x7b", 8192), None, full=False) == []
    assert bars.bars_of(case("mixtral-8x7b", 2048), alone, full=False) == []
    uneven = case("mixtral-8x7b", 8192, "zipf:1.2")
    assert bars.bars_of(uneven, alone, full=False) == []


def test_what_others_have_published_is_a_bar_of_the_full_deployment() -> None:
    found = case("qwen3-30b-a3b", 512)
    [bar] = bars.bars_of(found, None, full=True)
    assert (bar.words, bar.seconds) == (bars.PUBLISHED, pytest.approx(235 * MICRO))
    assert bars.bars_of(found, None, full=False) == []
    assert bars.bars_of(found | {"lone": True}, None, full=True) == []


def test_a_case_has_all_of_its_bars() -> None:
    found = case("qwen3-30b-a3b", 8192)
    assert [bar.words for bar in bars.bars_of(found, found, full=True)] == [
        *("max(0.95 G, 1.25 N)", "1.06 T(1 GPU)", bars.PUBLISHED),
    ]


@pytest.mark.parametrize(
    ("shape", "tokens", "times"),
    [("thesis-e8", 8192, 1.5), ("qwen3-30b-a3b", 8192, 2.5), ("deepseek-v3", 128, 4.0)],
)
def test_few_tokens_and_large_models_must_gain_most(shape: str, tokens: int, times: float) -> None:
    assert bars.speed_bar(case(shape, tokens)) == times


def test_the_floor_is_the_largest_limit_and_not_what_was_measured() -> None:
    assert bars.floor_of(case("deepseek-v3", 8192)) == pytest.approx(60 * MICRO)
    assert bars.floor_of(case("deepseek-v3", 8192, links=70)) == pytest.approx(70 * MICRO)
    assert bars.floor_of(case("deepseek-v3", 8192, links=None)) == pytest.approx(60 * MICRO)
