# SPDX-License-Identifier: Apache-2.0
"""Whether a document is what viewers of the Chrome trace event format can show. Holds no test.

Stricter than Perfetto, which perfetto_reader.py asks: slices must nest, arrows must leave and reach
slices, counters end at 0, and nothing may be there that the format does not name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]

_KEYS = {
    "X": ({"name", "cat", "ts", "dur", "pid", "tid"}, {"args"}),
    "M": ({"name", "pid", "args"}, {"tid"}),
    "s": ({"name", "cat", "id", "ts", "pid", "tid"}, set()),
    "f": ({"name", "cat", "id", "ts", "pid", "tid", "bp"}, set()),
    "C": ({"name", "ts", "pid", "args"}, set()),
}


def check(document: dict[str, Any]) -> list[Event]:
    """The document's events, if it is right; fails if not."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    for event in events:
        required, allowed = _KEYS[event["ph"]]
        assert required <= event.keys() - {"ph"} <= required | allowed, event
        assert isinstance(event["name"], str)
        assert all(type(event[key]) is int for key in ("pid", "tid", "id") if key in event)
        times = [event[key] for key in ("ts", "dur") if key in event]
        assert all(math.isfinite(time) and time >= 0 for time in times), event
    slices = _by_thread(events, "X")
    _check_names(events)
    for own in slices.values():
        _check_nesting(own)
    _check_flows(events, slices)
    _check_counters(events)
    return events


def ns(us: float) -> int:
    """A time of the format, which is in µs, as it was noted."""
    return round(us * 1000)


def _by_thread(events: list[Event], phase: str) -> dict[Thread, list[Event]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == phase:
            found[event["pid"], event["tid"]].append(event)
    return found


def _check_names(events: list[Event]) -> None:
    """Every thread has one name, and its number is no other's; every process has one name."""
    named: dict[str, list[Any]] = {"process_name": [], "thread_name": []}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            assert list(event["args"]) == ["name"]
            named[event["name"]].append((event["pid"], event.get("tid")))
    threads = [thread for _, thread in named["thread_name"]]
    assert len(set(threads)) == len(threads)
    assert len(set(named["process_name"])) == len(named["process_name"])
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xsf"}
    assert used <= set(named["thread_name"])
    assert {event["pid"] for event in events} == {process for process, _ in named["process_name"]}


def _check_nesting(slices: list[Event]) -> None:
    """Slices of a thread lie beside or inside each other; the outer one stands first."""
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda event: ns(event["ts"])):  # stable, as viewers are
        begin, end = ns(event["ts"]), ns(event["ts"] + event["dur"])
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)


def _check_flows(events: list[Event], slices: dict[Thread, list[Event]]) -> None:
    """Each arrow leaves a slice once and reaches a later one once."""
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert ns(pair["s"]["ts"]) <= ns(pair["f"]["ts"])
        assert pair["s"]["name"] == pair["f"]["name"]
        assert pair["f"]["bp"] == "e"
        for event in pair.values():
            at = ns(event["ts"])
            assert any(
                ns(s["ts"]) <= at <= ns(s["ts"] + s["dur"])
                for s in slices[event["pid"], event["tid"]]
            ), event


def _check_counters(events: list[Event]) -> None:
    """Counters go on in time, are never below 0, and end there."""
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            [level] = event["args"].values()
            counters[event["pid"], event["name"]].append((ns(event["ts"]), level))
    for points in counters.values():
        times, levels = zip(*points, strict=True)
        assert list(times) == sorted(set(times))
        assert min(levels) >= 0
        assert levels[-1] == 0
