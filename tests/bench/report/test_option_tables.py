# SPDX-License-Identifier: Apache-2.0
"""The tables of what a layer's options cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import option_tables, report
from tests.processes import ROOT

RESULTS = sorted(
    file for file in (ROOT / "results").glob("*.json") if option_tables.is_one(file.stem)
)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_each_layer_has_all_tokens_and_contestants(file: Path) -> None:
    results = json.loads(file.read_text())
    sections = report.sections(results)
    assert results["layers"]
    for layer, of_layer in results["layers"].items():
        mine = [section for section in sections if section.title == f"{layer}, tokens"]
        cases = of_layer["results"]
        columns = {name for section in mine for name in section.columns}
        assert columns == set(cases[0]["seconds"])
        for section in mine:
            assert [row[0] for row in section.rows] == [str(case["tokens"]) for case in cases]
            assert {len(row) for row in section.rows} == {1 + len(section.columns)}


def test_contestants_with_tokens_in_fp8_have_a_table_beside_the_first_of_all() -> None:
    times = {"plain": 1e-6, "mxfp4": 2e-6, "mxfp4 by FP8": 3e-6}
    seconds = {name: {"median": median} for name, median in times.items()}
    results = {"layers": {"a": {"results": [{"tokens": 8, "seconds": seconds}]}}}
    found = [(section.columns, section.rows) for section in option_tables.sections(results)]
    assert found == [
        (["plain", "mxfp4"], [["8", "1 µs", "2 µs"]]),
        (["plain", "mxfp4 by FP8"], [["8", "1 µs", "3 µs"]]),
    ]
