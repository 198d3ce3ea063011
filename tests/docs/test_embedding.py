# SPDX-License-Identifier: Apache-2.0
"""Each row of docs/embedding.md and of docs/module.md names a test that there is.

This file knows nothing of what the rows promise.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re

import pytest

from tests.processes import ROOT

PAGES = ("docs/embedding.md", "docs/module.md")
NAMED = re.compile(r"`([\w/.]+\.py)::(\w+)`")


@functools.cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _rows() -> list[str]:
    lines = [line for page in PAGES for line in (ROOT / page).read_text().splitlines()]
    rows = []
    for before, line in itertools.pairwise(lines):
        if line.startswith("|") and before.startswith("|") and not line.startswith("| ---"):
            rows.append(line)
    return rows


def test_rows_are_found() -> None:
    assert len(_rows()) >= 6


@pytest.mark.parametrize("row", _rows())
def test_a_row_names_tests_that_there_are(row: str) -> None:
    named = NAMED.findall(row.strip("| ").split(" | ")[-1])
    assert named, row
    for file, test in named:
        assert test.startswith("test_"), test
        assert test in _tests_of(file), f"{file} has no {test}"
