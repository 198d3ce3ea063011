# SPDX-License-Identifier: Apache-2.0
"""What one rank counts in every call, and how the device's records of it are read.

Counting costs next to nothing and is never off. It knows what the fields of Tally, CallRecord and
PeerRecord mean (runtime/memory/records.def). Must not depend on where they lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from moeos.config.records import dtype_of
from moeos.partition.slicing import Slicing
from moeos.world.tracing import TASK_KINDS

STAGES = ("route", "dispatch", "replicate", "product0", "product1", "combine")
"""The kinds of tasks, in the order in which a row meets them."""

TALLY = dtype_of("Tally")
"""The counters of a processor or a courier."""
RECORD = dtype_of("CallRecord")
PEER = dtype_of("PeerRecord")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallStats:
    """The counters of one rank's last call. Times are of the device's clock, in seconds.

    Attributes:
        tokens: S of the call.
        pairs_sent: [P] (token, expert) pairs sent to each rank, this one included.
        rows_sent: [P] rows that went there for them: one for each pair, or, where a call has many
            for a rank, one for each token (docs/architecture.md); 0 if the call did not end well.
        pairs_received: [P] pairs that came from each rank.
        expert_pairs: pairs that each expert of this rank computed.
        tasks: parts run, by kind: route, dispatch, replicate, product0, product1, combine.
        row_bytes_to_peers: bytes of rows written into other ranks' memory, both directions of the
            layer; one that lies twice in a cell (docs/memory.md, "Cells as rings") counts once.
        row_bytes_by_peer: [P] these bytes by rank; 0 for this one.
        count_bytes_to_peers: bytes of row counts, and of the words that say which call it is.
        flag_bytes_to_peers: bytes of arrival flags, of credits for returned rows and, where tokens
            go once, of the words that say which row holds which; not of those by which the windows
            of remote peers are kept.
        padding_rows: rows computed only because a tile's segments are padded to 8 rows.
        drops: pairs of this rank beyond their expert's capacity.
        processors: of this rank.
        busy_seconds: time inside tasks, added over the processors. A GPU's processor begins a task
            while the one before ends; the time of both counts once, for the one before. What its
            courier sends meanwhile (runtime/actors/courier.hpp) does not count.
        busy_seconds_by_task: the time by kind of task, and the time in which rows were sent.
        seconds: from the call's begin on the device to its end; None if it did not end well.
        first_tile_after: when, after the begin, the first tile of rows was handed out to the
            processors; None if there was none. In a call that is planned by its counts they wait
            for its rows then, so it may come before `rows_after`.
        counts_after: [P] when, after the begin, each rank's row counts were here; None if they
            never were.
        rows_after: [P] when the last of its rows were seen to be here; None if none came.
        results_after: [P] when the last results came back from it; None if none did.
        waited_for: [P] by how much the last that came of its counts and rows came later than this
            rank's own: what it held up this rank, if nothing else did.
        rows_before_counts: [P] rows, of all ranks, whose results had left this rank when the row
            counts of each rank came: the work that was done before it.
        sweeps: of the scheduler over its mailboxes; 0 if the call did not end well, as the next.
        waiting_most: parts of tasks that were ready and not taken by a processor, at most. The
            scheduler publishes about a part a processor ahead.
    """

    tokens: int
    pairs_sent: list[int]
    rows_sent: list[int]
    pairs_received: list[int]
    expert_pairs: list[int]
    tasks: dict[str, int]
    row_bytes_to_peers: int
    row_bytes_by_peer: list[int]
    count_bytes_to_peers: int
    flag_bytes_to_peers: int
    padding_rows: int
    drops: int
    processors: int
    busy_seconds: float
    busy_seconds_by_task: dict[str, float]
    seconds: float | None
    first_tile_after: float | None
    counts_after: list[float | None]
    rows_after: list[float | None]
    results_after: list[float | None]
    waited_for: list[float]
    rows_before_counts: list[int]
    sweeps: int
    waiting_most: int

    @property
    def bytes_to_peers(self) -> int:
        """All bytes that this rank wrote into other ranks' memory."""
        return self.row_bytes_to_peers + self.count_bytes_to_peers + self.flag_bytes_to_peers

    @property
    def busy_share(self) -> float | None:
        """The share of the processors' time that tasks took; None if the call ended badly."""
        return self.busy_seconds / (self.processors * self.seconds) if self.seconds else None


def of_slices(
    stats: CallStats, slicing: Slicing, rank: int, ranks: int, row_bytes: int
) -> CallStats:
    """The counters of a rank whose experts are cut, of all ranks of its world.

    `stats` has lists of the ranks of its slice, with which alone it exchanges rows. To the others
    it sends sums of `row_bytes`.
    """
    if not slicing.sums:
        return stats
    peers = slicing.same_slice(rank, ranks)
    lists: dict[str, Any] = {}  # by field: what the others have, and then what the peers have
    for name in ("pairs_sent", "rows_sent", "pairs_received", "row_bytes_by_peer"):
        lists[name] = [0] * ranks
    lists |= {"waited_for": [0.0] * ranks, "rows_before_counts": [0] * ranks}
    for name in ("counts_after", "rows_after", "results_after"):
        lists[name] = [None] * ranks
    for name, values in lists.items():
        for peer, value in zip(peers, getattr(stats, name), strict=True):
            values[peer] = value
    for peer, sums in enumerate(slicing.sums_sent(rank, ranks, stats.tokens)):
        lists["row_bytes_by_peer"][peer] += sums * row_bytes
    return dataclasses.replace(stats, **lists)


def read(
    rank: int,
    tallies: NDArray[numpy.void],
    processors: int,
    record: NDArray[numpy.void],
    peers: NDArray[numpy.void],
    pairs_sent: Sequence[int],
    received: Sequence[Sequence[int]],
    experts: int,
    sent_bytes: int,
    returned_bytes: int,
) -> CallStats:
    """A rank's counters from its memory.

    Args:
        rank: its number among the P that share out experts.
        tallies: [processors, then couriers, then the OS block] of `TALLY`.
        processors: how many of them are processors'.
        record: [1] of `RECORD`.
        peers: [P] of `PEER`.
        pairs_sent: [P].
        received: [P][X] rows from each rank for each place of an expert.
        experts: of this rank, which have the first places.
        sent_bytes: of a row that is sent.
        returned_bytes: of a result that returns.
    """
    of_call = record[0]
    begin = int(of_call["begin_ns"])

    def after(ns: numpy.uint64) -> float | None:
        return (int(ns) - begin) / 1e9 if int(ns) != 0 else None

    tasks = dict(zip(TASK_KINDS, tallies["tasks"].sum(axis=0).tolist(), strict=True))
    busy = dict(zip(TASK_KINDS, tallies["busy_ns"].sum(axis=0).tolist(), strict=True))
    counts_after = [after(ns) for ns in peers["counts_ns"]]
    rows_after = [after(ns) for ns in peers["rows_ns"]]
    last = [
        max(counts or 0.0, rows or 0.0)
        for counts, rows in zip(counts_after, rows_after, strict=True)
    ]
    pairs_received = [sum(rows) for rows in received]
    rows_sent = peers["rows_carried"].tolist()
    return CallStats(
        tokens=int(of_call["tokens"]),
        pairs_sent=list(pairs_sent),
        rows_sent=rows_sent,
        pairs_received=pairs_received,
        expert_pairs=[sum(rows) for rows in zip(*received, strict=True)][:experts],
        tasks={kind: tasks[kind] for kind in STAGES},
        row_bytes_to_peers=int(tallies["row_bytes_to_peers"].sum()),
        row_bytes_by_peer=[
            0 if peer == rank else sent_bytes * rows_there + returned_bytes * rows_back
            for peer, (rows_there, rows_back) in enumerate(
                zip(rows_sent, pairs_received, strict=True)
            )
        ],
        count_bytes_to_peers=int(tallies["count_bytes_to_peers"].sum()),
        flag_bytes_to_peers=int(tallies["flag_bytes_to_peers"].sum()),
        padding_rows=int(tallies["padding_rows"].sum()),
        drops=int(tallies["dropped_pairs"].sum()),
        processors=processors,
        busy_seconds=int(tallies["busy_ns"][:processors].sum()) / 1e9,
        busy_seconds_by_task={kind: busy[kind] / 1e9 for kind in STAGES},
        seconds=after(of_call["end_ns"]),
        first_tile_after=after(of_call["first_tile_ns"]),
        counts_after=counts_after,
        rows_after=rows_after,
        results_after=[after(ns) for ns in peers["results_ns"]],
        waited_for=[max(0.0, seconds - last[rank]) for seconds in last],
        rows_before_counts=peers["rows_returned"].tolist(),
        sweeps=int(of_call["sweeps"]),
        waiting_most=int(of_call["waiting_most"]),
    )
