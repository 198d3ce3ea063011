# SPDX-License-Identifier: Apache-2.0
"""What docs/lessons.md names is in docs/log.

This file knows nothing of what either says.
"""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT

LOG = ROOT / "docs/log"
FILES = sorted(LOG.glob("[0-9]*.md"))


def _entries() -> set[str]:
    """What the log's entries are called: their titles, and the bold words in them."""
    texts = [file.read_text() for file in FILES]
    bold = {name for text in texts for name in re.findall(r"\*\*(.+?)\*\*", text, re.S)}
    titles = {text.splitlines()[0].removeprefix("# ") for text in texts}
    return titles | {" ".join(name.split()).rstrip(".") for name in bold}


def _named() -> set[str]:
    """What the lessons name: in quotation marks and brackets, or in the table's last column."""
    text = (ROOT / "docs/lessons.md").read_text()
    quoted = {
        name
        for bracket in re.findall(r'\(("[^()]*")\)', text)
        for name in re.findall(r'"([^"]+)"', " ".join(bracket.split()))
    }
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    listed = {name.strip() for row in rows for name in row.strip("| ").split("|")[-1].split(";")}
    return quoted | listed


def test_lessons_are_found() -> None:
    assert len(_named()) > 30


@pytest.mark.parametrize("name", sorted(_named()))
def test_a_lesson_has_its_entry(name: str) -> None:
    assert name in _entries(), "docs/log has no such entry: what is it called now?"
