# SPDX-License-Identifier: Apache-2.0
"""results/README.md has every file of results/ in a table, with pages that show it.

This file knows nothing of what the results say.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.processes import ROOT

RESULTS = ROOT / "results"
INDEX = RESULTS / "README.md"
FILES = sorted(
    str(file.relative_to(RESULTS))
    for file in RESULTS.rglob("*")
    if file.is_file() and file != INDEX
)
ROWS = re.findall(r"^\| (`.+?) \| (?:.*\| )?(\[.+\)) \|$", INDEX.read_text(), re.M)


def _patterns(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_results_are_found() -> None:
    assert len(FILES) > 50
    assert len(ROWS) > 20


def test_every_file_stands_in_one_row() -> None:
    patterns = [pattern for cell, _ in ROWS for pattern in _patterns(cell)]
    counts = {file: sum(fnmatch(file, pattern) for pattern in patterns) for file in FILES}
    assert {file: count for file, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize(("cell", "links"), ROWS, ids=[cell for cell, _ in ROWS])
def test_a_row_names_files_and_the_pages_that_show_them(cell: str, links: str) -> None:
    for pattern in _patterns(cell):
        assert any(fnmatch(file, pattern) for file in FILES), pattern
    for link in re.findall(r"\]\(([^)]+)\)", links):
        text = (RESULTS / link).read_text()
        for pattern in _patterns(cell):
            name = re.escape(Path(pattern).stem).replace(r"\*", r"[\w-]+")
            assert re.search(rf"/{name}\.\w+\)|<!-- benchmark {name} -->", text), pattern
