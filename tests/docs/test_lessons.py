# SPDX-License-Identifier: Apache-2.0
"""Each rule of docs/lessons.md names an entry of the log's index as its evidence.

This file knows nothing of what either says.
"""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT

DOCS = ROOT / "docs"
ENTRY = re.compile(r"\blog/(\d{4})\b|\[log\]\(log/README\.md\)")
INDEX = (DOCS / "log" / "README.md").read_text()


def _rules() -> list[str]:
    """The rows of all tables, without the two that head each."""
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / "lessons.md").read_text(), re.M)
    return [row for table in tables for row in table.splitlines()[2:]]


def test_lessons_are_found() -> None:
    assert len(_rules()) > 70


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule.strip("| ").split(" |")[0])
def test_a_rule_has_its_evidence(rule: str) -> None:
    named = ENTRY.findall(rule)
    assert named, "no entry of the log is named"
    for name in named:
        assert f"`{name}" in INDEX, f"the log has no entry {name}"
