# SPDX-License-Identifier: Apache-2.0
"""What a call's parts add up to, and the chain of parts that its end waited for.

This file must not depend on how results are written.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy

from moeos.cli.timeline.call import (
    COMBINE,
    COURIERS,
    NONE,
    STAGES,
    CallTrace,
    Numbers,
    Parts,
    kind_name,
    phases,
    work_time,
)
from moeos.cli.timeline.causes import Causes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One kind of task on all ranks; times in ns of the call's clock.

    Attributes:
        parts: how many were noted.
        first_claimed, last_visible: None where there is no part.
        work: time at work, added over the processors of all ranks.
        share: of the time of all processors, from the call's first event to its last.
        waited: of parts whose cause is certain, the mean time from its results to the claim, 0
            where the claim came before; None where no part has such a cause.
        phases: mean of each phase over the parts that have it, by its name.
    """

    kind: str
    parts: int
    first_claimed: int | None
    last_visible: int | None
    work: int
    share: float
    waited: float | None
    phases: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of the call, and what the processors of all ranks did in it, as shares of their
    time; begin and end in ns of the call's clock.

    Attributes:
        working: by kind of task, at work.
        storing: by kind of task, between a part's work and its results in memory.
        rest: neither, in any task but the couriers', which a GPU's processors do at the same time
            as others.
    """

    begin: int
    end: int
    working: dict[str, float]
    storing: dict[str, float]
    rest: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank; times in ns of the call's clock, None where it has no part.

    Attributes:
        work: time at work, added over its processors; parts that overlap on one count once.
        share: of its processors' time, from the call's first event to its last, at work.
    """

    processors: int
    parts: int
    first_claimed: int | None
    last_visible: int | None
    work: int
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainLink:
    """A part of the chain that the end of the call waited for.

    Attributes:
        part: its number in `CallTrace.parts`.
        waited: ns from its cause's results to its claim; None without a cause. Below 0 where it was
            claimed while its cause was still at work, as what the last Route part posts.
        busy: of the processors' time on its rank, while it waited, the share at work; None where it
            did not wait.
        idle: ns of the longest stretch in which no processor of its rank was at work and which
            ended at its claim, or between its cause's claim and its own; 0 without a cause.
        certain: whether its cause, the next link of the chain, is; see `Causes`.
    """

    part: int
    waited: int | None
    busy: float | None
    idle: int
    certain: bool


def stages_of(call: CallTrace, causes: Causes) -> list[Stage]:
    """A stage for each kind of task, in the order in which a row meets them."""
    found = []
    since = causes.since(call.parts)
    for kind in STAGES:
        mine = call.parts["kind"] == kind
        parts = call.parts[mine]
        known = mine & causes.certain & (causes.part != NONE)
        waits = numpy.maximum(0, call.parts["claimed"][known] - since[known])
        found.append(
            Stage(
                kind=kind_name(kind),
                parts=len(parts),
                first_claimed=_least(parts["claimed"]),
                last_visible=_most(parts["visible"]),
                work=(work := work_time(parts)),
                share=_share(call, work, call.processors),
                waited=float(waits.mean()) if len(waits) else None,
                phases=_mean_phases(parts),
            )
        )
    return found


def intervals_of(call: CallTrace, count: int) -> list[Interval]:
    """The call in `count` intervals of equal length, in order; none for a call without length."""
    bounds = numpy.linspace(0, call.length, count + 1, dtype=numpy.int64).tolist()
    return [_interval(call, begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]


def ranks_of(call: CallTrace) -> list[RankSummary]:
    """A summary of each rank."""
    found = []
    for trace in call.ranks:
        parts = call.parts[call.parts["rank"] == trace.rank]
        work = work_time(parts)
        found.append(
            RankSummary(
                processors=trace.processors,
                parts=len(parts),
                first_claimed=_least(parts["claimed"]),
                last_visible=_most(parts["visible"]),
                work=work,
                share=_share(call, work, trace.processors),
            )
        )
    return found


def chain_of(call: CallTrace, causes: Causes) -> list[ChainLink]:
    """What the end of the call waited for, from the last Combine part back; the last first.

    Empty where there is no Combine part, or events are missing.
    """
    combines = numpy.flatnonzero(call.parts["kind"] == COMBINE)
    if len(combines) == 0 or not call.planned_up_front:
        return []
    since = causes.since(call.parts)
    chain: list[ChainLink] = []
    index = int(combines[numpy.argmax(call.parts["visible"][combines])])
    while index != NONE:
        cause = int(causes.part[index])
        claimed, stored = int(call.parts["claimed"][index]), int(since[index])
        chain.append(
            ChainLink(
                part=index,
                waited=None if cause == NONE else claimed - stored,
                busy=None if cause == NONE else _busy(call, index, stored, claimed),
                idle=_longest_idle(call, index, cause),
                certain=bool(causes.certain[index]),
            )
        )
        index = cause
    return chain


def _interval(call: CallTrace, begin: int, end: int) -> Interval:
    time = call.processors * (end - begin)
    working, storing = {}, {}
    rest = 1.0
    for kind in STAGES:
        parts = call.parts[call.parts["kind"] == kind]
        done, stored = parts["work_end"], parts["stored"].clip(min=parts["work_end"])
        works = _within(parts["work_begin"], done, begin, end) / time
        stores = _within(done, stored, begin, end) / time
        working[kind_name(kind)], storing[kind_name(kind)] = works, stores
        rest -= works + stores if kind not in COURIERS else 0.0
    return Interval(begin=begin, end=end, working=working, storing=storing, rest=max(0.0, rest))


def _within(begins: Numbers, ends: Numbers, begin: int, end: int) -> int:
    """ns of each of these intervals [n] that lie between two moments."""
    return int((ends.clip(begin, end) - begins.clip(begin, end)).sum())


def _share(call: CallTrace, work: int, processors: int) -> float:
    return work / (processors * call.length) if call.length else 0.0


def _busy(call: CallTrace, index: int, begin: int, end: int) -> float | None:
    """The share of its rank's processors' time that was work, between two moments."""
    if begin >= end:
        return None
    rank = int(call.parts["rank"][index])
    parts = call.parts[call.parts["rank"] == rank]
    for name in ("work_begin", "work_end"):
        parts[name] = parts[name].clip(begin, end)
    return work_time(parts) / (call.ranks[rank].processors * (end - begin))


def _longest_idle(call: CallTrace, index: int, cause: int) -> int:
    """The longest stretch without work on a part's rank that ends at its claim, or that ends
    between its cause's claim and its own; 0 for a part without a cause.

    Work that began shortly before the claim does not hide the stretch before that work: the first
    of many parts that wait for the same results would otherwise hide it from all others.
    """
    if cause == NONE:
        return 0
    claimed, since = (int(call.parts["claimed"][part]) for part in (index, cause))
    on_rank = call.parts[call.parts["rank"] == call.parts["rank"][index]]
    longest = until = 0
    for begin, end in sorted(on_rank[["work_begin", "work_end"]].tolist()):
        if begin >= claimed:
            break
        if begin > since:
            longest = max(longest, begin - until)
        until = max(until, end)
    return max(longest, claimed - until)


def _mean_phases(parts: Parts) -> dict[str, float]:
    means = {}
    for phase, begin, end in phases(parts):
        there = end != NONE
        if there.any():
            means[phase] = float((end[there] - begin[there]).mean())
    return means


def _least(times: Numbers) -> int | None:
    return int(times.min()) if len(times) else None


def _most(times: Numbers) -> int | None:
    return int(times.max()) if len(times) else None
