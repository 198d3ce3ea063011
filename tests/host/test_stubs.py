# SPDX-License-Identifier: Apache-2.0
"""host/*.pyi must say what the compiled modules have, or mypy checks against others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["_runtime", "_twin"])
def test_a_stub_is_what_the_compiled_module_has(module: str, tmp_path: Path) -> None:
    for command in (
        ["nanobind.stubgen", "-q", "-m", f"moeos.{module}", "-O", str(tmp_path)],
        ["ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), "."],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True, timeout=120)
    stub = ROOT / "host" / f"{module}.pyi"
    # The license's line is no part of the module.
    made = (tmp_path / stub.name).read_text()
    assert f"# SPDX-License-Identifier: Apache-2.0\n{made}" == stub.read_text()
