# SPDX-License-Identifier: Apache-2.0
"""What `moeos trace` prints and writes as its summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from moeos.cli import trace_amounts
from moeos.cli.shared import output
from moeos.cli.timeline import causes, chrome, summary
from moeos.cli.timeline.call import (
    DISPATCH,
    NONE,
    PHASES,
    ROUTE,
    CallTrace,
    actor_name,
    kind_name,
)
from moeos.cli.timeline.causes import Causes
from moeos.cli.timeline.summary import ChainLink
from moeos.cli.trace_amounts import Amount, scaled
from moeos.world.tracing import MAX_EVENTS, RankTrace

_NAMED_ACTORS = 4  # of those that dropped events
_INTERVALS = 10
_SHOWN = 0.005  # a share that is shown as 1 % or more


class Report:
    """The report of one call; `about` says what ran, as `moeos trace` notes it."""

    def __init__(self, call: CallTrace, found: Causes, about: Mapping[str, Any]) -> None:
        self._call = call
        self._about = about
        self._stages = summary.stages_of(call, found)
        self._found = [stage for stage in self._stages if stage.parts > 0]
        self._intervals = summary.intervals_of(call, _INTERVALS)
        self._ranks = summary.ranks_of(call)
        self._chain = summary.chain_of(call, found)
        self._leads = causes.lead(call, found)
        self._work = trace_amounts.work_of(call, self._stages, about)
        self._to_peers = trace_amounts.to_peers_of(call, self._stages, about)
        self._weights = trace_amounts.weights_of(call, about)

    def title(self) -> str:
        """A line that says what ran."""
        what = self._about.get("what", "a call")
        return f"{what}: {_time(self._call.length)} from the first event to the last"

    def warnings(self) -> Iterator[str]:
        """The defects of the trace, a sentence each."""
        for trace in self._call.ranks:
            if any(trace.dropped):
                yield _loss(trace)
        for (ahead, behind), lead in self._leads.items():
            yield (
                f"rank {behind} used what rank {ahead} had not stored yet, by their clocks: these "
                f"differ by {_time(lead)} or more"
            )

    def print(self) -> None:
        """The tables and the chain, on stdout."""
        print(f"{self.title()}\n", flush=True)
        output.tables(len(self._found)).print(self._stage_table())
        if self._intervals:
            print("\nwhat all processors did, in %, in the tenths of the call from:", flush=True)
            output.tables(len(self._intervals)).print(self._interval_table())
        print("\neach rank, from the call's first event on:", flush=True)
        output.tables(len(self._ranks)).print(self._rank_table())
        if self._chain:
            print("\nwhat the last Combine waited for, backwards:")
            print("\n".join(self._chain_lines()), flush=True)
        elif not self._call.planned_up_front:
            print("\nevents are missing: what waited for what is not known", flush=True)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON; times are in ns of the call's clock."""
        return {
            **self._about,
            "length_ns": self._call.length,
            "dropped_events": [sum(trace.dropped) for trace in self._call.ranks],
            "stages": [dataclasses.asdict(stage) for stage in self._stages],
            "work": {kind: dataclasses.asdict(done) for kind, done in self._work.items()},
            "to_peers": {kind: dataclasses.asdict(done) for kind, done in self._to_peers.items()},
            "weights": {kind: dataclasses.asdict(of) for kind, of in self._weights.items()},
            "intervals": [dataclasses.asdict(interval) for interval in self._intervals],
            "by_rank": [dataclasses.asdict(rank) for rank in self._ranks],
            "chain": [self._link_as_json(link) for link in self._chain],
        }

    def _stage_table(self) -> Table:
        stages = self._found
        made = output.table(*(stage.kind for stage in stages))
        made.add_row("parts", *(output.count(stage.parts) for stage in stages))
        made.add_row("first claimed", *(_time(stage.first_claimed) for stage in stages))
        made.add_row("last visible", *(_time(stage.last_visible) for stage in stages))
        made.add_section()
        made.add_row("work, all processors", *(_time(stage.work) for stage in stages))
        made.add_row("share of their time", *(_percent(stage.share) for stage in stages))
        made.add_section()
        self._add_amounts(made, "products, rows", self._work)
        self._add_amounts(made, "rows to peers", self._to_peers)
        self._add_weights(made)
        made.add_row("a part's wait, mean", *(_time(stage.waited) for stage in stages))
        for phase in PHASES:
            made.add_row(phase, *(_time(stage.phases.get(phase)) for stage in stages))
        return made

    def _add_amounts(self, made: Table, what: str, amounts: Mapping[str, Amount]) -> None:
        if not amounts:
            return
        found = [amounts.get(stage.kind) for stage in self._found]
        made.add_row(what, *("" if one is None else one.text() for one in found))
        made.add_row("of a rank", *("" if one is None else one.rate_text() for one in found))
        if "H200" in str(self._about.get("what")):
            shares = ("" if one is None else one.share_text() for one in found)
            made.add_row("of what an H200 can", *shares)
        made.add_section()

    def _add_weights(self, made: Table) -> None:
        if not self._weights:
            return
        found = [self._weights.get(stage.kind) for stage in self._found]
        cache = scaled(trace_amounts.CACHE_BYTES, "B")
        for what, name in (
            ("weights, once", "once"),
            ("asked for by parts", "asked"),
            (f"read, cache of {cache}", "read"),
        ):
            sizes = (None if of is None else getattr(of, name) for of in found)
            made.add_row(what, *("" if size is None else scaled(size, "B") for size in sizes))
        made.add_section()

    def _interval_table(self) -> Table:
        intervals = self._intervals
        made = output.table(*(_time(interval.begin) for interval in intervals))
        for kind in (stage.kind for stage in self._stages):
            for what, shares in (
                (kind, [interval.working[kind] for interval in intervals]),
                (f"{kind}, storing", [interval.storing[kind] for interval in intervals]),
            ):
                if max(shares) >= _SHOWN:
                    made.add_row(what, *(f"{100 * share:.0f}" for share in shares))
        made.add_section()
        made.add_row("none but couriers", *(f"{100 * one.rest:.0f}" for one in intervals))
        return made

    def _rank_table(self) -> Table:
        ranks = self._ranks
        made = output.table(*(f"rank {number}" for number in range(len(ranks))))
        made.add_row("processors", *(output.count(rank.processors) for rank in ranks))
        made.add_row("parts", *(output.count(rank.parts) for rank in ranks))
        made.add_row("first claimed", *(_time(rank.first_claimed) for rank in ranks))
        made.add_row("last visible", *(_time(rank.last_visible) for rank in ranks))
        made.add_row("at work", *(_percent(rank.share) for rank in ranks))
        return made

    def _chain_lines(self) -> Iterator[str]:
        parts = self._call.parts
        for link in self._chain:
            part = parts[link.part]
            claimed, stored = int(part["claimed"]), int(part["stored"])
            line = f"{_time(claimed):>9}  {self._named(link)}, {_time(stored - claimed)}"
            if link.waited is not None and link.waited >= 0:
                line += f"; {_time(link.waited)} after the next line's results"
                if link.busy is not None:
                    line += f", while {100 * link.busy:.0f} % were at work"
                if not link.certain:
                    line += " (or those of another tile that may hold its rows)"
            yield line
        longest = max(self._chain, key=lambda link: link.idle)
        cause = self._chain[self._chain.index(longest) + 1 :][:1]
        if longest.idle > 0 and cause:
            rank = int(parts[longest.part]["rank"])
            yield (
                f"the longest idle time on the way: {_time(longest.idle)} on rank {rank}, before "
                f"{self._named(longest)}, which waited for {self._named(cause[0])}"
            )

    def _named(self, link: ChainLink) -> str:
        part = self._call.parts[link.part]
        kind, rank = int(part["kind"]), int(part["rank"])
        of = chrome.arguments(self._call, part)
        if kind == ROUTE:
            what = f"block {of['block']}"
        elif "tile" in of:
            what = f"tile {of['tile']} of expert {of['expert']} ({of['rows']} rows)"
        elif "chunk" in of:
            last = of["chunk"] + of["chunks"] - 1
            chunks = f"chunk {last}" if of["chunks"] == 1 else f"chunks {of['chunk']} to {last}"
            low, high = of["first_expert"], of["last_expert"]
            experts = f"expert {low}" if low == high else f"experts {low} to {high}"
            way = "to" if kind == DISPATCH else "from"
            what = f"{chunks} {way} rank {of['peer']} ({experts})"
        elif part["place"] == NONE:
            what = f"tokens without rows, block {of['block']}"
        else:
            what = (
                f"{output.plural(of['tokens'], 'token')}, those complete from place "
                f"{of['first_complete']} on"
            )
        return f"rank {rank}'s {kind_name(kind)} of {what}"

    def _link_as_json(self, link: ChainLink) -> dict[str, Any]:
        part = self._call.parts[link.part]
        return {
            "kind": kind_name(int(part["kind"])),
            "rank": int(part["rank"]),
            "processor": int(part["processor"]),
            **chrome.arguments(self._call, part),
            "claimed_ns": int(part["claimed"]),
            "stored_ns": int(part["stored"]),
            "waited_ns": link.waited,
            "busy_share": link.busy,
            "idle_ns": link.idle,
            "certain": link.certain,
        }


def _loss(trace: RankTrace) -> str:
    lossy = [actor for actor, dropped in enumerate(trace.dropped) if dropped]
    most = max(len(trace.events[actor]) + trace.dropped[actor] for actor in lossy)
    named = ", ".join(f"{actor_name(trace, a)} {trace.dropped[a]}" for a in lossy[:_NAMED_ACTORS])
    others = len(lossy) - _NAMED_ACTORS
    more = f" and {output.plural(others, 'more actor')}" if others > 0 else ""
    advice = f"give --events {1 << math.ceil(math.log2(most))}"
    if most > MAX_EVENTS:
        advice = f"--events {MAX_EVENTS} is the most: trace fewer tokens"
    return (
        f"the trace of rank {trace.rank} lacks {output.plural(sum(trace.dropped), 'event')} for "
        f"which there was no room ({named}{more}); {advice}"
    )


def _time(ns: float | None) -> str:
    return "-" if ns is None else output.duration(ns / 1e9)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
