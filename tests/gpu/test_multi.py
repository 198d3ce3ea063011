# SPDX-License-Identifier: Apache-2.0
"""Several GPUs, one process each: starts tests/gpu/multi.py on 2 or 4 of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import STARTED, why_not
from tests.processes import MOEOS, torchrun

GPUS = 0 if why_not() else torch.cuda.device_count()

LARGEST_GAP = 40_000  # ns between the first parts of ranks that have met; a flush takes twice that

pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=why_not() or f"this host has {GPUS} GPU"),
    pytest.mark.timeout(600),
]


def test_a_process_for_each_gpu() -> None:
    ended = torchrun(
        4 if GPUS >= 4 else 2, "from tests.gpu.multi import main; main()", seconds=STARTED
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "10000 calls back to back are right" in ended.stdout


@pytest.mark.parametrize(
    "ranks_per_node",
    [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 4, reason="nodes of 2 need 4 GPUs"))],
)
def test_peers_that_are_put_to_by_nvshmem(ranks_per_node: int) -> None:
    """Over NVLink, which stands for the network."""
    arguments = ["--calls", "200", "--ranks-per-node", str(ranks_per_node)]
    program = f"from tests.gpu.multi import main; main({arguments})"
    ended = torchrun(4 if GPUS >= 4 else 2, program, seconds=STARTED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "200 calls back to back are right" in ended.stdout


def test_a_trace_has_all_gpus_on_one_clock(tmp_path: Path) -> None:
    """By which no part is claimed before what it waited for was stored by another GPU."""
    layer = tmp_path / "layer.toml"
    layer.write_text(
        "hidden = 1024\nintermediate = 512\nexperts = 32\ntop_k = 4\nmax_tokens = 2048\n"
    )
    arguments = ["trace", str(layer), "--backend", "cuda", "--tokens", "1500"]
    program = f"import sys; sys.argv = ['moeos', *{arguments}]; {MOEOS}"
    ended = torchrun(4 if GPUS >= 4 else 2, program, seconds=STARTED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "what the last Combine waited for" in ended.stdout
    assert "by their clocks" not in ended.stderr


def test_kernels_of_a_cold_trace_begin_together(tmp_path: Path) -> None:
    """Sooner after each other than a GPU empties its cache."""
    layer, summary = tmp_path / "layer.toml", tmp_path / "summary.json"
    layer.write_text(
        "hidden = 1024\nintermediate = 512\nexperts = 32\ntop_k = 4\nmax_tokens = 128\n"
    )
    arguments = ["trace", str(layer), "--backend", "cuda", "--cold", "--json", str(summary)]
    program = f"import sys; sys.argv = ['moeos', *{arguments}]; {MOEOS}"
    ended = torchrun(4 if GPUS >= 4 else 2, program, seconds=STARTED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    begins = [rank["first_claimed"] for rank in json.loads(summary.read_text())["by_rank"]]
    assert max(begins) - min(begins) < LARGEST_GAP
