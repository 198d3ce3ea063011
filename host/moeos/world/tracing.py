# SPDX-License-Identifier: Apache-2.0
"""The events of a rank's actors in a call, and their times, as the device noted them
(runtime/record/trace.hpp).

Must not depend on files or pictures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray

from moeos import _runtime
from moeos.config.records import dtype_of
from moeos.partition.slicing import Slicing

KINDS = tuple(_runtime.trace_kinds())
"""The parts of tasks, then the steps of the OS block's actors."""
TASK_KINDS = tuple(_runtime.task_kinds())
OS_ACTORS = ("scheduler", "counts", "arrivals", "returns")
"""The actors after the processors, in the order of their lists."""

MAX_EVENTS = 1 << 16
"""The most events that an actor can be asked to note of a call."""

EVENT = dtype_of("TraceEvent")


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """One rank's part of a call.

    Attributes:
        rank: whose.
        events: of each actor, in the order in which they were noted: the processors, then
            `OS_ACTORS`. Events of a processor's courier follow its own. Their dtype is `EVENT`;
            times are in ns of a clock that all ranks of a host share.
        dropped: [actor] events that found no room.
        received: int64 [P, X] rows that came from each rank for each local expert, which are sent
            in this order, `chunk_rows` at a time. X is the most experts of a rank: where this one
            has fewer, the last columns are 0.
        chunk_rows: rows of a chunk.
        experts: the experts of this rank, in the order of `received`, where a placement says which;
            else none: they are those from rank * X on.
    """

    rank: int
    events: list[NDArray[numpy.void]]
    dropped: list[int]
    received: NDArray[numpy.int64]
    chunk_rows: int
    experts: tuple[int, ...] = ()

    @property
    def processors(self) -> int:
        """How many processors the rank has."""
        return len(self.events) - len(OS_ACTORS)


def of_slices(trace: RankTrace, slicing: Slicing, ranks: int, experts: Sequence[int]) -> RankTrace:
    """The trace of a rank whose experts are cut, of all ranks of its world.

    `trace` knows the ranks of its slice by their places among them. `experts`: of this rank.
    """
    if not slicing.sums:
        return trace
    peers = slicing.same_slice(trace.rank, ranks)
    received = numpy.zeros((ranks, trace.received.shape[1]), numpy.int64)
    received[peers] = trace.received
    numbers = numpy.array(peers, EVENT["peer"])
    for events in trace.events:
        known = events["peer"] < len(peers)  # others have none
        events["peer"][known] = numbers[events["peer"][known]]
    return dataclasses.replace(trace, received=received, experts=tuple(experts))


def read(
    rank: int,
    counts: NDArray[numpy.uint32],
    events: NDArray[numpy.void],
    received: ArrayLike,
    chunk_rows: int,
    *,
    couriers: int = 0,
    experts: tuple[int, ...] = (),
) -> RankTrace:
    """A rank's trace from its memory: counts [actors], events [actors, room] of `EVENT`; and
    received, chunk_rows and experts as in `RankTrace`. Actors are the processors, as many couriers
    or none, and `OS_ACTORS`.
    """
    room = events.shape[1]
    noted = [min(int(count), room) for count in counts]
    lists = [actor[:count].copy() for actor, count in zip(events, noted, strict=True)]
    dropped = [int(count) - kept for count, kept in zip(counts, noted, strict=True)]
    for processor in range(couriers):
        lists[processor] = numpy.concatenate([lists[processor], lists[couriers + processor]])
        dropped[processor] += dropped[couriers + processor]
    del lists[couriers : 2 * couriers], dropped[couriers : 2 * couriers]
    return RankTrace(
        rank,
        lists,
        dropped,
        numpy.asarray(received, numpy.int64),
        chunk_rows,
        experts,
    )
