# SPDX-License-Identifier: Apache-2.0
"""Experts that move while a rank is interrupted, killed or stuck: all ranks hear of it, and no
layer mixes experts of before and of behind."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import moeos
from moeos import MoELayer, PeerTimeout, World
from moeos.layer import moving, replacing
from moeos.world.control import SoloControl
from moeos.world.world import MARGIN
from tests.host.partition.test_placement import COPIES, MOVED, WEIGHTS, right
from tests.processes import ForkedRanks, free_port, torchrun_environment

RANKS = 3
SOON, FAR = 3.0, 300.0
"""Seconds: a deadline that a test waits for, and one that no test lives to see."""


def ranks_of_gloo(rank_main: Callable[[World], Any], deadline: float) -> list[Any]:
    """What `rank_main(world)` returns or raises on each of three processes; None of a dead one."""
    port, store = free_port(), free_port()

    def live(rank: int) -> Any:
        torch.set_num_threads(1)
        os.environ.update(torchrun_environment(rank, RANKS, port))
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=RANKS
        )
        # Not by `with`: a rank's error is no abort, and others are to find it out.
        world = moeos.init("twin", deadline=deadline)
        try:
            return rank_main(world)
        finally:
            world.close()  # and whoever serves the store waits for the others

    return ForkedRanks(live, RANKS).ended(120.0)


def amid_replace(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None], rank: int = 0) -> None:
    """Does it on one rank, once, when its experts are about to be sent, and those of others."""
    really = dist.batch_isend_irecv
    done: list[bool] = []
    arrived = multiprocessing.get_context("fork").Semaphore(0)

    def moves(operations: list[Any]) -> list[Any]:
        if dist.get_rank() == rank and not done:
            done.append(True)
            for _ in range(RANKS - 1):
                arrived.acquire(timeout=SOON / 3)  # a rank may have nothing to send
            do()
        arrived.release()
        return really(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", moves)


def replaced(layer: MoELayer) -> str:
    """What a replace raises, with its kind."""
    try:
        layer.replace(MOVED)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "moved"


class Boom(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_a_rank_that_is_interrupted_is_named_and_nothing_moves(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> NoReturn:
        raise kind

    amid_replace(monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))

    def rank_main(world: World) -> list[str]:
        signal.signal(signal.SIGUSR1, handler)
        layer = WEIGHTS.layer(world, placement=COPIES)
        first = replaced(layer)
        assert layer.placement == COPIES
        right(layer)
        world.reset()
        second = replaced(layer)
        right(layer)
        return [first, second]

    first, *others = ranks_of_gloo(rank_main, FAR)
    assert first == [f"{kind.__name__}: ", "moved"]
    for rank, (sentence, second) in enumerate(others, 1):
        assert sentence.startswith(
            "PeerTimeout: rank 0 was interrupted by a signal in MoELayer.replace "
            f"({kind.__name__}), and with it rank {rank}: no expert has moved"
        ), sentence
        assert second == "moved"


def test_an_interrupt_behind_the_last_word_comes_when_experts_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = replacing.require_on_all

    def require(world: World, *given: Any, since: float | None = None) -> None:
        really(world, *given, since=since)
        if since is not None and world.rank == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(replacing, "require_on_all", require)

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world, placement=COPIES)
        said = replaced(layer)
        assert layer.placement == MOVED
        right(layer)
        return said

    assert ranks_of_gloo(rank_main, FAR) == ["KeyboardInterrupt: ", "moved", "moved"]


@pytest.mark.parametrize(
    ("killed", "named"),
    [
        (2, "rank 2 did not arrive"),
        (0, "lost the store .* .rank 0 or its launcher serves it"),
    ],
)
def test_a_killed_rank_is_named_at_the_deadline_and_no_layer_goes_on(
    killed: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amid_replace(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL), killed)

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world, placement=COPIES)
        before = layer.w1.clone()
        said = replaced(layer)
        assert layer.placement == COPIES
        assert torch.equal(layer.w1, before)
        with pytest.raises(PeerTimeout, match="gave up"):  # where others are is not known
            right(layer)
        return said

    outcomes = ranks_of_gloo(rank_main, SOON)
    assert outcomes.pop(killed) is None
    for sentence in outcomes:
        assert re.match(f"PeerTimeout: .*{named}", sentence), sentence
        assert "has its experts as before, and others may have moved theirs" in sentence


def test_a_rank_that_does_not_come_is_named_with_a_remedy_and_nothing_moves() -> None:
    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world, placement=COPIES)
        said = "nothing" if world.rank == 2 else replaced(layer)
        assert layer.placement == COPIES
        return said

    *found, last = ranks_of_gloo(rank_main, 1.0)
    assert last == "nothing"
    for sentence in found:
        assert re.match("PeerTimeout: .*rank 2 did not arrive", sentence), sentence
        assert "close it on all of them, and make it and its layers again" in sentence
        assert sentence.endswith("No expert has moved")


def test_all_of_a_move_has_one_deadline_and_five_seconds() -> None:
    """However long a rank's experts took, which others may have waited for meanwhile."""
    waits: list[float] = []

    class Control(SoloControl):
        def allgather(self, value: Any, what: str = "", *, beyond: float = 0.0) -> list[Any]:
            waits.append(beyond)
            return [value]

    with moeos.init("twin", deadline=SOON) as world:
        world.control = Control()
        for took in (0.0, 2.0, SOON, 60.0):
            replacing.require_on_all(world, None, None, since=time.monotonic() - took)
        replacing.require_on_all(world, None, None)
    for took, beyond in zip((0.0, 2.0, SOON), waits, strict=False):
        assert took + SOON + beyond <= SOON + MARGIN + 0.1
    at_least, before = waits[3:]
    assert SOON + at_least == 1.0  # and others find what it has told
    assert before == 0.0


def test_a_rank_that_is_stuck_is_named_at_the_deadline_and_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stuck() -> None:
        threading.Event().wait()

    amid_replace(monkeypatch, stuck)

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world, placement=COPIES)
        said = replaced(layer)
        assert layer.placement == COPIES
        right(layer)
        return said

    for rank, sentence in enumerate(ranks_of_gloo(rank_main, SOON)):
        begins = f"PeerTimeout: rank {rank} of 3 waited 3 s for experts from or to rank"
        assert sentence.startswith(begins), sentence
        if rank > 0:
            assert re.match("s? 0", sentence.removeprefix(begins)), sentence


class Request:
    """An operation of a GPU, whose own wait would not return before it has ended."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, limit: datetime.timedelta | None = None) -> bool:
        assert self.looks < 0, "the stream would wait for what may never end"
        return True


def test_an_operation_of_a_gpu_is_looked_at_until_the_deadline() -> None:
    assert moving._arrives(Request(3), time.monotonic() + FAR, polled=True)
    assert not moving._arrives(Request(10**9), time.monotonic() + 0.01, polled=True)
