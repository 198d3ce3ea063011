# SPDX-License-Identifier: Apache-2.0
"""Messages are ASCII: a program may print an error wherever it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

WITH_SIGNS = (
    "bench",
    "host/moeos/cli/streams.py",
    "host/moeos/cli/shared/output.py",
    "host/moeos/cli/timeline/chrome.py",
    "host/moeos/cli/timeline/picture.py",
)
"""Write pages, plots and tables. What they print, moeos.cli.streams fits to the terminal."""


def texts_of(source: Path) -> Iterator[ast.Constant]:
    """The string literals of a file that are no docstrings."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    described = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in described:
            yield node


def test_every_text_of_the_package_is_ascii() -> None:
    found = []
    for source in sorted((ROOT / "host").rglob("*.py")):
        name = str(source.relative_to(ROOT))
        if not name.startswith(WITH_SIGNS):
            wrong = [text for text in texts_of(source) if not text.value.isascii()]
            found += [f"{name}:{text.lineno}: {text.value!r}" for text in wrong]
    assert found == []


def test_every_text_of_the_sources_in_cpp_is_ascii() -> None:
    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    found = [
        f"{source.name}: {text}"
        for folder in ("runtime", "kernels")
        for source in sorted((ROOT / folder).rglob("*.[ch]*"))
        for text in literal.findall(source.read_text(encoding="utf-8"))
        if not text.isascii()
    ]
    assert found == []
