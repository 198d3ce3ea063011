# SPDX-License-Identifier: Apache-2.0
"""What tables of all results share: where results come from (`bench.study` says it), and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section

Case = Mapping[str, Any]


def first_run(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the first start of the ranks; earlier studies had it among their fields."""
    runs = results.get("runs")
    first: Mapping[str, Any] = runs[0] if runs else results
    return first


def source(results: Mapping[str, Any]) -> str:
    """The commit in words."""
    return provenance.source(results["commit"])


def rounds(results: Mapping[str, Any]) -> str:
    """How often contestants ran, in words."""
    return f"{results['rounds']} rounds after {results['warm_up_rounds']} to warm up"


def median(case: Mapping[str, Any] | None, name: str, times: str = "times") -> str:
    """A contestant's median time in a case; "" where it has none."""
    if case is None or name not in case[times]:
        return ""
    return output.duration(case[times][name]["median"])


def quartiles(timing: Mapping[str, Any]) -> str:
    """The quartiles of a contestant's times, in words."""
    low, high = timing["quartiles"]
    return f"{output.duration(low)} to {output.duration(high)}"


def table(
    title: str,
    cases: Iterable[Case],
    label: Callable[[Case], str],
    columns: Mapping[str, Callable[[Case], str]],
    heading: str = "",
) -> Section:
    """A table with a row for each case: its label, and what each column says of it."""
    rows = [[label(case), *(cell(case) for cell in columns.values())] for case in cases]
    return Section(title, list(columns), rows, heading)
