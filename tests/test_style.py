# SPDX-License-Identifier: Apache-2.0
"""The house's style: ruff, mypy in strict mode on the package, and clang-format on all C++."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import all_but
from tests.processes import BIN, ROOT

PYTHON = ["host", "launch", "tests"]
CPP = ["runtime", "kernels", "tests"]
CPP_SUFFIXES = {".hpp", ".cpp", ".cu", ".cuh"}


def complaints(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a checker has to say; nothing when it is content."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_is_content(command: list[str]) -> None:
    assert complaints(BIN / "ruff", *command, *PYTHON) == ""


# As it stands, mypy reads thousands of modules of which the package uses nothing itself, in two
# thirds of its time.
WITHOUT_OTHERS = """
[[tool.mypy.overrides]]
module = [
  "sympy.*",
  "torch._decomp.*",
  "torch._dynamo.*",
  "torch._functorch.*",
  "torch._inductor.*",
  "torch._subclasses.*",
  "torch.ao.*",
  "torch.distributed.fsdp.*",
  "torch.fx.*",
  "torch.nested._internal.*",
  "torch.onnx.*",
  "transformers.*",
]
follow_imports = "skip"
"""


@pytest.mark.parametrize(
    "further", all_but([WITHOUT_OTHERS], [WITHOUT_OTHERS, ""]), ids=["fast", "whole"]
)
def test_mypy_in_strict_mode_is_content_with_the_package(further: str, tmp_path: Path) -> None:
    settings = tmp_path / "pyproject.toml"
    settings.write_text((ROOT / "pyproject.toml").read_text() + further)
    (tmp_path / "moeos").symlink_to(ROOT / "host", target_is_directory=True)
    options = ["--config-file", settings, "--cache-dir", ROOT / ".mypy_cache"]
    command = [sys.executable, "-m", "mypy", *options, "-p", "moeos"]
    assert complaints(*command, cwd=tmp_path) == ""


def test_clang_format_is_content() -> None:
    files = [f for folder in CPP for f in (ROOT / folder).rglob("*") if f.suffix in CPP_SUFFIXES]
    assert files
    assert complaints(BIN / "clang-format", "--dry-run", "-Werror", *sorted(files)) == ""
