# SPDX-License-Identifier: Apache-2.0
"""A process that is killed among groups of ranks is named, and not the one that waits for it."""

from __future__ import annotations

import os
import signal

import pytest

import moeos
from moeos import PeerTimeout
from moeos.world.faults import Fault, FaultPlan
from tests.layers import config, draw_call, draw_weights
from tests.processes import ForkedRanks, free_port, torchrun_environment


def test_a_rank_that_waits_for_sums_is_not_blamed_by_another_group() -> None:
    """Rank 1 dies with its partial sums. Rank 0 waits for these, and rank 2 for rank 0, in its next
    call. Rank 3, which would name rank 1 there, makes none.
    """
    cfg, port = config(), free_port()
    weights = draw_weights(cfg)
    plan = FaultPlan(faults=(Fault(kind="kill", rank=1, call=2, stage="combine"),))

    def live(rank: int) -> str:
        os.environ.update(torchrun_environment(rank, 4, port))
        with moeos.init("twin", deadline=2.0, faults=plan) as world:
            layer = weights.layer(world, parallel="tensor", tensor_ranks=2)
            x = draw_call(cfg, 20, rank // 2).x
            layer(x)
            if rank > 1:
                layer(x[:0])
            if rank == 3:
                return ""
            with pytest.raises(PeerTimeout) as raised:
                layer(x)
            return str(raised.value)

    ranks = ForkedRanks(live, 4)
    outcomes = ranks.ended(ranks=[0, 2, 3])
    assert ranks.ended(ranks=[1]) == [None]
    assert ranks.processes[1].exitcode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert isinstance(outcome, str), repr(outcome)
        assert "for rank 1" in outcome
