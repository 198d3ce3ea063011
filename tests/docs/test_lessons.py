# SPDX-License-Identifier: Apache-2.0
"""Each rule of docs/lessons.md names where the log has its evidence.

This file knows nothing of what either says.
"""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\((log/[^)]+)\)")


def _rules() -> list[str]:
    """The rows of all tables, without the two that head each."""
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / "lessons.md").read_text(), re.M)
    return [row for table in tables for row in table.splitlines()[2:]]


def test_lessons_are_found() -> None:
    assert len(_rules()) > 70


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule.strip("| ").split(" |")[0])
def test_a_rule_has_its_evidence(rule: str) -> None:
    named = LINK.findall(rule)
    assert named, "no entry of the log is named"
    for name in named:
        assert (DOCS / name).is_file(), f"docs has no {name}: what is it called now?"
