# SPDX-License-Identifier: Apache-2.0
"""The traces of all ranks of a call as one table of parts, on one clock.

This file must not depend on what caused what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy
from numpy.typing import NDArray

from moeos.world.tracing import KINDS, OS_ACTORS, TASK_KINDS, RankTrace

NONE = -1
"""Stands for no peer, no expert, no place or no moment."""

ROUTE, DISPATCH, REPLICATE, PRODUCT0, PRODUCT1, COMBINE = map(
    TASK_KINDS.index, ("route", "dispatch", "replicate", "product0", "product1", "combine")
)
RETURNS = KINDS.index("returns")
STAGES = (ROUTE, DISPATCH, REPLICATE, PRODUCT0, PRODUCT1, COMBINE)
"""Kinds of tasks in the order in which a row meets them."""
COURIERS = (DISPATCH, REPLICATE)
"""Kinds of tasks that couriers do, on a GPU at the same time as a processor's other tasks."""

MOMENTS = ("claimed", "loading", "computing", "computed", "stored", "visible")
"""The moments of a part, in order; only the first and the last are always there."""
PHASES = ("fetching", "loading", "computing", "storing", "publishing")
"""What a part did before each moment but the first, since the latest earlier moment that it has."""

PART = numpy.dtype(
    [
        *[(name, "<i8") for name in ("rank", "processor", "kind", "part", "peer", "expert")],
        *[(name, "<i8") for name in ("place", "rows", "carried", "awaited")],
        *[(name, "<i8") for name in (*MOMENTS, "work_begin", "work_end")],
    ]
)
"""A part: whose, the fields of its event, and its moments in ns of the call's clock, or `NONE`.

It is at work between work_begin and work_end: from its first operands to its results where a
machine has these moments, and from the begin of its loads, or its claim, until its results are in
memory where not.
"""

STEP = numpy.dtype([("rank", "<i8"), ("kind", "<i8"), ("begin", "<i8"), ("end", "<i8")])
"""A step of an actor of an OS block that found something; times as in `PART`."""

Parts = NDArray[numpy.void]
Numbers = NDArray[numpy.int64]


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """One call on all ranks.

    Attributes:
        ranks: their traces, in rank order.
        parts: [n] of dtype `PART`, of all ranks, in the order of their claims.
        steps: [m] of dtype `STEP`, in the order of their begin.
        length: ns from the first event's begin, which is 0 on the call's clock, to the last one's
            end.
    """

    ranks: Sequence[RankTrace]
    parts: Parts
    steps: Parts
    length: int

    @staticmethod
    def of(ranks: Sequence[RankTrace]) -> CallTrace:
        """The call of which these are the traces of all ranks.

        Raises `ValueError` if a rank is missing, or nothing was noted.
        """
        if not ranks or any(
            (trace.rank, len(trace.received)) != (place, len(ranks))
            for place, trace in enumerate(ranks)
        ):
            raise ValueError(
                f"the traces are of ranks {[trace.rank for trace in ranks]}; they must be those of "
                "all ranks of one world, in order"
            )
        if not any(len(events) for trace in ranks for events in trace.events):
            raise ValueError("the traces hold no event")
        origin = min(
            int(events["begin_ns"].min())
            for trace in ranks
            for events in trace.events
            if len(events)
        )
        parts = numpy.concatenate([_parts_of(trace, origin) for trace in ranks])
        steps = numpy.concatenate([_steps_of(trace, origin) for trace in ranks])
        ends = [int(times.max()) for times in (parts["visible"], steps["end"]) if len(times)]
        return CallTrace(
            ranks,
            parts[numpy.argsort(parts["claimed"], kind="stable")],
            steps[numpy.argsort(steps["begin"], kind="stable")],
            max(ends),
        )

    @property
    def processors(self) -> int:
        """The processors of all ranks together."""
        return sum(trace.processors for trace in self.ranks)

    @property
    def planned_up_front(self) -> bool:
        """Whether every part was noted."""
        return not any(sum(trace.dropped[: trace.processors]) for trace in self.ranks)

    def expert(self, rank: int, local: int) -> int:
        """The number, among the experts of all ranks, of one of a rank's."""
        own = self.ranks[rank].experts
        places: int = self.ranks[rank].received.shape[1]
        return own[local] if own else rank * places + local

    def of_shared(self, rank: int, expert: int) -> bool:
        """Whether a part's expert is the one for all shared experts, which follows those of the
        rank.
        """
        experts: int = self.ranks[rank].received.shape[1]
        return expert == experts

    def chunk_experts(self, source: int, owner: int, first: int, chunks: int) -> tuple[int, int]:
        """The first and the last expert of `owner`, numbered among those of all ranks, that have
        rows in `chunks` chunks of a source from `first` on; (NONE, NONE) if these have no row.
        """
        trace = self.ranks[owner]
        ends = trace.received[source].cumsum()
        first_row = first * trace.chunk_rows
        last_row = min(first_row + chunks * trace.chunk_rows, int(ends[-1])) - 1
        if last_row < first_row:
            return NONE, NONE
        found = numpy.searchsorted(ends, [first_row, last_row], "right").tolist()
        return self.expert(owner, found[0]), self.expert(owner, found[1])


def phases(parts: Parts) -> Iterable[tuple[str, Numbers, Numbers]]:
    """Each phase with its begin and its end in each part [n]; both are NONE where it has none."""
    before = parts["claimed"]
    for phase, moment in zip(PHASES, MOMENTS[1:], strict=True):
        after = parts[moment]
        there = after != NONE
        yield phase, numpy.where(there, before, NONE), after
        before = numpy.where(there, after, before)


def work_time(parts: Parts) -> int:
    """ns in which processors were at work, added over them; parts that overlap count once."""
    total = 0
    for rank, processor in {(int(p["rank"]), int(p["processor"])) for p in parts}:
        mine = parts[(parts["rank"] == rank) & (parts["processor"] == processor)]
        until = -1
        for begin, end in sorted(mine[["work_begin", "work_end"]].tolist()):
            total += max(0, end - max(begin, until))
            until = max(until, end)
    return total


def actor_name(trace: RankTrace, actor: int) -> str:
    """An actor in words, by its place in `RankTrace.events`."""
    if actor < trace.processors:
        return f"processor {actor}"
    name = OS_ACTORS[actor - trace.processors]
    return name if name == "scheduler" else f"{name} subscriber"


def kind_name(kind: int) -> str:
    """The name of the kind of a part or a step."""
    return KINDS[kind]


def _parts_of(trace: RankTrace, origin: int) -> Parts:
    lists = trace.events[: trace.processors]
    events = numpy.concatenate(lists)
    parts = numpy.empty(len(events), PART)
    parts["rank"] = trace.rank
    parts["processor"] = numpy.repeat(numpy.arange(len(lists)), [len(noted) for noted in lists])
    for name in ("kind", "part", "rows", "carried", "awaited"):
        parts[name] = events[name]
    for name in ("peer", "expert", "place"):
        parts[name] = events[name].astype(numpy.uint32).view(numpy.int32)  # kNone is -1
    begin = (events["begin_ns"] - numpy.uint64(origin)).astype(numpy.int64)
    parts["claimed"] = begin
    for name in MOMENTS[1:-1]:
        parts[name] = numpy.where(events[name] > 0, begin + events[name], NONE)
    parts["visible"] = (events["end_ns"] - numpy.uint64(origin)).astype(numpy.int64)
    parts["work_begin"] = _first_of(parts, "computing", "loading", "claimed")
    parts["work_end"] = _first_of(parts, "computed", "stored", "visible")
    return parts


def _first_of(parts: Parts, *moments: str) -> Numbers:
    found: Numbers = parts[moments[0]].copy()
    for moment in moments[1:]:
        found = numpy.where(found == NONE, parts[moment], found)
    return found


def _steps_of(trace: RankTrace, origin: int) -> Parts:
    events = numpy.concatenate(trace.events[trace.processors :])
    steps = numpy.empty(len(events), STEP)
    steps["rank"] = trace.rank
    steps["kind"] = events["kind"]
    for name, field in (("begin", "begin_ns"), ("end", "end_ns")):
        steps[name] = (events[field] - numpy.uint64(origin)).astype(numpy.int64)
    return steps
