# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/straggler.md: they and the plots are of the results that lie beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report import plots, report, straggler_tables
from tests.processes import ROOT

RESULTS = sorted((ROOT / "results" / "straggler").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_page_shows_the_results_and_their_plot(file: Path) -> None:
    results = report.load(file)
    assert results["benchmark"] == file.stem
    page = (ROOT / "docs" / "straggler.md").read_text()
    assert report.markdown(results) in page
    picture = file.parent / plots.straggler_file(results)
    assert plots.straggler_digest(results) in picture.read_text()


def test_there_are_results_to_show() -> None:
    assert len(RESULTS) >= 3


def test_percentiles_lie_between_the_values() -> None:
    assert straggler_tables.percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert straggler_tables.percentile([1.0, 2.0], 75) == 1.75
    assert straggler_tables.percentile([5.0, 5.0, 5.0], 99) == 5.0
