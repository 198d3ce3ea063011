# SPDX-License-Identifier: Apache-2.0
"""The house's style: ruff, mypy in strict mode, the floors of imports, clang-format on all C++."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import all_but
from tests.processes import BIN, ROOT

PYTHON = ["host", "bench", "examples", "tests"]
CPP = ["runtime", "kernels", "tests"]
CPP_SUFFIXES = {".hpp", ".cpp", ".cu", ".cuh"}


def complaints(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a checker has to say; nothing when it is content."""
    env = {**os.environ, **variables}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
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
    options = ["--config-file", settings, "--cache-dir", ROOT / ".mypy_cache"]
    packages = [word for name in ("moeos", "bench", "examples") for word in ("-p", name)]
    command = [sys.executable, "-m", "mypy", *options, *packages]
    assert complaints(*command, MYPYPATH=f"{ROOT / 'host'}:{ROOT}", cwd=tmp_path) == ""


def test_rooms_import_what_stands_below_them_and_no_modules_import_each_other() -> None:
    """The floors are in pyproject.toml."""
    assert (
        complaints(BIN / "lint-imports", "--no-cache", PYTHONPATH=f"{ROOT / 'host'}:{ROOT}") == ""
    )


def test_clang_format_is_content() -> None:
    files = [f for folder in CPP for f in (ROOT / folder).rglob("*") if f.suffix in CPP_SUFFIXES]
    assert files
    assert complaints(BIN / "clang-format", "--dry-run", "-Werror", *sorted(files)) == ""
