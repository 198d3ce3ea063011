# SPDX-License-Identifier: Apache-2.0
"""Thousands of small worlds in orders that seeds decide: results and errors are as they must be.

What a run does and judges is in kernels/twin/explore/; tests/native breaks the runtime and wants it
noticed here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import types
from typing import cast

import pytest

from moeos import _twin
from moeos.engines import explore
from moeos.engines.explore import SCENARIOS, STRATEGIES, Found, Wrong

SEEDS = 100
"""Of which each is run in all scenarios and strategies: 1400 runs."""


@pytest.fixture(scope="module")
def found() -> Found:
    return explore.explore(range(1, SEEDS + 1), seconds=240)


def test_no_order_and_no_fault_gives_a_wrong_result_or_blames_the_wrong_rank(found: Found) -> None:
    assert found.wrong == []
    assert {name: tally.runs for name, tally in found.tallies.items()} == dict.fromkeys(
        SCENARIOS, SEEDS * len(STRATEGIES)
    )


def test_runs_without_a_fault_end_well(found: Found) -> None:
    for name in ("quiet", "nic", "late"):
        tally = found.tallies[name]
        assert tally.failed == 0
        assert tally.calls > 3 * tally.runs  # three calls of each rank


def test_calls_of_gradients_end_well_but_for_a_fault(found: Found) -> None:
    tally = found.tallies["backward"]
    assert tally.calls > 3 * tally.runs
    assert 0 < tally.faults < tally.runs
    assert tally.failed > 0
    assert tally.latency < 1.6
    assert {"COUNTS_LATE", "ROWS_LATE", "RETURNS_LATE"} <= set(tally.endings)


def test_every_fault_ends_soon_after_its_deadline(found: Found) -> None:
    """A quarter of it more where others are waited for; damaged words are noticed at once."""
    for name in ("die", "stall"):
        tally = found.tallies[name]
        assert tally.failed > tally.faults / 2
        assert 1.0 <= tally.latency < 1.6
        assert {"COUNTS_LATE", "ROWS_LATE", "RETURNS_LATE"} <= set(tally.endings)
    damage = found.tallies["damage"]
    assert {"COUNT_DAMAGED", "FLAG_DAMAGED", "WORD_DAMAGED", "TASK_DAMAGED"} <= set(damage.endings)
    assert "RETURNS_TOO_MANY" in damage.endings  # a credit


def fields(outcome: _twin.Outcome) -> dict[str, object]:
    names = [name for name in dir(outcome) if not name.startswith("_")]
    return {name: getattr(outcome, name) for name in names}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_repeats_its_run_exactly(scenario: str) -> None:
    for seed in range(4):
        first, again = (fields(explore.run(seed, scenario, "random")) for _ in range(2))
        assert first == again
        assert first["points"] != explore.run(seed + 1, scenario, "random").points


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, "boredom", "random"), "scenario is 'boredom'; allowed: quiet, nic, die"),
        ((1, "quiet", "luck"), "strategy is 'luck'; allowed: random, priority"),
        ((-1, "quiet", "random"), "seed is -1"),
        ((1 << 64, "quiet", "random"), "seed is 18446744073709551616"),
    ],
)
def test_what_there_is_not_is_named(arguments: tuple[int, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explore.run(*arguments)


def test_processes_side_by_side_try_different_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # of each process

    def run(seed: int, scenario: str, strategy: str) -> _twin.Outcome:
        outcome = _twin.explore(seed, 0, 0)
        now[0] = 100.0 if seed >= 14 else 0.0  # its seconds are over
        if seed < 14 and (scenario, strategy) == ("die", "priority"):
            changed = types.SimpleNamespace(**(fields(outcome) | {"wrong": f"seed {seed}"}))
            return cast(_twin.Outcome, changed)
        return outcome

    monkeypatch.setattr(explore, "run", run)
    monkeypatch.setattr(explore, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    found = explore.explore_side_by_side(10, seconds=6.0, jobs=3)
    assert sorted((wrong.seed, wrong.text) for wrong in found.wrong) == [
        (seed, f"seed {seed}") for seed in range(10, 14)
    ]
    assert {(wrong.scenario, wrong.strategy) for wrong in found.wrong} == {("die", "priority")}


def test_a_run_that_ends_its_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # of each process

    def run(seed: int, scenario: str, strategy: str) -> _twin.Outcome:
        if (seed, scenario, strategy) == (7, "die", "priority"):
            os.kill(os.getpid(), signal.SIGKILL)
        now[0] = 100.0 if seed >= 8 else 0.0  # its seconds are over
        return _twin.explore(seed, 0, 0)

    monkeypatch.setattr(explore, "run", run)
    monkeypatch.setattr(explore, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    [wrong] = explore.explore_side_by_side(4, seconds=0.2, jobs=2).wrong
    assert wrong == Wrong(7, "die", "priority", "the process died with exit code -9")


def test_a_run_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # of each process
    stuck, this = multiprocessing.get_context("fork").Event(), os.getpid()
    asked: list[float] = []

    def run(seed: int, scenario: str, strategy: str) -> _twin.Outcome:
        if (seed, scenario) == (5, "nic"):
            stuck.set()
            time.sleep(600)
        now[0] = 100.0 if seed >= 8 else 0.0  # its seconds are over
        return _twin.explore(seed, 0, 0)

    def monotonic() -> float:
        """Here it is late when the other process has ended, and this one has begun such a run."""
        if os.getpid() == this:
            asked.append(now[0])
            if len(asked) == 3:  # once for the end, and once for each process
                assert stuck.wait(120)
                return 1e6
        return now[0]

    monkeypatch.setattr(explore, "run", run)
    monkeypatch.setattr(explore, "time", types.SimpleNamespace(monotonic=monotonic))
    [wrong] = explore.explore_side_by_side(4, seconds=0.2, jobs=2).wrong
    assert wrong == Wrong(5, "nic", "random", "the process did not end")
