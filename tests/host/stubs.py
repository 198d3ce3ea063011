# SPDX-License-Identifier: Apache-2.0
"""Writes host/moeos/*.pyi, which say to mypy what the compiled modules have.

`python -m tests.host.stubs`, in a checkout whose C++ is compiled, writes them. nanobind says what a
module has; this file knows nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests import programs
from tests.processes import ROOT

STUBS = {module: ROOT / "host" / "moeos" / f"{module}.pyi" for module in ("_runtime", "_twin")}


def text_of(module: str) -> str:
    """The stub of a module as it was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        config = ["--quiet", "--config", str(ROOT / "pyproject.toml"), folder]
        program = "import runpy; runpy.run_module('nanobind.stubgen', None, '__main__', True)"
        programs.ended(program, "-q", "-m", f"moeos.{module}", "-O", folder).check_returncode()
        for command in (["check", "--fix", "--select", "I"], ["format"]):
            ruff = [sys.executable, "-m", "ruff", *command, *config]
            subprocess.run(ruff, check=True, timeout=120)
        made = Path(folder, f"{module}.pyi").read_text()
    # The license's line is no part of the module.
    return f"# SPDX-License-Identifier: Apache-2.0\n{made}"


if __name__ == "__main__":
    for module, stub in STUBS.items():
        stub.write_text(text_of(module))
