# SPDX-License-Identifier: Apache-2.0
"""What README says of a killed rank under mpirun and torchrun: which sentences come, and how to get
the one that names it."""

from __future__ import annotations

import re

import pytest

from tests.nightly import at_night
from tests.processes import launched, mpirun, torchrun

PROGRAM = """
import os, signal, sys, torch, moeos

if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with moeos.init(backend="twin", deadline=10.0) as world:
    cfg = moeos.MoEConfig(
        hidden=64, intermediate=64, experts=6, top_k=2, dtype=torch.float32, max_tokens=64
    )
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(32, 64)
    layer(x)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer(x)
"""

SENTENCE = re.compile(r"PeerTimeout: rank \d.* waited 10\.0 s in call 2 for rank 1")


@pytest.mark.nightly
def test_mpirun_ends_the_others_and_names_the_killed_rank_itself() -> None:
    ended = mpirun(2, PROGRAM)
    assert ended.returncode != 0
    assert "process rank 1" in ended.stderr
    assert "signal 9 (Killed)" in ended.stderr
    assert "PeerTimeout" not in ended.stderr


@pytest.mark.nightly  # torchrun shows it in every run
def test_mpirun_that_lets_the_others_go_on_shows_the_sentence() -> None:
    ended = launched(["mpirun", "--continuous", "-n", "2"], PROGRAM)
    assert SENTENCE.search(ended.stderr), ended.stderr


@pytest.mark.parametrize("ignores", [at_night(False), True], ids=["as it is", "SIGTERM ignored"])
def test_torchrun_names_the_killed_rank_and_ranks_without_sigterm_say_the_sentence(
    ignores: bool,
) -> None:
    ended = torchrun(2, PROGRAM, *["ignore"] * ignores)
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL) received by PID" in ended.stderr
    assert bool(SENTENCE.search(ended.stderr)) == ignores, ended.stderr
