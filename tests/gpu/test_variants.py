# SPDX-License-Identifier: Apache-2.0
"""`bench.studies.variants` times several trees' kernels, and tells which differ."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moeos.compile import jit
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

SMALL = """
hidden = 256
intermediate = 128
experts = 8
top_k = 2
activation = "gelu_tanh"
max_tokens = 300
"""


def test_a_tree_that_computes_otherwise_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(SMALL)
    wrong = tmp_path / "wrong"
    for name in ("kernels", "runtime"):
        shutil.copytree(jit.include_root() / name, wrong / name)
    activation = wrong / "kernels" / "sm90" / "epilogue" / "activation.cuh"
    text = activation.read_text()
    assert text.count("0.044715F") == 1
    activation.write_text(text.replace("0.044715F", "0.144715F"))
    same = jit.include_root()
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "bench.studies.variants",
        f"a={same}",
        f"b={same}",
        f"c={wrong}",
    ]
    command += ["--out", str(out), "--config", str(small), "--tokens", "8,300"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    results = found["layers"]["small"]["results"]
    assert [case["tokens"] for case in results] == [8, 300]
    for case in results:
        assert case["distances"]["b"] == 0
        assert case["distances"]["c"] > 1e-3
        assert all(0 < times["median"] < 1 for times in case["seconds"].values())
    assert "0.144715F" in found["variants"]["c"]["diff"]
