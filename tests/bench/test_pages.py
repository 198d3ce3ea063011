# SPDX-License-Identifier: Apache-2.0
"""Every table and plot of a page is made from what lies in results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report import evaluation_tables, option_tables, plots, report
from moeos.cli import reliability_tables
from tests.processes import ROOT

DOCS, RESULTS = ROOT / "docs", ROOT / "results"
STRAGGLER = (DOCS / "straggler.md").read_text()
FOUND = {
    file: found
    for folder in (".", "evaluation", "straggler")
    for file in sorted((RESULTS / folder).glob("*.json"))
    if report.is_known(found := report.load(file))
}


def page_of(file: Path) -> Path:
    if file.parent != RESULTS:
        return DOCS / f"{file.parent.name}.md"
    reliability = (*reliability_tables.NAMES, option_tables.COSTS)
    return DOCS / ("reliability.md" if file.stem in reliability else "performance.md")


def digests(found: dict[str, Any]) -> dict[str, str]:
    """The digests of the plots of some results, by the plots' files."""
    if report.of_gpus(found):
        return {
            f"{plots.FOLDER}/{plots.shape_file(found, shape)}": plots.shape_digest(found, shape)
            for shape in found["shapes"]
            if plots.is_drawn(found, shape)
        }
    if report.of_evaluation(found):
        return {plots.evaluation_file(found): plots.digest(plots.evaluation_series(found))}
    picture = plots.straggler_file(found)  # where the page shows it
    if found["benchmark"].startswith("straggler-") and picture in STRAGGLER:
        return {picture: plots.straggler_digest(found)}
    return {}


def test_there_are_results_of_every_kind() -> None:
    kinds = ("gpu-", "fp8-2", "evaluation-", "straggler-", "tensor-", "training-", "topk", "twin")
    assert all(any(file.stem.startswith(kind) for file in FOUND) for kind in kinds)


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_the_tables_and_plots_of_a_page_are_those_of_the_results(file: Path) -> None:
    found, texts = FOUND[file], report.pages(page_of(file))
    assert found["benchmark"] == file.stem
    assert report.put(texts, file.stem, report.markdown(found), file.parent) == texts
    for name, digest in digests(found).items():
        assert digest in (file.parent / name).read_text(), f"{name}: draw it again"


def test_what_compares_results_is_of_the_results() -> None:
    texts = report.pages(DOCS / "performance.md")
    assert report.put(texts, report.SCALING, report.scaling(RESULTS), RESULTS) == texts
    assert report.put(texts, report.BARS, report.bars(RESULTS), RESULTS) == texts
    texts, folder = report.pages(DOCS / "evaluation.md"), RESULTS / "evaluation"
    like = report.load(folder / "evaluation-cuda-4.json")
    compared = report.table(report.evaluation_scaling(like, folder))
    assert report.put(texts, evaluation_tables.SCALING, compared, folder) == texts
    memory = report.table(evaluation_tables.memory())
    assert report.put(texts, evaluation_tables.MEMORY, memory, folder) == texts


def test_no_plot_is_of_results_that_are_not_there() -> None:
    drawn = {file.parent / name for file, found in FOUND.items() for name in digests(found)}
    assert set(RESULTS.rglob("*.svg")) == drawn
