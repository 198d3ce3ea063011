# SPDX-License-Identifier: Apache-2.0
"""What a run prints and writes, from what its ranks gathered on rank 0."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from moeos.cli.check import CheckResult
from moeos.cli.shared import output
from moeos.cli.totals import Totals
from moeos.partition.slicing import Slicing


@dataclasses.dataclass(frozen=True)
class RankReport:
    """One rank's part; `check` is None where nothing was checked."""

    totals: Totals
    check: CheckResult | None


def rank_table(reports: Sequence[RankReport], slicing: Slicing) -> Table:
    """A column for each rank, with sums over all calls."""
    everyone = [report.totals for report in reports]
    ranks = range(len(everyone))
    made = output.table(*(f"rank {rank}" for rank in ranks))

    def add(label: str, values: Sequence[float]) -> None:
        made.add_row(label, *map(output.count, values))

    add("tokens", [sum(totals.tokens) for totals in everyone])
    made.add_section()
    for peer in ranks:
        add(f"pairs sent to rank {peer}", [totals.pairs_sent[peer] for totals in everyone])
    made.add_section()
    for peer in ranks:
        add(f"pairs received from rank {peer}", [t.pairs_received[peer] for t in everyone])
    made.add_section()
    for kind in everyone[0].tasks:
        add(f"{kind} tasks", [totals.tasks[kind] for totals in everyone])
    made.add_section()
    add("row bytes to peers", [totals.row_bytes_to_peers for totals in everyone])
    add("count bytes to peers", [totals.count_bytes_to_peers for totals in everyone])
    add("flag bytes to peers", [totals.flag_bytes_to_peers for totals in everyone])
    add("padding rows", [totals.padding_rows for totals in everyone])
    add("dropped pairs", [totals.drops for totals in everyone])
    made.add_section()
    pairs = _pairs(reports, slicing)
    hottest = [totals.hottest for totals in everyone]
    made.add_row("hottest expert", *(str(expert) if most else "-" for expert, most in hottest))
    made.add_row("its share of all pairs", *(_percent(count, pairs) for _, count in hottest))
    made.add_section()
    made.add_row("time of a call, median", *(output.duration(t.median_seconds) for t in everyone))
    made.add_row("longest", *(output.duration(max(t.seconds)) for t in everyone))
    return made


def balance_line(reports: Sequence[RankReport], slicing: Slicing) -> str:
    """How far the hottest expert is from an even share."""
    holders = [report.totals for report in _first_slices(reports, slicing)]
    pairs = _pairs(reports, slicing)
    experts = sum(len(totals.expert_pairs) for totals in holders)
    expert, most = max((totals.hottest for totals in holders), key=lambda hottest: hottest[1])
    return (
        f"hottest of {experts} experts: {expert}, with {_percent(most, pairs)} of {pairs} pairs "
        f"(an even share is {100 / experts:.1f} %)"
    )


def time_line(reports: Sequence[RankReport], slicing: Slicing) -> str:
    """How long calls took, by the slowest rank of each call."""
    seconds = [max(times) for times in zip(*(r.totals.seconds for r in reports), strict=True)]
    tokens = sum(sum(report.totals.tokens) for report in _own_tokens(reports, slicing))
    median = output.duration(statistics.median(seconds))
    return (
        f"time of a call: {median} (median of {len(seconds)}, slowest rank), "
        f"{output.count(tokens / sum(seconds))} tokens/s"
    )


def largest_error(reports: Sequence[RankReport]) -> float:
    """The largest error of all ranks and calls."""
    return max(error for report in reports if report.check for error in report.check.errors)


def check_line(reports: Sequence[RankReport], slicing: Slicing) -> str:
    """How many tokens were compared with the reference."""
    checks = [report.check for report in _own_tokens(reports, slicing) if report.check]
    checked, tokens = sum(c.checked for c in checks), sum(c.tokens for c in checks)
    near_ties = sum(check.near_ties for check in checks)
    sample = "" if checked + near_ties == tokens else " (evenly spaced: all would take long)"
    left_out = f"; {near_ties} left out, experts tied within float32" if near_ties else ""
    return (
        f"checked {output.count(checked)} of {output.count(tokens)} tokens against the float64 "
        f"reference{sample}{left_out}"
    )


def error_line(error: float, tolerance: float) -> str:
    """The line that says whether the layer is right."""
    return f"max relative error {error:.1e} (tolerance {tolerance:.1e})"


def as_json(reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    """Each rank's numbers, sums and those of each call."""
    ranks: list[dict[str, Any]] = []
    for rank, report in enumerate(reports):
        entry = {"rank": rank, **dataclasses.asdict(report.totals)}
        entry["experts"] = list(report.totals.experts)
        entry["bytes_to_peers"] = report.totals.bytes_to_peers
        entry["median_seconds"] = report.totals.median_seconds
        expert, pairs = report.totals.hottest
        entry["hottest_expert"] = {"expert": expert, "pairs": pairs}
        entry["check"] = None if report.check is None else dataclasses.asdict(report.check)
        ranks.append(entry)
    return ranks


def _first_slices(reports: Sequence[RankReport], slicing: Slicing) -> list[RankReport]:
    """Reports of ranks that together hold each expert once: each slice computes all its pairs."""
    return [report for rank, report in enumerate(reports) if slicing.slice_of(rank) == 0]


def _own_tokens(reports: Sequence[RankReport], slicing: Slicing) -> Sequence[RankReport]:
    """The reports of ranks that together have each token once."""
    return reports if slicing.apart else _first_slices(reports, slicing)


def _pairs(reports: Sequence[RankReport], slicing: Slicing) -> int:
    """Pairs of a token and an expert, in all calls."""
    return sum(sum(report.totals.expert_pairs) for report in _first_slices(reports, slicing))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
