# SPDX-License-Identifier: Apache-2.0
"""The guard's arithmetic, with workers that answer from a table. Its calls need a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu import guard


class Table:
    """A worker whose calls take the times that a list says, turn by turn."""

    def __init__(self, turns: list[float]) -> None:
        self._turns = iter(turns)

    def ask(self, **request: Any) -> dict[str, Any]:
        if "time" in request:
            return {"times": [next(self._turns)] * request["time"]}
        return {}


class Broken(Table):
    def ask(self, **request: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel")


def measured(this: list[float], base: list[float], rounds: int) -> dict[str, Any]:
    """The base is asked first for how long a call takes, so it has a turn more."""
    workers: dict[str, Any] = {"base": Table([1e-3, *base]), "this": Table(this)}
    return guard.measure("bf16-1", workers, rounds)


def test_the_ratio_is_the_median_over_rounds_without_the_first() -> None:
    case = measured([9.0, 1.0, 1.1, 1.0], [1.0] * 4, 3)
    assert case["ratio"] == 1.0
    assert not guard.is_slower(case)


def test_a_slow_case_is_timed_again_in_twice_as_many_rounds_before_it_counts() -> None:
    lucky = measured([1.0, 1.2, 1.2] + [1.0] * 5, [1.0] * 8, 2)
    assert lucky["first_ratio"] == pytest.approx(1.2)
    assert not guard.is_slower(lucky)
    slow = measured([1.02] * 8, [1.0] * 8, 2)
    assert guard.is_slower(slow)


def test_a_case_that_fails_counts_as_slower() -> None:
    workers: dict[str, Any] = {"base": Broken([]), "this": Broken([])}
    assert guard.is_slower(guard.measure("bf16-1", workers, 1))


def test_the_guard_names_the_workers_twelve_cases() -> None:
    names = guard.case_names()
    assert len(names) == len(set(names)) == 12
    kinds = ("bf16", "fp8", "mxfp4", "backward", "two-ranks", "four-ranks")
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
