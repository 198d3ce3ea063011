# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or never calls ends the others' calls with an error that names it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moeos
from moeos import PeerTimeout, TwinOptions, World
from moeos.world import virtual
from tests.layers import (
    assert_all_match,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but, in_turn
from tests.processes import (
    IMPORTED,
    ROOT,
    ForkedRanks,
    free_port,
    shared_memory,
    torchrun_environment,
)

DEADLINE = 0.5
LONG_DEADLINE = 3.0
"""Of many calls that must be right: a busy machine runs some thread of a rank late."""
CFG = config(max_tokens=64)
WEIGHTS = draw_weights(CFG)
CALLS = [draw_call(CFG, 40 + rank, rank) for rank in range(4)]

Way = dict[str, Any]
"""What `virtual.run` and `moeos.init` are given beside the deadline."""
WAYS: dict[str, Way] = {
    "one-thread": {"twin": TwinOptions(processors=1)},
    "split-os": {"twin": TwinOptions(processors=1, split_os=True)},
    "remote": {"twin": TwinOptions(processors=1), "ranks_per_node": 1},
    "mixed": {"twin": TwinOptions(processors=1, split_os=True), "ranks_per_node": 2},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=[*WAYS])


def failed_call(call: Callable[[], object]) -> tuple[str, float]:
    """The message of the `PeerTimeout` that a call raises, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as raised:
        call()
    return str(raised.value), time.monotonic() - begin


@pytest.mark.parametrize(("name", "absent"), in_turn(WAYS, [0, 2]))
def test_a_rank_that_never_calls_is_named_at_the_deadline(name: str, absent: int) -> None:
    way = WAYS[name]
    all_failed = threading.Barrier(4)

    def rank_main(world: World) -> tuple[str, float]:
        layer = WEIGHTS.layer(world)
        CALLS[world.rank](layer)
        world.control.barrier()
        found = "", DEADLINE
        if world.rank != absent:
            found = failed_call(lambda: CALLS[world.rank](layer))
        all_failed.wait(60)
        return found

    results = virtual.run(rank_main, ranks=4, deadline=DEADLINE, **way)
    for rank, (message, seconds) in enumerate(results):
        assert seconds >= 0.9 * DEADLINE
        if rank != absent:
            assert f"for rank {absent}, which owes its row count" in message
            assert "has not made call 2" in message
            assert "waited 0.5 s" in message


def test_a_rank_that_calls_after_the_others_gave_up_is_told_why() -> None:
    gave_up = threading.Barrier(4)

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        if world.rank == 3:
            gave_up.wait(60)
        message, _ = failed_call(lambda: CALLS[world.rank](layer))
        if world.rank != 3:
            gave_up.wait(60)
        return message

    messages = virtual.run(rank_main, ranks=4, deadline=DEADLINE)
    assert all("for rank 3" in message for message in messages)


@pytest.mark.parametrize("name", all_but(["one-thread", "mixed"], WAYS))
def test_many_calls_after_a_timeout_and_a_reset_are_right(name: str) -> None:
    """Routed and given in turn, so that they begin with another kind than the one that failed."""
    way = WAYS[name]
    given = [draw_given_call(CFG, 64 - rank, rank) for rank in range(4)]
    calls = [(given[rank], CALLS[rank]) * 15 for rank in range(4)]

    gave_up = threading.Barrier(4)

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = WEIGHTS.layer(world)
        CALLS[world.rank](layer)
        world.control.barrier()
        if world.rank != 2:
            failed_call(lambda: CALLS[world.rank](layer))
        gave_up.wait(60)
        layer.reset()
        return [call(layer) for call in calls[world.rank]]

    outputs = virtual.run(rank_main, ranks=4, deadline=LONG_DEADLINE, **way)
    assert_all_match(WEIGHTS, calls, outputs)


@ways
def test_a_rank_whose_argument_was_wrong_may_reset_while_the_others_wait_for_it(way: Way) -> None:
    def rank_main(world: World) -> list[torch.Tensor]:
        layer = WEIGHTS.layer(world)
        world.control.barrier()
        if world.rank == 1:
            ids = torch.tensor([[0, 99]])
            with pytest.raises(ValueError, match=r"topk_ids\[0, 1\] is 99"):
                layer(torch.ones(1, CFG.hidden), topk_ids=ids, topk_weights=torch.ones(1, 2))
        else:
            time.sleep(0.5 * DEADLINE)  # so that they leave the call behind rank 1's deadline
            failed_call(lambda: CALLS[world.rank](layer))
        world.reset()
        return [CALLS[world.rank](layer)]

    outputs = virtual.run(rank_main, ranks=4, deadline=DEADLINE, **way)
    assert_all_match(WEIGHTS, [[call] for call in CALLS], outputs)


def test_a_deadline_bounds_silence_and_not_the_length_of_a_call() -> None:
    """A call may take longer than the deadline as long as something of it moves."""
    cfg = config(hidden=512, intermediate=1024, max_tokens=512)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 512, rank) for rank in range(2)]

    def rank_main(world: World) -> float:
        layer = weights.layer(world)
        begin = time.monotonic()
        y = calls[world.rank](layer)
        seconds = time.monotonic() - begin
        assert_matches(weights, calls[world.rank], y)
        return seconds

    twin = TwinOptions(processors=1, jitter_us=50_000.0)
    assert max(virtual.run(rank_main, ranks=2, deadline=1.0, twin=twin)) > 1.0


def test_leaving_a_world_by_an_exception_ends_the_peers_calls_at_once() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        CALLS[world.rank](layer)
        world.control.barrier()
        if world.rank == 1:
            time.sleep(0.1)
            world.abort("enough")
            return
        message, _ = failed_call(lambda: CALLS[world.rank](layer))
        assert "rank 1 gave up" in message

    virtual.run(rank_main, ranks=4, deadline=100.0)


@ways
def test_an_error_in_one_virtual_rank_ends_the_run_with_it(way: Way) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        for number in range(100):
            if world.rank == 2 and number == 7:
                raise KeyError("the cause")
            CALLS[world.rank](layer)

    with pytest.raises(KeyError, match="the cause"):
        virtual.run(rank_main, ranks=4, deadline=100.0, **way)


# --- real processes -----------------------------------------------------------------------------


def process_ranks(
    function: Callable[[World], object], size: int, deadline: float, way: Way
) -> ForkedRanks:
    """Forked processes that find each other as under torchrun."""
    port = free_port()

    def live(rank: int) -> object:
        os.environ.update(torchrun_environment(rank, size, port))
        with moeos.init(deadline=deadline, **way) as world:
            return function(world)

    return ForkedRanks(live, size)


@pytest.mark.parametrize("way", [WAYS["one-thread"], WAYS["remote"]], ids=["direct", "remote"])
def test_processes_compute_what_virtual_ranks_compute(way: Way) -> None:
    def rank_main(world: World) -> list[list[float]]:
        y: list[list[float]] = CALLS[world.rank](WEIGHTS.layer(world)).tolist()
        return y

    before = shared_memory()
    processes = process_ranks(rank_main, 4, 20.0, way).ended()
    assert processes == virtual.run(rank_main, ranks=4, **way)
    assert shared_memory() == before


@pytest.mark.parametrize(
    ("number", "victim"),
    all_but(
        [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)],
        itertools.product([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP], [0, 2]),
    ),
    ids=str,
)
def test_a_process_that_ends_amid_the_calls_is_named_by_the_others(
    victim: int, number: signal.Signals
) -> None:
    """Whatever it was doing, rank 0 with the store of the control plane included."""

    amid = multiprocessing.get_context("fork").Semaphore(0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        CALLS[world.rank](layer)
        amid.release()
        for _ in range(1_000_000):
            CALLS[world.rank](layer)

    before = shared_memory()
    ranks = process_ranks(rank_main, 4, LONG_DEADLINE, WAYS["one-thread"])
    for _ in range(4):
        assert amid.acquire(timeout=60)
    time.sleep(0.2)
    ranks.signal(victim, number)
    survivors = [rank for rank in range(4) if rank != victim]
    outcomes = ranks.ended(ranks=survivors)
    ranks.signal(victim, signal.SIGKILL)
    assert ranks.ended(ranks=[victim]) == [None]
    for outcome in outcomes:
        assert isinstance(outcome, PeerTimeout), repr(outcome)
        assert re.search(
            rf"for rank {victim}, which owes (its row count|rows|results)", str(outcome)
        )
    assert shared_memory() == before


PROGRAM = """
import torch, moeos
torch.set_num_threads(1)
with moeos.init(deadline=5.0) as world:
    cfg = moeos.MoEConfig(hidden=64, intermediate=64, experts=6, top_k=2, max_tokens=64)
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    layer(x)
    if world.rank != 1:
        layer(x)
"""


@pytest.mark.nightly
def test_started_programs_end_with_the_sentence_when_one_never_calls() -> None:
    """As a person starts them: exit codes, what they print, nothing left behind."""
    before, port = shared_memory(), free_port()
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORTED + PROGRAM],
            env={**os.environ, **torchrun_environment(rank, 2, port)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [program.communicate(timeout=200)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert [program.returncode for program in programs] == [1, 0]
    assert "moeos.system.errors.PeerTimeout: rank" in printed[0], printed[0]
    assert "for rank 1, which owes its row count" in printed[0]
    assert shared_memory() == before
