# SPDX-License-Identifier: Apache-2.0
"""The log in docs/log: an entry has its parts, the index has each entry, what is named exists.

This file knows nothing of what an entry says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT

LOG = ROOT / "docs" / "log"
ENTRIES = sorted(LOG.glob("[0-9]*.md"))

PARTS = ["Prediction", "Change", "Result", "Learnt", "Files"]
MAY_LACK = {"Prediction", "Learnt"}

SOURCES = [
    file
    for folder in ("runtime", "kernels", "host", "launch")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in {".hpp", ".cuh", ".cu", ".cpp", ".def", ".py"}
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda file: file.stem)
def test_an_entry_has_its_parts(entry: Path) -> None:
    text = entry.read_text()
    assert re.match(r"# .+\n", text)
    found = re.findall(r"^## (.+)$", text, re.M)
    assert found == [part for part in PARTS if part in found]
    assert set(PARTS) - set(found) <= MAY_LACK


@pytest.mark.parametrize("page", [*ENTRIES, LOG / "README.md"], ids=lambda file: file.stem)
def test_what_an_entry_links_to_exists(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_entries_are_numbered_without_gaps() -> None:
    assert [entry.name[:5] for entry in ENTRIES] == [f"{n:04}-" for n in range(1, len(ENTRIES) + 1)]


def test_the_index_has_every_entry() -> None:
    rows = re.findall(
        r"^\| \[(\d{4})\]\((\S+\.md)\) \| (.+?) \| .+ \|$", (LOG / "README.md").read_text(), re.M
    )
    titles = {entry: entry.read_text().splitlines()[0].removeprefix("# ") for entry in ENTRIES}
    assert rows == [(entry.name[:4], entry.name, title) for entry, title in titles.items()]


def test_comments_name_entries_that_exist() -> None:
    texts = [file.read_text() for file in SOURCES]
    named = {name for text in texts for name in re.findall(r"docs/log/([\w-]+\.md)", text)}
    assert len(named) > 10
    assert named <= {entry.name for entry in ENTRIES}
