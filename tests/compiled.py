# SPDX-License-Identifier: Apache-2.0
"""What tests compile from C++, kept in build/tests: an unchanged tree compiles it once.

Holds no test. A kept file is found by the compiler, its options, and all sources of the folders
that it may include. Processes that ask for the same one at once compile it once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from moeos.compile import kernel_cache
from tests.processes import ROOT

KEPT = ROOT / "build" / "tests"
PARTS = KEPT / "parts"
SUFFIXES = {".hpp", ".cpp", ".cuh", ".cu", ".def"}


def keep(
    output: Path,
    made_of: Sequence[object],
    folders: Sequence[str],
    make: Callable[[], None],
    kept: Path = KEPT,
) -> None:
    """Has `output` written by `make`, or from what was kept.

    made_of: all that it depends on beside the compiler and the sources of `folders`. `kept`: where.
    Names share locks there: what is made while something else is made takes `PARTS`.
    """
    parts = [compiler(), *map(str, made_of), *map(digest, folders)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def make_and_read() -> bytes:
        make()
        return output.read_bytes()

    content, found = kernel_cache.get_or_make(key, make_and_read, kept)
    if found:
        output.write_bytes(content)


@functools.cache
def compiler() -> str:
    asked = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return asked.stdout


@functools.cache
def digest(folder: str) -> str:
    """Of all C++ sources of a folder of the repository."""
    found = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES:
            text = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(ROOT)} {text}\n".encode())
    return found.hexdigest()
