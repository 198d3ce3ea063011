"""Several GPUs, one process each: starts tests/gpu/multi.py on 2 or 4 of them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import why_not
from tests.processes import torchrun

GPUS = 0 if why_not() else torch.cuda.device_count()

pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=why_not() or f"this host has {GPUS} GPU"),
    pytest.mark.timeout(600),
]


def test_a_process_for_each_gpu() -> None:
    ended = torchrun(4 if GPUS >= 4 else 2, "from tests.gpu.multi import main; main()")
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
    ended = torchrun(4 if GPUS >= 4 else 2, program)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "200 calls back to back are right" in ended.stdout
