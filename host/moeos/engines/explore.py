# SPDX-License-Identifier: Apache-2.0
"""Runs the device OS in orders that seeds decide, for `moeos fuzz` and CI.

A run makes a small random world (1 to 4 ranks, 3 calls), whose actors are fibers of one thread; at
each atomic access another fiber may go on, and something may happen to the world in addition to its
calls (`SCENARIOS`). The result must be right, or an error that names the right rank; after a reset
the calls must be right. A seed repeats its run exactly. The C++ side is `kernels/twin/explore/`.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from moeos import _twin
from moeos._runtime import FailureKind

SCENARIOS = ("quiet", "nic", "die", "stall", "damage", "late", "backward")
"""`moeos::twin::Scenario`: nothing; a network card that reorders and delays puts between fences; a
rank that stops; one that stands still for a while; a word of the protocol that is overwritten;
ranks that begin calls later than others. The last is one of these with calls of gradients."""

STRATEGIES = ("random", "priority")
"""`moeos::twin::Strategy`: the fiber that goes on is drawn at each access, or has the highest of
priorities that change seldom (probabilistic concurrency testing)."""

LONGEST_RUN = 60.0
"""Seconds that a run may take; it takes some milliseconds."""

_TURNS = [(scenario, strategy) for scenario in SCENARIOS for strategy in STRATEGIES]


@dataclasses.dataclass
class Tally:
    """The outcomes of the runs of one scenario.

    Attributes:
        runs: seeds times strategies.
        calls: that ended well; each result was compared with one in double precision.
        faults: runs in which the fault fell into the calls.
        failed: ranks whose calls ended with an error.
        points: atomic accesses, at each of which another actor could go on.
        switches: at which another one did.
        latency: the longest time from a fault to an error, in deadlines; virtual.
        endings: in how many runs a rank failed with this kind of failure, by name.
    """

    runs: int = 0
    calls: int = 0
    faults: int = 0
    failed: int = 0
    points: int = 0
    switches: int = 0
    latency: float = 0.0
    endings: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, outcome: _twin.Outcome) -> None:
        """Counts one run."""
        self.runs += 1
        self.calls += outcome.calls
        self.faults += outcome.happened
        self.failed += outcome.failed
        self.points += outcome.points
        self.switches += outcome.switches
        self.latency = max(self.latency, outcome.latency_ns / outcome.deadline_ns)
        self.endings.update(kind.name for kind in FailureKind if outcome.kinds >> kind & 1)

    def merge(self, other: Tally) -> None:
        """Counts what another one has counted."""
        for field in ("runs", "calls", "faults", "failed", "points", "switches"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.latency = max(self.latency, other.latency)
        self.endings.update(other.endings)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A run that must not have ended as it did, and how to repeat it."""

    seed: int
    scenario: str
    strategy: str
    text: str


@dataclasses.dataclass
class Found:
    """The outcomes of all runs, by scenario."""

    tallies: dict[str, Tally] = dataclasses.field(
        default_factory=lambda: {scenario: Tally() for scenario in SCENARIOS}
    )
    wrong: list[Wrong] = dataclasses.field(default_factory=list)


def run(seed: int, scenario: str, strategy: str) -> _twin.Outcome:
    """One run; the same arguments give the same outcome.

    Raises `ValueError` for a scenario or a strategy that there is not, or a seed beyond 64 bits.
    """
    for value, allowed, what in (
        (scenario, SCENARIOS, "scenario"),
        (strategy, STRATEGIES, "strategy"),
    ):
        if value not in allowed:
            raise ValueError(f"{what} is {value!r}; allowed: {', '.join(allowed)}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; allowed: 0 to 2^64 - 1")
    return _twin.explore(seed, STRATEGIES.index(strategy), SCENARIOS.index(scenario))


def explore(
    seeds: Iterable[int],
    seconds: float,
    begin: Callable[[int, int], None] = lambda seed, turn: None,
) -> Found:
    """Runs seed after seed in every scenario and strategy, on this thread, for at most `seconds`.

    `begin` is called before each run with its seed and its index in `_TURNS`.
    """
    found = Found()
    end = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            break
        for turn, (scenario, strategy) in enumerate(_TURNS):
            begin(seed, turn)
            outcome = run(seed, scenario, strategy)
            found.tallies[scenario].add(outcome)
            if outcome.wrong:
                found.wrong.append(Wrong(seed, scenario, strategy, outcome.wrong))
    return found


def explore_side_by_side(first_seed: int, seconds: float, jobs: int | None = None) -> Found:
    """Runs `explore` from `first_seed` on, in as many processes as this one may use cores.

    A run that ends its process, or does not end within `LONGEST_RUN`, is a finding too.
    """
    jobs = jobs or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    found = Found()
    end = time.monotonic() + seconds + LONGEST_RUN
    working: list[tuple[Connection, BaseProcess, _Current]] = []
    for index in range(jobs):
        ours, theirs = context.Pipe(duplex=False)
        current: _Current = context.RawArray("Q", 2)
        process: BaseProcess = context.Process(
            target=_work, args=(theirs, current, first_seed + index, jobs, seconds), daemon=True
        )
        process.start()
        theirs.close()
        working.append((ours, process, current))
    for results, process, current in working:
        try:
            ended = results.poll(max(0.0, end - time.monotonic()))
            part: Found | None = results.recv() if ended else None
        except EOFError:
            ended, part = True, None
        if part is None:
            process.kill()
        process.join()
        if part is None:
            text = f"died with exit code {process.exitcode}" if ended else "did not end"
            scenario, strategy = _TURNS[current[1]]
            found.wrong.append(Wrong(current[0], scenario, strategy, f"the process {text}"))
            continue
        for scenario, tally in part.tallies.items():
            found.tallies[scenario].merge(tally)
        found.wrong.extend(part.wrong)
    return found


class _Current(Protocol):
    """A process's current seed and index in `_TURNS`."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


def _work(
    results: Connection, current: _Current, first_seed: int, step: int, seconds: float
) -> None:
    def begin(seed: int, turn: int) -> None:
        current[0], current[1] = seed, turn

    results.send(explore(range(first_seed, 1 << 64, step), seconds, begin))
