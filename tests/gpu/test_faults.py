# SPDX-License-Identifier: Apache-2.0
"""Faults on demand on the GPU: the kernel with faults is late, stands still or is slow.

Virtual ranks, all or none of them remote. Processes, of which one is killed, are in soak.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import TypeVar, get_args

import pytest
import torch

from moeos import PeerTimeout, World
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan, SlowLink, SlowProcessor, Stage, StartDelay
from tests.gpu.cases import (
    CASES,
    REMOTE_CASES,
    Case,
    RankLayer,
    assert_matches,
    blocks,
    call_on_gpu,
    compile_cases,
    on_gpu,
    why_not,
)
from tests.layers import Call, Weights, draw_given_call, draw_weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

DEADLINE = 3.0
MARGIN = 1.0
CULPRIT = 1
TOKENS = 200
STAGES = get_args(Stage)

ONE_RANK = dataclasses.replace(CASES["swiglu-1-rank"], faults=True)
WAYS = {
    "direct": dataclasses.replace(CASES["swiglu-4-ranks"], faults=True),
    "remote": dataclasses.replace(REMOTE_CASES["swiglu-4-nodes"], faults=True),
}
ways = pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
at_stages = pytest.mark.parametrize(
    ("case", "stage"),
    [
        pytest.param(case, stage, id=f"{stage}-{way}")
        for way, case in WAYS.items()
        for stage in STAGES
        if (way, stage) != ("remote", "replicate")  # tokens go once to direct peers
    ],
)

Result = TypeVar("Result")


@pytest.fixture(scope="module", autouse=True)
def kernels_with_faults() -> None:
    """They are compiled, and the reference has run once, before the first deadline runs."""
    compile_cases([ONE_RANK, *WAYS.values(), CASES["swiglu-4-ranks"]], blocks())
    for case in (ONE_RANK, *WAYS.values()):
        weights_of(case).expected(call_of(case, 0))


@functools.cache
def weights_of(case: Case) -> Weights:
    """A case's weights, on the GPU."""
    return on_gpu(draw_weights(case.cfg))


@functools.cache
def call_of(case: Case, rank: int) -> Call:
    """A rank's call; it sends rows to all ranks."""
    return call_on_gpu(draw_given_call(case.cfg, TOKENS, rank, unused=0.0))


def right_call(case: Case, world: World, layer: RankLayer) -> float:
    """Makes a call that must end well and be right; its seconds."""
    call = call_of(case, world.rank)
    world.control.barrier()
    begin = time.monotonic()
    y = layer(call)
    layer.engine.check()
    seconds = time.monotonic() - begin
    assert_matches(weights_of(case), call, y, f"rank {world.rank}")
    return seconds


def failed_call(case: Case, world: World, layer: RankLayer) -> None:
    """Makes a call that must blame the culprit, in time, on every rank."""
    world.control.barrier()
    begin = time.monotonic()
    layer(call_of(case, world.rank))
    with pytest.raises(PeerTimeout) as raised:
        layer.engine.check()
    seconds = time.monotonic() - begin
    late = rf"for rank {CULPRIT}, which owes "
    alone = rf"^rank {CULPRIT}\b.* for its own processors"
    assert re.search(rf"{late}|{alone}", str(raised.value)), str(raised.value)
    assert seconds <= DEADLINE + MARGIN
    world.control.barrier()


def run(
    case: Case, plan: FaultPlan, function: Callable[[World, RankLayer], Result]
) -> list[Result]:
    """`function(world, layer)` on each virtual rank."""

    def rank_main(world: World) -> Result:
        return function(world, RankLayer(weights_of(case), world))

    return virtual.run(
        rank_main,
        ranks=case.ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=case.ranks_per_node,
        faults=plan,
    )


@at_stages
def test_a_stalled_rank_is_named_by_all_and_a_reset_forgets_it(case: Case, stage: Stage) -> None:
    def calls(world: World, layer: RankLayer) -> None:
        right_call(case, world, layer)
        failed_call(case, world, layer)
        world.reset()
        for _ in range(3):
            right_call(case, world, layer)

    stalled = Fault(kind="stall", rank=CULPRIT, call=2, stage=stage)
    run(case, FaultPlan(faults=(stalled,)), calls)


@at_stages
def test_results_are_right_beside_a_delay_within_the_deadline(case: Case, stage: Stage) -> None:
    def calls(world: World, layer: RankLayer) -> None:
        assert right_call(case, world, layer) < 0.2
        assert 0.199 <= right_call(case, world, layer) < DEADLINE
        assert right_call(case, world, layer) < 0.2

    late = Fault(kind="delay", rank=CULPRIT, call=2, stage=stage, seconds=0.2)
    run(case, FaultPlan(faults=(late,)), calls)


@ways
def test_a_delay_beyond_the_deadline_is_named(case: Case) -> None:
    late = Fault(kind="delay", rank=CULPRIT, call=1, stage="product0", seconds=60.0)
    run(
        case,
        FaultPlan(faults=(late,)),
        lambda world, layer: failed_call(case, world, layer),
    )


@ways
def test_a_slow_processor_makes_right_results_late(case: Case) -> None:
    """Which of 32 processors gets a part is a race; among many calls one gets some."""
    slow = SlowProcessor(rank=CULPRIT, processor=0, seconds=0.01, factor=3.0)

    def calls(world: World, layer: RankLayer) -> None:
        assert max(right_call(case, world, layer) for _ in range(30)) >= 0.01

    run(case, FaultPlan(slow_processors=(slow,)), calls)


@ways
def test_a_slow_link_makes_right_results_late_or_is_named(case: Case) -> None:
    rate = 1e6
    link = SlowLink(rank=CULPRIT, peer=3, seconds=0.05, bytes_per_second=rate)

    def calls(world: World, layer: RankLayer) -> tuple[float, int]:
        return right_call(case, world, layer), layer.engine.stats().pairs_sent[3]

    results = run(case, FaultPlan(slow_links=(link,)), calls)
    seconds, _ = results[3]
    _, rows = results[CULPRIT]
    assert seconds >= 0.05 + rows * case.cfg.hidden * 2 / rate
    slower = dataclasses.replace(link, seconds=60.0)
    run(
        case,
        FaultPlan(slow_links=(slower,)),
        lambda world, layer: failed_call(case, world, layer),
    )


def test_a_rank_that_starts_late_holds_up_the_others() -> None:
    case = WAYS["direct"]
    late = StartDelay(distribution="constant", rank=CULPRIT, seconds=0.3)

    def calls(world: World, layer: RankLayer) -> None:
        assert not layer.engine._shape.faults  # the kernel has no part in it
        assert right_call(case, world, layer) >= 0.3

    run(case, FaultPlan(start_delays=(late,)), calls)


def test_a_replayed_graph_is_late_in_the_call_that_the_plan_names() -> None:
    late = Fault(kind="delay", rank=0, call=3, stage="product1", seconds=0.3)

    def replays(world: World, layer: RankLayer) -> None:
        call = call_of(ONE_RANK, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(call)
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.monotonic()
            graph.replay()
            layer.engine.check()
            seconds.append(time.monotonic() - begin)
            assert_matches(weights_of(ONE_RANK), call, y, "a replay")
        assert [took >= 0.299 for took in seconds] == [False, False, True, False]

    run(ONE_RANK, FaultPlan(faults=(late,)), replays)


def test_a_world_without_faults_on_the_device_runs_the_kernel_without_them() -> None:
    case = WAYS["direct"]
    elsewhere = Fault(kind="stall", rank=CULPRIT, call=1, stage="start", layer=1)

    def calls(world: World, layer: RankLayer) -> None:
        assert not layer.engine._shape.faults
        right_call(case, world, layer)

    run(case, FaultPlan(faults=(elsewhere,)), calls)
