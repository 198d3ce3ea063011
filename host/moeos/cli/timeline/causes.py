# SPDX-License-Identifier: Apache-2.0
"""What each part waited for, as far as the events and the counts of rows determine it.

This file knows how a call's work follows from other work (docs/tracing.md has the rules in words);
it must not depend on files or pictures.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from moeos import _runtime
from moeos.cli.timeline.call import (
    COMBINE,
    DISPATCH,
    NONE,
    PRODUCT0,
    PRODUCT1,
    REPLICATE,
    RETURNS,
    ROUTE,
    CallTrace,
    Numbers,
    Parts,
)
from moeos.world.tracing import TASK_KINDS


@dataclasses.dataclass(frozen=True)
class Causes:
    """The cause of each part of a call, in the order of `CallTrace.parts`.

    Attributes:
        part: int64 [n] the number of the last part that it waited for, or NONE.
        certain: bool [n] whether it could not begin before the cause's results were in memory.
            Otherwise the cause is likely, but no event proves it.
    """

    part: Numbers
    certain: NDArray[numpy.bool_]

    def since(self, parts: Parts) -> Numbers:
        """int64 [n] when the results of each part's cause were in memory, or NONE."""
        return numpy.where(self.part == NONE, NONE, parts["stored"][self.part])


def find(call: CallTrace) -> Causes:
    """The causes of all parts; of none if events are missing, since any missing event could be one.

    * Dispatch, and Combine of tokens without rows: the last Route part of its rank. So is Product0
      of a call whose tokens are read in place, which has no Dispatch: it may begin when experts
      have been chosen, while that part still sorts and counts.
    * Replicate of a chunk: the Dispatch part with which the chunk had arrived. A chunk has arrived
      when those before it, of its source, have.
    * Product0 of a tile: the part of the chunk with which as many rows of its expert were here as
      its tiles, up to this one, hold. A chunk is here when it has arrived; one that is
      replicated, when it and those before it have been.
      If the tile's processors waited for its rows themselves, in a call that is planned up front:
      the last of these chunks that was here when they had the rows. The tile's rows may be in
      others, so this cause is not certain.
    * Product1 of a tile: the last part of the tile's Product0.
    * Combine of complete tokens: the last Product1 part, of a tile that may hold rows of the rank,
      that was visible before the step began in which the returns subscriber, it seems, posted the
      task, or before its claim where it is of a subscriber whose steps are not noted, or where its
      processor waited itself; or, if that was later, the last Combine part of tokens without rows,
      for all of which the subscribers wait. The events do not say which rows a token has, nor which
      step posted what: so of these two only the latter is certain.
    * Combine of sums over slices: nothing. Which parts made a partial sum, no event says.
    """
    finder = _Finder(call)
    if call.planned_up_front:
        finder.run()
    return Causes(finder.cause, finder.certain)


def lead(call: CallTrace, causes: Causes) -> dict[tuple[int, int], int]:
    """By how many ns, at least, one rank's clock is behind another's: (ahead, behind) -> ns.

    Clocks differ where a part was claimed before its certain cause was stored.
    """
    found: dict[tuple[int, int], int] = {}
    parts, since = call.parts, causes.since(call.parts)
    early = causes.certain & (causes.part != NONE) & (parts["claimed"] < since)
    for index in numpy.flatnonzero(early):
        pair = (int(parts["rank"][causes.part[index]]), int(parts["rank"][index]))
        if pair[0] != pair[1]:
            found[pair] = max(found.get(pair, 0), int(since[index] - parts["claimed"][index]))
    return found


_NOTED_SUBSCRIBER = 0
"""The returns subscriber whose steps a trace has."""


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One of an expert's row tiles: how many rows it has, and its parts."""

    rows: int
    product0: Sequence[int]
    product1: Sequence[int]


class _Finder:
    """Finds causes, one kind of task after the other."""

    def __init__(self, call: CallTrace) -> None:
        self._ranks = call.ranks
        self._steps = call.steps
        self._column: dict[str, list[int]] = {
            name: call.parts[name].tolist() for name in call.parts.dtype.names or ()
        }
        self.cause = numpy.full(len(call.parts), NONE, numpy.int64)
        self.certain = numpy.ones(len(call.parts), numpy.bool_)

    def run(self) -> None:
        column = self._column
        by_rank: dict[tuple[int, int], list[int]] = defaultdict(list)
        by_tile: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, (rank, kind) in enumerate(zip(column["rank"], column["kind"], strict=True)):
            by_rank[rank, kind].append(index)
            if kind in (PRODUCT0, PRODUCT1):
                by_tile[rank, kind, column["place"][index]].append(index)
        tiles: dict[tuple[int, int], list[_Tile]] = defaultdict(list)  # of (rank, expert), in order
        for (rank, kind, number), parts in sorted(by_tile.items()):
            if kind == PRODUCT0:
                product1 = by_tile.get((rank, PRODUCT1, number), [])
                rows, expert = column["rows"][parts[0]], column["expert"][parts[0]]
                if expert < self._ranks[rank].received.shape[1]:  # else: of shared experts
                    tiles[rank, expert].append(_Tile(rows, parts, product1))
                self._set(product1, self._last_stored(parts))
        for rank in range(len(self._ranks)):
            self._after_route(rank, by_rank)
            if not any(by_rank[source, DISPATCH] for source in range(len(self._ranks))):
                continue  # tokens are read in place
            here = [
                self._after_arrival(source, rank, by_rank) for source in range(len(self._ranks))
            ]
            for expert in range(self._ranks[rank].received.shape[1]):
                self._after_rows(rank, expert, here, tiles[rank, expert])
        for rank in range(len(self._ranks)):
            self._after_returns(rank, by_rank[rank, COMBINE], tiles)

    def _set(self, parts: Sequence[int], cause: int, certain: bool = True) -> None:
        for index in parts:
            self.cause[index] = cause
            self.certain[index] = certain

    def _last_stored(self, parts: Sequence[int]) -> int:
        return max(parts, key=self._column["stored"].__getitem__, default=NONE)

    def _after_route(self, rank: int, by_rank: dict[tuple[int, int], list[int]]) -> None:
        last = self._last_stored(by_rank[rank, ROUTE])
        self._set(by_rank[rank, DISPATCH], last)
        self._set(by_rank[rank, PRODUCT0], last)  # but for those that wait for rows, below
        place = self._column["place"]
        self._set([i for i in by_rank[rank, COMBINE] if place[i] == NONE], last)

    def _after_arrival(
        self, source: int, rank: int, by_rank: dict[tuple[int, int], list[int]]
    ) -> list[int]:
        """Finds the causes of a rank's Replicate parts of a source's chunks. Returns for each of
        these chunks the part with which its rows were here.
        """
        column = self._column
        arrived = self._in_order(
            [i for i in by_rank[source, DISPATCH] if column["peer"][i] == rank]
        )
        copies = [i for i in by_rank[rank, REPLICATE] if column["peer"][i] == source]
        for index in copies:
            chunk = column["place"][index]
            if chunk < len(arrived):
                self._set([index], arrived[chunk])
        copied = {column["place"][index]: index for index in copies}
        first_copied = min(copied, default=len(arrived))  # those before bring all of their rows
        here = arrived[:first_copied]
        while len(here) in copied:
            here.append(self._last_stored([*here[-1:], copied[len(here)]]))
        return here

    def _in_order(self, parts: Sequence[int]) -> list[int]:
        """The part, for each chunk of these parts, with which this chunk and all before it were
        done.
        """
        column = self._column
        by_chunk = {
            chunk: i
            for i in parts
            for chunk in range(column["place"][i], column["place"][i] + column["rows"][i])
        }
        done: list[int] = []
        for chunk in range(len(by_chunk)):
            if chunk not in by_chunk:
                break
            done.append(self._last_stored([*done[-1:], by_chunk[chunk]]))
        return done

    def _after_rows(
        self, rank: int, expert: int, here: Sequence[Sequence[int]], tiles: Sequence[_Tile]
    ) -> None:
        trace = self._ranks[rank]
        arrivals: list[tuple[int, int, int]] = []  # when rows were here, by which part; how many
        for source, parts in enumerate(here):
            begin, end = _range(trace.received[source], expert)
            for chunk in range(begin // trace.chunk_rows, -(-end // trace.chunk_rows)):
                first_row = chunk * trace.chunk_rows
                rows = min(end, first_row + trace.chunk_rows) - max(begin, first_row)
                if chunk >= len(parts):
                    return
                if rows > 0:
                    arrivals.append((self._column["stored"][parts[chunk]], parts[chunk], rows))
        arrivals.sort()
        rows_here = numpy.cumsum([rows for _, _, rows in arrivals])
        rows_taken = numpy.cumsum([tile.rows for tile in tiles])
        for tile, place in zip(tiles, numpy.searchsorted(rows_here, rows_taken), strict=True):
            if any(self._column["awaited"][part] for part in tile.product0):
                began = min(self._column["claimed"][part] for part in tile.product0)
                known = [part for stored, part, _ in arrivals if stored <= began]
                self._set(tile.product0, known[-1] if known else arrivals[0][1], certain=False)
            elif place < len(arrivals):
                self._set(tile.product0, arrivals[place][1])

    def _after_returns(
        self, rank: int, combines: Sequence[int], tiles: dict[tuple[int, int], list[_Tile]]
    ) -> None:
        steps = self._steps[(self._steps["rank"] == rank) & (self._steps["kind"] == RETURNS)]
        trace = self._ranks[rank]
        returned = self._last_parts(rank, tiles)
        incomplete = trace.dropped[trace.processors + RETURNS - len(TASK_KINDS)]
        if incomplete or not len(steps) or not returned:
            return
        column = self._column
        unsent = self._last_stored([i for i in combines if column["place"][i] == NONE])
        first_stored = min(returned, key=column["stored"].__getitem__)
        visible = [column["visible"][i] for i in returned]
        # For tokens that sent no row, `part` is a block of Route, which may be as large as a sum's.
        complete = [
            i
            for i in combines
            if column["place"][i] != NONE and column["part"][i] < _runtime.TOKENS_OF_SUMS
        ]
        # Each subscriber posts parts in the order of its places, so a claim of a later one bounds
        # this one.
        latest = int(numpy.iinfo(numpy.int64).max)
        claimed: dict[int, int] = defaultdict(lambda: latest)
        for index in sorted(complete, key=column["place"].__getitem__, reverse=True):
            subscriber = column["part"][index]
            if column["awaited"][index]:
                subscriber = NONE  # its processor has seen the credits itself
                claimed[subscriber] = latest
            claimed[subscriber] = min(claimed[subscriber], column["claimed"][index])
            began = claimed[subscriber]
            if subscriber == _NOTED_SUBSCRIBER:
                # Its clock is read after it has posted: if no step had ended, it was the first.
                step = max(0, int(numpy.searchsorted(steps["end"], began, "right")) - 1)
                began = int(steps["begin"][step])
            before = int(numpy.searchsorted(visible, began, "right"))
            likely = returned[before - 1] if before else first_stored
            cause = self._last_stored([i for i in (likely, unsent) if i != NONE])
            self._set([index], cause, certain=cause == unsent)

    def _last_parts(self, rank: int, tiles: dict[tuple[int, int], list[_Tile]]) -> list[int]:
        """The last Product1 part of each tile that may hold rows of a rank, in the order in which
        these were visible: it tells the rank that its rows are back.
        """
        visible = self._column["visible"].__getitem__
        last = [
            max(tile.product1, key=visible)
            for (owner, expert), held in tiles.items()
            for tile in held
            if tile.product1 and self._ranks[owner].received[rank, expert] > 0
        ]
        return sorted(last, key=visible)


def _range(received: Numbers, expert: int) -> tuple[int, int]:
    """Where an expert's rows begin and end among those of a source."""
    begin = int(received[:expert].sum())
    return begin, begin + int(received[expert])
