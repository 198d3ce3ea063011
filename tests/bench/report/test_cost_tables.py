# SPDX-License-Identifier: Apache-2.0
"""The table of what deadlines and a trace cost."""

from __future__ import annotations

import json

from bench.report import cost_tables
from tests.processes import ROOT

RESULTS = ROOT / "results" / "costs-1.json"


def test_a_cost_is_a_share_of_the_call_without() -> None:
    results = json.loads(RESULTS.read_text())
    times = {"unwatched": 100e-6, "plain": 101e-6, "traced": 103.02e-6}
    case = {
        "layer": "small",
        "tokens": 8,
        "watch": 0.01,
        "trace": 0.02,
        **{each: {"median": time, "quartiles": [time, time]} for each, time in times.items()},
    }
    (section,) = cost_tables.sections({**results, "results": [case]})
    (row,) = section.rows
    assert row[0] == "small, 8"
    assert row[1] == "100 µs (100 µs to 100 µs)"
    assert row[4:] == ["+1.0 %", "+2.0 %"]


def test_the_shares_in_the_results_follow_from_their_times() -> None:
    for case in json.loads(RESULTS.read_text())["results"]:
        plain, unwatched, traced = (case[k]["median"] for k in ("plain", "unwatched", "traced"))
        assert case["watch"] == plain / unwatched - 1
        assert case["trace"] == traced / plain - 1
