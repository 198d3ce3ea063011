# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test run always, and which at night alone (docs/testing.md, "The two runs").

Holds no test.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def all_but(always: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: those of `always` run always, the others at night."""
    found = list(cases)
    assert all(case in found for case in always), "what runs always is no case"
    return [case if case in always else at_night(case) for case in found]


def spread(step: int, cases: Sequence[Any]) -> list[Any]:
    """The same, where each `step`-th case runs always."""
    return [case if place % step == 0 else at_night(case) for place, case in enumerate(cases)]


def covering(*values: Iterable[Any]) -> list[Any]:
    """All combinations of values, of which each pair of two values runs always, in some of them.

    The last ones are the fewest.
    """
    numbered = [[*enumerate(one)] for one in values]
    step = len(numbered[-1])
    return [
        case if sum(places) % step == 0 else at_night(case)
        for places, case in (zip(*drawn, strict=True) for drawn in itertools.product(*numbered))
    ]


def in_turn(*values: Iterable[Any]) -> list[Any]:
    """All combinations of values, of which as many run always as the longest list has values.

    In these the values of each list take turns, so that each runs.
    """
    lists = [[*one] for one in values]
    places = range(max(map(len, lists)))
    always = [tuple(one[place % len(one)] for one in lists) for place in places]
    return all_but(always, itertools.product(*lists))


def at_night(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
