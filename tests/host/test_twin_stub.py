# SPDX-License-Identifier: Apache-2.0
"""host/_twin.pyi must say what the compiled module has, or mypy checks against another twin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[2] / "host" / "_twin.pyi"


def test_stub_is_what_the_compiled_module_has(tmp_path: Path) -> None:
    for command in (
        ["nanobind.stubgen", "-q", "-m", "moeos._twin", "-O", str(tmp_path)],
        ["ruff", "format", "--quiet", "--config", str(STUB.parents[1] / "pyproject.toml"), "."],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "_twin.pyi").read_text() == STUB.read_text()
