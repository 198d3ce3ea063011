# SPDX-License-Identifier: Apache-2.0
"""The extras that moeos is installed with: what each is for, and which of its packages are here.

What an extra brings is read from moeos' own metadata. This file must not depend on how findings are
shown.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

from moeos.cli import probes
from moeos.cli.probes import Finding
from moeos.cli.shared import machine

PURPOSES: Mapping[str, str] = {
    "cuda": "layers on GPUs",
    "metrics": "`moeos run --prometheus` and `moeos.metrics`",
    "mpi": (
        "mpirun: `launch/demo`, `launch/train`, `launch/mpirun.sh` and the benchmarks that start "
        "ranks by it"
    ),
    "plots": (
        "`moeos trace --png`, `launch/train`, `launch/straggler --plot` and the report of "
        "measurements"
    ),
    "sglang": "`moeos.integrations.sglang`, in an environment of its own",
    "test": "`launch/test` and `launch/nightly`",
    "torchtitan": "`moeos.integrations.torchtitan`",
    "transformers": "`moeos.integrations.transformers`",
    "vllm": "`moeos.integrations.vllm`, in an environment of its own",
}
"""Packages by the name of the extra; README's table repeats them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def packages_of(extra: str) -> list[str]:
    """The names of the packages that an extra adds to those that moeos always needs."""
    asked = re.compile(rf"\bextra *== *['\"]{re.escape(extra)}['\"]")
    found = []
    for requirement in importlib.metadata.requires("moeos") or []:
        if asked.search(requirement) and (name := _NAME.match(requirement)):
            found.append(name.group())
    return found


def findings() -> list[Finding]:
    """A finding for each extra."""
    return [_finding(extra, purpose) for extra, purpose in PURPOSES.items()]


def _finding(extra: str, purpose: str) -> Finding:
    packages = packages_of(extra)
    lacking = [name for name in packages if machine.version_of(name) is None]
    if not lacking:
        return Finding(extra, True, purpose)
    if extra == "cuda" and all(probe().works for probe in probes.PACKAGES):
        rest = ", ".join(lacking)
        return Finding(extra, True, f"{purpose}; only several hosts, or tests, need {rest}")
    few = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
    found = f"{purpose}; {len(lacking)} of {len(packages)} packages are missing: {few}"
    return Finding(extra, False, found, f"pip install 'moeos[{extra}]'")
