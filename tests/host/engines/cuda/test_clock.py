# SPDX-License-Identifier: Apache-2.0
"""What questions to a GPU say of its clock; asking one needs a GPU (tests/gpu/test_trace.py)."""

from __future__ import annotations

from moeos.engines.cuda.clock import Answer, Difference, difference_of

BEHIND = 1_000_000


def answer(asked: int, there: int, back: int) -> Answer:
    """To a question that took so long to the GPU, and its answer to the host."""
    return Answer(asked, asked + there - BEHIND, asked + there + back)


def test_an_answer_belongs_to_the_middle_of_its_way() -> None:
    assert difference_of([answer(5000, 400, 400)]) == Difference(BEHIND, 400)


def test_a_way_that_is_longer_on_one_side_is_within_the_doubt() -> None:
    for there, back in ((0, 801), (801, 0), (300, 500)):
        found = difference_of([answer(7, there, back)])
        assert abs(found.nanoseconds - BEHIND) <= found.uncertainty, (there, back)


def test_the_soonest_answer_counts() -> None:
    answers = [answer(0, 9000, 10), answer(20_000, 300, 310), answer(40_000, 700, 5)]
    assert difference_of(answers) == Difference(BEHIND + 5, 305)


def test_a_clock_may_be_ahead() -> None:
    assert difference_of([Answer(100, 5000, 120)]) == Difference(-4890, 10)
