# SPDX-License-Identifier: Apache-2.0
"""A process that is killed in a backward, or makes none, is named by the others."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import moeos
from moeos import PeerTimeout, World
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan, Stage
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


@pytest.mark.parametrize("save", ["nothing", "preactivation"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["stops", "goes forward"])
def test_a_backward_that_one_rank_does_not_make_is_named_with_its_call(
    save: Any, goes_on: bool
) -> None:
    cfg = config(save=save)
    weights = draw_weights(cfg)
    waited = threading.Event()

    def rank_main(world: World) -> str:
        layer = weights.layer(world).requires_grad_()
        layer.world.layer_names[0] = "mlp"
        for seed in range(2):  # calls 1 and 2, 3 and 4
            layer(draw_call(cfg, 8, seed).x).sum().backward()
        y = layer(draw_call(cfg, 8, 3).x)
        if world.rank == 1 and not goes_on:  # its loss has no part of y
            waited.wait(60.0)
            return ""
        try:
            if world.rank == 0:
                y.sum().backward()
            else:
                layer(draw_call(cfg, 8, 4).x)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            waited.set()
        return "well"

    first, second = virtual.run(rank_main, ranks=2, deadline=60.0 if goes_on else 0.3)
    if goes_on:
        assert "RuntimeError: the ranks call different directions: " in first
        assert "rank 0" in first
        assert "the backward of call 5 of layer 0 (mlp)" in first
        assert "different directions" in second
    else:
        assert "PeerTimeout: rank 0 waited 0.3 s in call 6 for rank 1, which owes" in first
        assert (
            "it has not made call 6, the backward of call 5 of layer 0 (mlp) (if its loss leaves "
            "that call's output out, add 0 * output.sum() to it)"
        ) in first
