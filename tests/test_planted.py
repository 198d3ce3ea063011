# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each that the source has is noticed by some test, and each that a test plants is
in the source (runtime/words/planted.hpp)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.emulator import test_emulated
from tests.native import test_native
from tests.processes import ROOT

SUFFIXES = {".hpp", ".cuh", ".cu", ".cpp"}
POINT = re.compile(r"\bMOEOS_PLANTED\((\w+)\)")
DEFINITION = Path("runtime/words/planted.hpp")


def sources() -> Iterator[Path]:
    """What a release is made of, below the repository."""
    for folder in ("runtime", "kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.relative_to(ROOT) != DEFINITION:
                yield path


def repeated(names: Iterable[str]) -> set[str]:
    listed = list(names)
    return {name for name in listed if listed.count(name) > 1}


def test_every_planted_fault_has_one_place_and_one_test() -> None:
    in_source = [name for path in sources() for name in POINT.findall(path.read_text())]
    in_tests = [*test_native.FAULTS, *test_emulated.FAULTS]
    assert not repeated(in_source), "a name at several places: a test cannot tell which it noticed"
    assert not repeated(in_tests)
    assert set(in_source) == set(in_tests)


def test_only_tests_are_compiled_with_planted_faults() -> None:
    """Everywhere else a point is the word `false`."""
    built_by = ("CMakeLists.txt", "pyproject.toml", "host/moeos/compile/jit.py")
    assert all("MOEOS_PLANT" not in (ROOT / path).read_text() for path in built_by)
    found = [path for path in sources() if re.search(r"\bMOEOS_PLANTS\b", path.read_text())]
    assert not found
