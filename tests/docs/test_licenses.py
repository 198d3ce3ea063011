# SPDX-License-Identifier: Apache-2.0
"""Every source file names its license where tools look for it: in its first lines, as SPDX does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.processes import ROOT

LINE = re.compile(rb"(#|//) SPDX-License-Identifier: Apache-2\.0\n")
SUFFIXES = {
    *(".py", ".pyi", ".sh", ".sbatch"),
    *(".hpp", ".cuh", ".cpp", ".cu", ".js", ".pml"),
}


def sources() -> list[Path]:
    """Files of git with these suffixes, and programs without one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [
        file
        for file in files
        if file.is_file() and (file.suffix in SUFFIXES or file.read_bytes().startswith(b"#!"))
    ]


def test_every_source_file_names_its_license_before_anything_else() -> None:
    files = sources()
    assert len(files) > 500
    without = []
    for file in files:
        lines = file.read_bytes().splitlines(keepends=True)
        first = lines[1:2] if lines and lines[0].startswith(b"#!") else lines[:1]
        if not (first and LINE.fullmatch(first[0])):
            without.append(str(file.relative_to(ROOT)))
    assert not without, f"without an SPDX line: {', '.join(without)}"
