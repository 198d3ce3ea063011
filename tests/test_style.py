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


# As it stands, mypy reads thousands of modules of which the package uses nothing itself, in more
# than two thirds of its time.
OTHERS = (
    *("PIL", "pyparsing", "sympy", "transformers", "elftools.construct", "pydantic._internal"),
    *("matplotlib.axes", "matplotlib._mathtext"),
    *(f"numpy.{name}" for name in ("f2py", "ma", "matrixlib", "polynomial", "random", "testing")),
    *(
        f"torch.{name}"
        for name in (
            *("_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor"),
            *("_library", "_ops", "_prims", "_prims_common", "_refs", "_subclasses", "ao"),
            *("distributed.algorithms", "distributed.elastic", "distributed.fsdp"),
            *("distributed.pipelining", "distributed.rpc", "distributed.tensor._ops"),
            *("distributions", "export", "fx", "jit", "masked", "nested._internal", "onnx"),
            *("package", "profiler", "quantization", "sparse", "testing", "utils._sympy"),
            *("utils.benchmark", "utils.data", "utils.tensorboard"),
        )
    ),
)
WITHOUT_OTHERS = f"""
[[tool.mypy.overrides]]
module = {[f"{name}.*" for name in OTHERS]}
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
