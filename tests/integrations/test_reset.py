# SPDX-License-Identifier: Apache-2.0
"""Models of all adapters are usable behind a call that failed or was interrupted."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moeos.integrations import shared
from tests.host.world.test_groups import in_processes
from tests.host.world.test_signals import raised_by, signal_in
from tests.layers import assert_matches, config, draw_given_call, draw_weights

fork = multiprocessing.get_context("fork")

CFG = config(max_tokens=16, routing="caller")
WEIGHTS = draw_weights(CFG)
CALL = draw_given_call(CFG, 9, 0)


def test_ranks_that_share_experts_go_on_behind_ctrl_c_when_all_have_reset() -> None:
    interrupted = fork.Event()

    def live(rank: int) -> list[str]:
        group: Any = dist.group.WORLD
        experts = shared.experts_of(CFG, shared.world_of(group, "twin", 300.0))
        own = WEIGHTS.of_rank(rank, 2)

        def call() -> torch.Tensor:
            assert CALL.ids is not None
            assert CALL.weights is not None
            return experts(CALL.x, CALL.ids, CALL.weights, own.w1, own.w2)

        assert_matches(WEIGHTS, CALL, call())
        if rank == 0:
            signal_in("forward")
        else:
            assert interrupted.wait(60)
        said = [repr(raised_by(call))]
        interrupted.set()
        said.append(repr(raised_by(call)))
        shared.reset()
        for _ in range(3):
            assert_matches(WEIGHTS, CALL, call())
        return said

    first, second = in_processes(live, 2)
    assert first[0] == "KeyboardInterrupt()"
    for said in (first[1], *second):
        assert said.startswith("PeerTimeout(")
        assert "rank 0 was interrupted by a signal in call 2" in said


@pytest.mark.parametrize("library", ["transformers", "vllm", "sglang", "torchtitan"])
def test_each_adapter_has_it(library: str) -> None:
    adapter = pytest.importorskip(f"moeos.integrations.{library}", exc_type=ImportError)
    assert adapter.reset is shared.reset
