# SPDX-License-Identifier: Apache-2.0
"""The tables of what a layer's options cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeos.bench.report import option_tables, report
from tests.processes import ROOT

RESULTS = sorted(
    file for file in (ROOT / "results").glob("*.json") if option_tables.is_one(file.stem)
)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_each_layer_has_a_table_of_tokens_by_contestants(file: Path) -> None:
    results = json.loads(file.read_text())
    sections = report.sections(results)
    assert len(sections) == len(results["layers"]) > 0
    for section, of_layer in zip(sections, results["layers"].values(), strict=True):
        assert len(section.rows) == len(of_layer["results"])
        for row, case in zip(section.rows, of_layer["results"], strict=True):
            assert row[0] == str(case["tokens"])
            assert len(row) == 1 + len(case["seconds"]) == 1 + len(section.columns)
