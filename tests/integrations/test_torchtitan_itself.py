# SPDX-License-Identifier: Apache-2.0
"""The tests of the torchtitan adapter with torchtitan itself, in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integrations import environments
from tests.processes import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def test_the_adapter_s_tests_pass_with_torchtitan_itself() -> None:
    python = environments.with_torchtitan()
    found = environments.run(python, "-c", "import torchtitan.models.common.moe as m; print(m)")
    assert "fakes" not in found
    here = Path(__file__)
    tests = [here.with_name(f"test_torchtitan{end}.py") for end in ("", "_writes")]
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:xdist", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
