# SPDX-License-Identifier: Apache-2.0
"""Several GPUs, one process each: some seconds of tests/gpu/soak.py and of what it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import STARTED, why_not
from tests.processes import torchrun

GPUS = 0 if why_not() else torch.cuda.device_count()

pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=why_not() or f"this host has {GPUS} GPU"),
    pytest.mark.timeout(600),
]


def test_calls_are_right_and_a_killed_rank_is_named_in_time(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    ranks = 4 if GPUS >= 4 else 2
    program = f"from tests.gpu.soak import main; main(['--seconds', '20', '--out', {str(out)!r}])"
    ended = torchrun(
        ranks, program, seconds=STARTED
    )  # whose status is that of the rank that is killed
    assert out.exists(), ended.stdout + ended.stderr
    report = json.loads(out.read_text())
    assert report["good"], report
    assert report["mismatches"] == 0
    assert report["calls"] >= 1000 * ranks
    assert report["graph_replays"] > 0
    assert len(report["kill"]["survivors"]) == ranks - 1
