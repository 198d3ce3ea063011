# SPDX-License-Identifier: Apache-2.0
"""A class of the package has a name of its own, so that a search for it finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.processes import ROOT


def shared_names(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names of several classes, private or nested ones too, and the modules (name, text) that have
    them.
    """
    found = defaultdict(list)
    for module, text in modules:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: of for name, of in found.items() if len(of) > 1}


def test_no_two_classes_share_a_name() -> None:
    package = ROOT / "host" / "moeos"
    modules = [(str(path.relative_to(package)), path.read_text()) for path in package.rglob("*.py")]
    assert len(modules) > 100
    assert shared_names(modules) == {}


def test_a_name_that_two_classes_share_is_noticed() -> None:
    one, other = "class _Plan: pass", "def f():\n    class _Plan(Protocol): pass"
    assert shared_names([("a", one), ("b", other)]) == {"_Plan": ["a", "b"]}
    assert shared_names([("a", one), ("b", "_Plan = 1")]) == {}
