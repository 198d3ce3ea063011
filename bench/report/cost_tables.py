# SPDX-License-Identifier: Apache-2.0
"""What the report says of `tests/gpu/costs.py`: what deadlines and a trace add to a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section

NAME = "costs-1"
"""What `python -m tests.gpu.costs` calls its results."""


def conditions(results: Mapping[str, Any]) -> str:
    """What was measured, on what and when, in one paragraph."""
    return (
        f"{results['device']}; {provenance.source(results['commit'])}. Medians of "
        f"{results['rounds']} interleaved rounds after {results['warm_up_rounds']} to warm up; "
        "in brackets the quartiles."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """The one table."""
    columns = ["no deadlines", "as it is", "with a trace", "deadlines add", "a trace adds"]
    rows = []
    for case in results["results"]:
        times = [_time(case[each]) for each in ("unwatched", "plain", "traced")]
        added = [f"{100 * case[each]:+.1f} %" for each in ("watch", "trace")]
        rows.append([f"{case['layer']}, {case['tokens']}", *times, *added])
    return [Section("layer, tokens", columns, rows)]


def _time(found: Mapping[str, Any]) -> str:
    low, high = (output.duration(seconds) for seconds in found["quartiles"])
    return f"{output.duration(found['median'])} ({low} to {high})"
