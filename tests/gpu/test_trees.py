# SPDX-License-Identifier: Apache-2.0
"""`bench.studies.trees` times an installed moeos against itself on this host's GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import moeos
from tests.gpu.cases import why_not
from tests.gpu.test_variants import SUITE

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


def test_two_trees_have_turns_on_all_gpus(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE)
    installed = Path(moeos.__file__).parents[1]
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "bench.studies.trees",
        f"a={installed}",
        f"b={installed}",
    ]
    command += ["--out", str(out), "--suite", str(suite), "--tokens", "0,300", "--turns", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert [case["tokens"] for case in found["results"]] == [0, 300]
    for case in found["results"]:
        for name in "ab":
            times = case["times"][name]
            assert len(times["turns"]) == 2
            assert 0 < times["median"] < 1
