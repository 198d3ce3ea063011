# SPDX-License-Identifier: Apache-2.0
"""Worlds from process groups on several GPUs: starts tests/gpu/groups.py on 2 or 4 of them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import STARTED, why_not
from tests.processes import torchrun

GPUS = 0 if why_not() else torch.cuda.device_count()

pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=why_not() or f"this host has {GPUS} GPU"),
    pytest.mark.timeout(600),
]


def test_worlds_come_from_groups_meshes_and_stores() -> None:
    ranks = 4 if GPUS >= 4 else 2
    ended = torchrun(ranks, "from tests.gpu.groups import main; main()", seconds=STARTED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("  right (") == (7 if ranks == 4 else 6), ended.stdout
