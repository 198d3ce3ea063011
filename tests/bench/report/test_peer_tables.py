# SPDX-License-Identifier: Apache-2.0
"""The tables of moeos beside a peer's kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import peer_tables, report
from tests.processes import ROOT

RESULTS = sorted((ROOT / "results").rglob(f"{peer_tables.PREFIX}*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
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
    ratio = by_call[peer_tables.OURS] / by_call[peer_tables.PEER]
    (row,) = [row for row in sections[0].rows if row[0] == "8192, Zipf 1.2"]
    assert row[-3] == f"{ratio:.2f}"


def test_a_call_that_a_contestant_did_not_make_is_not_passed_over() -> None:
    results = json.loads(RESULTS[0].read_text())
    results["rows"] = [row for row in results["rows"] if row["who"] != peer_tables.PEER]
    with pytest.raises(KeyError, match=peer_tables.PEER):
        report.sections(results)
