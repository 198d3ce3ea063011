# SPDX-License-Identifier: Apache-2.0
"""A call in the Chrome trace event format, which Perfetto's and Chrome's viewers read.

The format: "Trace Event Format", the JSON object form. A process is a rank; its threads are its
processors and the actors of its OS block. A processor may claim a part before it has ended the one
before: parts that overlap go to further threads next to its first one, as slices of a thread must
nest. This file must not depend on files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from moeos.cli.timeline.call import (
    COMBINE,
    COURIERS,
    DISPATCH,
    NONE,
    ROUTE,
    STAGES,
    CallTrace,
    Numbers,
    Parts,
    actor_name,
    kind_name,
    phases,
)
from moeos.cli.timeline.causes import Causes
from moeos.config.limits import DTYPES
from moeos.config.sizes import sent_row_bytes
from moeos.world.tracing import TASK_KINDS

Event = dict[str, Any]

_THREADS = 100_000  # of a process at most: viewers want a thread's number to be its alone
_LANES = 16  # of a processor, at most


def document(call: CallTrace, causes: Causes, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file: `about` says what ran, and becomes the file's metadata, as do the events
    that were dropped.
    """
    lanes = _lanes(call.parts)
    dropped = {
        f"rank {trace.rank}": {
            actor_name(trace, actor): lost for actor, lost in enumerate(trace.dropped) if lost
        }
        for trace in call.ranks
        if any(trace.dropped)
    }
    return {
        "traceEvents": [
            *_names(call, lanes),
            *_parts(call, lanes),
            *_steps(call),
            *_flows(call, causes, lanes),
            *_counters(call, causes),
            *_bytes_in_flight(call, about.get("config")),
        ],
        "displayTimeUnit": "ns",
        "otherData": {**about, "dropped_events": dropped},
    }


def _process(rank: int) -> int:
    return rank + 1  # 0 is the idle process of a system


def _thread(rank: int, actor: int, lane: int = 0) -> int:
    return _process(rank) * _THREADS + actor * _LANES + lane


def _us(ns: float) -> float:
    return ns / 1000


def _lanes(parts: Parts) -> Numbers:
    """The lane of each part: the first of its processor's threads that is free when the part is
    claimed.
    """
    lanes = numpy.zeros(len(parts), numpy.int64)
    free: dict[tuple[int, int], list[int]] = {}
    for index, part in enumerate(parts):
        until = free.setdefault((int(part["rank"]), int(part["processor"])), [])
        lane = next((n for n, end in enumerate(until) if end <= part["claimed"]), len(until))
        until[lane:] = [int(part["visible"]), *until[lane + 1 :]]
        lanes[index] = lane
    return lanes


def _names(call: CallTrace, lanes: Numbers) -> Iterator[Event]:
    for trace in call.ranks:
        process = _process(trace.rank)
        mine = call.parts["rank"] == trace.rank
        yield _meta("process_name", process, {"name": f"rank {trace.rank}"})
        yield _meta("process_sort_index", process, {"sort_index": trace.rank})
        for actor in range(len(trace.events)):
            used = lanes[mine & (call.parts["processor"] == actor)]
            for lane in range(int(used.max()) + 1 if len(used) else 1):
                beside = f", beside {lane}" if lane else ""
                thread = _thread(trace.rank, actor, lane)
                name = {"name": actor_name(trace, actor) + beside}
                yield _meta("thread_name", process, name, thread)
                yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)


def _meta(name: str, process: int, args: Event, thread: int | None = None) -> Event:
    event: Event = {"ph": "M", "name": name, "pid": process, "args": args}
    return event if thread is None else {**event, "tid": thread}


def _parts(call: CallTrace, lanes: Numbers) -> Iterator[Event]:
    by_phase = [(name, begin.tolist(), end.tolist()) for name, begin, end in phases(call.parts)]
    for index, part in enumerate(call.parts):
        rank = int(part["rank"])
        place = {
            "pid": _process(rank),
            "tid": _thread(rank, int(part["processor"]), int(lanes[index])),
        }
        begin, end = int(part["claimed"]), int(part["visible"])
        name = kind_name(int(part["kind"]))
        yield _slice(name, "part", begin, end, {**place, "args": arguments(call, part)})
        for phase, begins, ends in by_phase:
            if ends[index] > begins[index]:
                yield _slice(phase, "phase", begins[index], ends[index], place)


def arguments(call: CallTrace, part: Any) -> dict[str, int]:
    """The fields of a part, by name; experts and chunks are numbered among all of a rank's."""
    rank, kind = int(part["rank"]), int(part["kind"])
    place, rows, carried, number = (
        int(part[name]) for name in ("place", "rows", "carried", "part")
    )
    if kind == ROUTE:
        return {"block": number}
    if kind in COURIERS:
        peer = int(part["peer"])
        source, owner = (rank, peer) if kind == DISPATCH else (peer, rank)
        first, last = call.chunk_experts(source, owner, place, rows)
        of_chunks = {"peer": peer, "chunk": place, "chunks": rows}
        return {**of_chunks, "first_expert": first, "last_expert": last, "rows": carried}
    if kind == COMBINE:
        which = {"block": number} if place == NONE else {"first_complete": place}
        return {**which, "tokens": rows}
    of_tile = {"tile": place, "rows": rows, "part": number}
    if call.of_shared(rank, int(part["expert"])):
        return {"shared_experts": 1, **of_tile}
    return {"expert": call.expert(rank, int(part["expert"])), **of_tile}


def _steps(call: CallTrace) -> Iterator[Event]:
    for step in call.steps:
        rank, kind = int(step["rank"]), int(step["kind"])
        actor = call.ranks[rank].processors + kind - len(TASK_KINDS)
        place = {"pid": _process(rank), "tid": _thread(rank, actor)}
        yield _slice(kind_name(kind), "step", int(step["begin"]), int(step["end"]), place)


def _slice(name: str, category: str, begin: int, end: int, more: Event) -> Event:
    times = {"ts": _us(begin), "dur": _us(end - begin)}
    return {"ph": "X", "name": name, "cat": category, **times, **more}


def _flows(call: CallTrace, causes: Causes, lanes: Numbers) -> Iterator[Event]:
    """An arrow from each certain cause to the first part of each task that waited for it; for
    Dispatch, whose parts do not name their task, to each part.
    """
    parts = call.parts
    drawn: set[tuple[int, ...]] = set()
    for index in numpy.flatnonzero(causes.certain & (causes.part != NONE)):
        cause = int(causes.part[index])
        part = parts[index]
        task = tuple(int(part[name]) for name in ("rank", "kind", "peer", "place"))
        begin, end = int(parts["claimed"][cause]), int(part["claimed"])
        if (cause, *task) in drawn or end < begin:  # by clocks that differ
            continue
        drawn.add((cause, *task))
        name = f"{kind_name(int(parts['kind'][cause]))} → {kind_name(int(part['kind']))}"
        same = {"name": name, "cat": "waited for", "id": len(drawn)}
        leaves = min(int(parts["stored"][cause]), end)
        yield {"ph": "s", **same, "ts": _us(leaves), **_place(parts, lanes, cause)}
        yield {"ph": "f", "bp": "e", **same, "ts": _us(end), **_place(parts, lanes, int(index))}


def _place(parts: Parts, lanes: Numbers, index: int) -> Event:
    rank, processor = int(parts["rank"][index]), int(parts["processor"][index])
    return {"pid": _process(rank), "tid": _thread(rank, processor, int(lanes[index]))}


def _counters(call: CallTrace, causes: Causes) -> Iterator[Event]:
    """Parts in flight by kind; and parts whose certain cause was stored and that no processor
    claimed.
    """
    parts = call.parts
    known = causes.certain & (causes.part != NONE)
    ready = numpy.minimum(causes.since(parts), parts["claimed"])
    for trace in call.ranks:
        for kind in STAGES:
            mine = (parts["rank"] == trace.rank) & (parts["kind"] == kind)
            name = kind_name(kind)
            yield from _counter(
                f"{name} in flight", trace.rank, parts["claimed"][mine], parts["visible"][mine]
            )
            if kind != ROUTE:
                waiting = mine & known
                begins, ends = ready[waiting], parts["claimed"][waiting]
                yield from _counter(f"{name} ready", trace.rank, begins, ends)


def _bytes_in_flight(call: CallTrace, config: Mapping[str, Any] | None) -> Iterator[Event]:
    """Bytes of rows that each rank's Dispatch is sending to other ranks; for a layer whose config
    is known. An event does not say whose rows a tile of Product1 returns.
    """
    if config is None:
        return
    dtype = DTYPES[config["dtype"]]
    row_bytes = sent_row_bytes(config["hidden"], dtype, config.get("activation_format"))
    parts = call.parts
    for trace in call.ranks:
        mine = parts["rank"] == trace.rank
        there = mine & (parts["kind"] == DISPATCH) & (parts["peer"] != trace.rank)
        sent = parts[there]
        if len(sent) > 0:
            counts = row_bytes * sent["carried"]
            name = "dispatched bytes to peers in flight"
            yield from _counter(name, trace.rank, sent["claimed"], sent["visible"], "bytes", counts)


def _counter(
    name: str,
    rank: int,
    begins: Numbers,
    ends: Numbers,
    unit: str = "parts",
    counts: Numbers | None = None,
) -> Iterator[Event]:
    """The amount that is present at each moment, where items last from begins to ends [n]; each
    counts as one, or as `counts` [n].
    """
    each = numpy.ones(len(begins), numpy.int64) if counts is None else counts
    changes = numpy.concatenate([each, -each])
    moments, which = numpy.unique(numpy.concatenate([begins, ends]), return_inverse=True)
    levels = numpy.bincount(which, changes, len(moments)).cumsum()
    for moment, level in zip(moments.tolist(), levels.tolist(), strict=True):
        args = {unit: int(level)}
        yield {"ph": "C", "name": name, "pid": _process(rank), "ts": _us(moment), "args": args}
