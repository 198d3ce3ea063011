# SPDX-License-Identifier: Apache-2.0
"""The report's command: tables go between markers of one page, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import report
from tests.processes import ROOT

RESULTS = ROOT / "results" / "twin.json"
PAGE = ROOT / "docs" / "performance.md"

EMPTY = "# Log\n<!-- benchmark twin -->\n<!-- end of benchmark twin -->\nafter\n"


@pytest.fixture
def results() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


def test_the_command_writes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY)
    for _ in range(2):  # a second time replaces the first
        report.execute(RESULTS, page)
        lines = page.read_text().splitlines()
        assert lines[:2] == ["# Log", "<!-- benchmark twin -->"]
        assert lines[-2:] == ["<!-- end of benchmark twin -->", "after"]
        assert sum(line.startswith("| --- |") for line in lines) == 3


def test_the_folder_of_a_document_has_its_long_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Log\n")
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "twin.md").write_text(EMPTY)
    report.execute(RESULTS, page)
    assert page.read_text() == "# Log\n"
    assert "| --- |" in (folder / "twin.md").read_text()


def test_a_picture_is_found_from_where_the_page_lies(tmp_path: Path) -> None:
    texts = {tmp_path / "page.md": "", tmp_path / "page" / "twin.md": EMPTY}
    written = report.put(texts, "twin", "![a](plots/a.svg), x[0](1)\n", tmp_path / "results")
    assert "![a](../results/plots/a.svg), x[0](1)" in written[tmp_path / "page" / "twin.md"]


def test_two_pages_with_the_same_markers_are_refused(tmp_path: Path) -> None:
    texts = {tmp_path / "page.md": EMPTY, tmp_path / "page" / "twin.md": EMPTY}
    with pytest.raises(ValueError, match=r"only one of .*page\.md, .*twin\.md"):
        report.put(texts, "twin", "", tmp_path)


@pytest.mark.parametrize("text", ["", "<!-- benchmark twin -->\n", EMPTY + EMPTY])
def test_a_page_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="the document must have the lines"):
        report.execute(RESULTS, page)
    assert page.read_text() == text


def test_a_file_that_no_benchmark_wrote_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"benchmark": "twin"}')
    with pytest.raises(ValueError, match=r"other\.json: not the results of a benchmark"):
        report.execute(tmp_path / "other.json", PAGE)


def test_a_missed_bar_says_so(results: dict[str, Any]) -> None:
    results["bars"]["mpirun_ratio"] |= {"value": 3.5, "met": False}
    results["bars"]["virtual_ratio"] |= {"value": 2.5, "met": True}
    lines = report.markdown(results).splitlines()
    processes, virtual = (
        next(line for line in lines if line.startswith(f"| 4 {name}"))
        for name in ("ranks under mpirun", "virtual ranks")
    )
    assert "at most 3: missed" in processes
    assert "at most 3: met" in virtual


def test_stdout_has_the_same_numbers(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report.print_tables(results)
    printed = capsys.readouterr().out
    for section in report.sections(results):
        for row in section.rows:
            line = next(line for line in printed.splitlines() if f"│ {row[0]} " in line)
            assert [cell.strip() for cell in line.strip("│").split("│")] == list(row)
