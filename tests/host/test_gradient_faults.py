# SPDX-License-Identifier: Apache-2.0
"""A process that is killed in a backward is named by the others."""

from __future__ import annotations

import os
import signal

import pytest

import moeos
from moeos import PeerTimeout
from moeos.faults import Fault, FaultPlan, Stage
from tests.layers import config, draw_call, draw_weights
from tests.nightly import all_but
from tests.processes import ForkedRanks, free_port, torchrun_environment

RANKS = 3


@pytest.mark.parametrize(
    ("stage", "victim"),
    all_but(
        [("start", 0), ("product1", 2)],
        [("start", 0), ("dispatch", 2), ("product0", 0), ("product1", 2), ("combine", 1)],
    ),
)
def test_a_process_that_is_killed_in_backward_is_named_by_the_others(
    stage: Stage, victim: int
) -> None:
    cfg, port = config(), free_port()
    weights = draw_weights(cfg)
    plan = FaultPlan(faults=(Fault(kind="kill", rank=victim, call=3, stage=stage),))

    def live(rank: int) -> str:
        os.environ.update(torchrun_environment(rank, RANKS, port))
        with moeos.init("twin", deadline=5.0, faults=plan) as world:
            layer = weights.layer(world).requires_grad_()
            first, second = (layer(draw_call(cfg, 60, seed).x).sum() for seed in (rank, 3 + rank))
            with pytest.raises(PeerTimeout) as raised:
                (first + second).backward()  # others may have all that they need of one
            return str(raised.value)

    ranks = ForkedRanks(live, RANKS)
    outcomes = ranks.ended(ranks=[rank for rank in range(RANKS) if rank != victim])
    assert ranks.ended(ranks=[victim]) == [None]
    assert ranks.processes[victim].exitcode == -signal.SIGKILL
    for outcome in outcomes:
        assert isinstance(outcome, str), repr(outcome)
        assert f"for rank {victim}" in outcome
