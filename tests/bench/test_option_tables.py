# SPDX-License-Identifier: Apache-2.0
"""The tables of options, of moeos beside a peer, and of what deadlines and a trace cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import option_tables, report
from tests.processes import ROOT

FOLDER = ROOT / "results"
PEERS = sorted(FOLDER.glob(f"{option_tables.PEER_PREFIX}*.json"))
COSTS = json.loads((FOLDER / "costs-1.json").read_text())


def test_contestants_with_tokens_in_fp8_have_a_table_beside_the_first_of_all() -> None:
    times = {"plain": 1e-6, "mxfp4": 2e-6, "mxfp4 by FP8": 3e-6}
    seconds = {name: {"median": median} for name, median in times.items()}
    results = {"layers": {"a": {"results": [{"tokens": 8, "seconds": seconds}]}}}
    found = [(section.columns, section.rows) for section in option_tables.sections(results)]
    assert found == [
        (["plain", "mxfp4"], [["8", "1 µs", "2 µs"]]),
        (["plain", "mxfp4 by FP8"], [["8", "1 µs", "3 µs"]]),
    ]


@pytest.mark.parametrize("file", PEERS, ids=lambda file: file.stem)
def test_every_call_has_all_contestants_and_their_ratio(file: Path) -> None:
    results = json.loads(file.read_text())
    sections = report.sections(results)
    calls = {(row["shape"], row["tokens"], row["zipf"]) for row in results["rows"]}
    assert sum(len(section.rows) for section in sections) == len(calls) > 0
    for section in sections:
        assert all(len(row) == 1 + len(section.columns) for row in section.rows)
    by_call = {
        row["who"]: row["us"]
        for row in results["rows"]
        if (row["shape"], row["tokens"], row["zipf"]) == ("qwen3-30b", 8192, 1.2)
    }
    ratio = by_call[option_tables.OURS] / by_call[option_tables.PEER]
    (row,) = [row for row in sections[0].rows if row[0] == "8192, Zipf 1.2"]
    assert row[-3] == f"{ratio:.2f}"
    results["rows"] = [row for row in results["rows"] if row["who"] != option_tables.PEER]
    with pytest.raises(KeyError, match=option_tables.PEER):  # a call that is not there
        report.sections(results)


def test_a_cost_is_a_share_of_the_call_without() -> None:
    times = {"unwatched": 100e-6, "plain": 101e-6, "traced": 103.02e-6}
    case = {
        "layer": "small",
        "tokens": 8,
        "watch": 0.01,
        "trace": 0.02,
        **{each: {"median": time, "quartiles": [time, time]} for each, time in times.items()},
    }
    (section,) = option_tables.cost_sections({**COSTS, "results": [case]})
    (row,) = section.rows
    assert row[0] == "small, 8"
    assert row[1] == "100 µs (100 µs to 100 µs)"
    assert row[4:] == ["+1.0 %", "+2.0 %"]
    for case in COSTS["results"]:
        plain, unwatched, traced = (case[k]["median"] for k in ("plain", "unwatched", "traced"))
        assert case["watch"] == plain / unwatched - 1
        assert case["trace"] == traced / plain - 1
