# SPDX-License-Identifier: Apache-2.0
"""Clocks for contestants, which take turns so that a machine that drifts meets all of them.

All ranks begin a call at about the same time; then a rank's delay passes, and its call follows. On
GPUs delays pass in the stream, and events tell the time. Must not depend on what contestants do.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

import moeos
from moeos.cli.shared.device_reader import Reader
from moeos.cli.shared.meeting import StreamMeeting

FLUSHED_TOKENS = 512
"""Up to this many tokens per rank the L2 cache is flushed."""

Name = TypeVar("Name", bound=Hashable)
Work = Callable[[], object]
_CALIBRATION = 50_000_000  # clock cycles, some 30 ms


def timing(seconds: Sequence[float]) -> dict[str, Any]:
    """Times of one contestant, a round each, with their median and quartiles."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"seconds": list(seconds), "median": median, "quartiles": [low, high]}


class Clock(Protocol):
    """Measures calls. Collective."""

    def begin(self, work: Work, delay: float = 0.0) -> Callable[[], float]:
        """Begins `work` on this rank, after `delay` seconds; the answer gives the seconds that have
        passed from the common begin to the end of `work`, once `settle` was called.
        """

    def settle(self) -> None:
        """Waits until all that has begun is done."""

    def flush(self) -> None:
        """Puts everything out of the L2 cache of a GPU."""

    def stretch(self, work: Work, factor: float) -> object:
        """What `work` returns, taking `factor` times as long as by itself."""


class HostClock:
    """The clock of layers that compute on the host."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def begin(self, work: Work, delay: float = 0.0) -> Callable[[], float]:
        if self._group is not None:
            dist.barrier(self._group)
        begin = time.perf_counter()
        time.sleep(delay)
        work()
        took = time.perf_counter() - begin
        return lambda: took

    def settle(self) -> None:
        """Calls have ended when they return."""

    def flush(self) -> None:
        """There is no GPU."""

    def stretch(self, work: Work, factor: float) -> object:
        begin = time.perf_counter()
        made = work()
        time.sleep((factor - 1) * (time.perf_counter() - begin))
        return made


class DeviceClock:
    """The clock of layers that compute on this rank's GPU."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._meeting = StreamMeeting(group)
        torch.cuda._sleep(_CALIBRATION)  # the GPU's clock is up
        begin, end = _events()
        begin.record()
        torch.cuda._sleep(_CALIBRATION)
        end.record()
        torch.cuda.synchronize()
        self._cycles_a_second = _CALIBRATION / (begin.elapsed_time(end) * 1e-3)

    @functools.cached_property
    def reader(self) -> Reader:
        """Reads memory, and so flushes the cache."""
        return Reader()

    def begin(self, work: Work, delay: float = 0.0) -> Callable[[], float]:
        self._meeting.meet()
        begin, end = _events()
        begin.record()
        self._wait(delay)
        work()
        end.record()
        return lambda: float(begin.elapsed_time(end)) * 1e-3

    def settle(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        self.reader.flush()

    def stretch(self, work: Work, factor: float) -> object:
        begin, end = _events()
        begin.record()
        made = work()
        end.record()
        end.synchronize()
        self._wait((factor - 1) * begin.elapsed_time(end) * 1e-3)
        return made

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_a_second))


def clock_of(world: moeos.World, group: dist.ProcessGroup | None) -> Clock:
    """The clock of a world's layers. Collective."""
    return DeviceClock(group) if world.backend == "cuda" else HostClock(group)


def measured(clock: Clock, work: Work, delay: float = 0.0) -> float:
    """Seconds of one call on this rank, its delay included. Collective."""
    seconds = clock.begin(work, delay)
    clock.settle()
    return seconds()


def in_turn(
    world: moeos.World,
    clock: Clock,
    contestants: Mapping[Name, Work],
    *,
    rounds: int,
    warm_up: int,
    flushed: bool = False,
    late: float = 0.0,
    ended: Work = lambda: None,
) -> dict[Name, dict[str, Any]]:
    """Each contestant's times, of the slowest rank in each round. Collective.

    Args:
        rounds, warm_up: rounds that count, and those before them.
        flushed: the L2 cache is flushed before each call.
        late: seconds after the others in which this rank begins; its time has them, too.
        ended: is called after each round.
    """
    mine: dict[Name, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(warm_up + rounds):
        first = turn % max(1, len(names))  # no contestant always follows the same one
        begun = []
        for name in names[first:] + names[:first]:
            if flushed:
                clock.flush()
            begun.append((name, clock.begin(contestants[name], late)))
        clock.settle()
        if turn >= warm_up:
            for name, seconds in begun:
                mine[name].append(seconds())
        ended()
    found = world.control.allgather(mine, "the contestants' times")
    return {
        name: timing([max(turn) for turn in zip(*(of[name] for of in found), strict=True)])
        for name in names
    }


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
