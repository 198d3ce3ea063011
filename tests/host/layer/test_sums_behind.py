# SPDX-License-Identifier: Apache-2.0
"""`reduce="after"`: an all-reduce that ends early is told to all, and `reset` mends it.

Deadlines are far longer than what a test may take, where a signal or a word of a peer is to end a
wait.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import moeos
from moeos import MoELayer, PeerTimeout, World
from moeos._runtime import FailureKind
from moeos.engines.base import CallTensors
from tests.layers import Weights, assert_matches, config, draw_call, draw_weights
from tests.nightly import all_but, in_turn
from tests.process_group import ranks_of_torch

fork = multiprocessing.get_context("fork")

CFG = config(intermediate=192, max_tokens=70)
WEIGHTS = draw_weights(CFG)
CALLS = [draw_call(CFG, 9, number) for number in range(4)]
FAR = 300.0
NOT_THERE = "did not come (stuck, in another call, or ended: then start all ranks again)"


@contextmanager
def slices(deadline: float) -> Iterator[tuple[World, MoELayer, Any]]:
    """A world of all ranks, a layer that adds up behind its kernel, and its engine."""
    with moeos.init("twin", group=dist.group.WORLD, deadline=deadline) as world:
        layer = WEIGHTS.layer(world, parallel="tensor", reduce="after")
        yield world, layer, layer.experts.engine


def raised_by(do: Callable[[], object]) -> BaseException:
    try:
        do()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def require_right(layer: MoELayer, weights: Weights = WEIGHTS) -> None:
    for call in CALLS:
        assert_matches(weights, call, layer(call.x))


@pytest.mark.parametrize(
    "kind", all_but([KeyboardInterrupt], [KeyboardInterrupt, RuntimeError, TimeoutError])
)
def test_a_signal_amid_the_all_reduce_is_seen_at_once_told_to_the_peers_and_reset_mends_it(
    kind: type[BaseException],
) -> None:
    def handler(*_: object) -> NoReturn:
        raise kind

    interrupted = fork.Event()

    def rank_main(_: World) -> str:
        with slices(FAR) as (world, layer, engine):
            require_right(layer)
            really = engine._add_up

            def late(tensors: CallTensors) -> None:
                assert interrupted.wait(100)
                really(tensors)

            if world.rank == 0:
                signal.signal(signal.SIGINT, handler)

                def send() -> None:
                    while not engine._reduction._by._unfinished:
                        time.sleep(0.01)
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGINT)

                threading.Thread(target=send, daemon=True).start()
            if world.rank == 2:
                engine._add_up = late
            error: BaseException | None = None
            try:
                layer(CALLS[0].x)
            except BaseException as raised:
                error = raised
            if world.rank == 0:
                layer_again = raised_by(lambda: layer(CALLS[1].x))
                assert isinstance(layer_again, PeerTimeout)
            if world.rank < 2:
                interrupted.set()
            engine._add_up = really
            world.reset()
            require_right(layer)
            return repr(error)

    first, second, third = ranks_of_torch(rank_main, 3)
    assert first == f"{kind.__name__}()"
    assert second.startswith("PeerTimeout(")
    assert "rank 0 was interrupted by a signal in call 5" in second
    assert third == "None" or "rank 0 was interrupted" in third  # what all have sent is there


def test_sums_of_a_call_that_was_left_are_never_those_of_a_later_one() -> None:
    def rank_main(_: World) -> list[str]:
        with slices(FAR) as (world, layer, engine):
            require_right(layer)
            really = engine._add_up

            def leave(tensors: CallTensors) -> NoReturn:
                if world.rank == 1:  # which has sent its part
                    engine._reduction._by._gloo.allreduce([tensors.out.clone()])
                raise KeyboardInterrupt  # before anybody is told of it

            engine._add_up, give_up = leave, engine._shared.give_up
            engine._shared.give_up = lambda **_: None
            said = [repr(raised_by(lambda: layer(CALLS[0].x)))]
            engine._add_up, engine._shared.give_up = really, give_up
            said += [repr(raised_by(lambda: layer(CALLS[1].x))) for _ in range(2)]
            world.reset()
            require_right(layer)
            return said

    for left, *later in ranks_of_torch(rank_main, 2):
        assert left == "KeyboardInterrupt()"
        assert all(said.startswith("PeerTimeout(") for said in later)
        assert "all ranks may call reset()" in later[0].lower()


def test_reset_mends_what_a_rank_that_did_not_come_has_broken() -> None:
    def rank_main(_: World) -> str:
        with slices(1.0) as (world, layer, engine):
            require_right(layer)
            really = engine._add_up
            if world.rank == 1:
                engine._add_up = lambda tensors: time.sleep(2.0)
            error: BaseException | None = None
            try:
                layer(CALLS[0].x)
            except PeerTimeout as raised:
                error = raised
            engine._add_up = really
            world.reset()
            require_right(layer)
            world.reset()
            require_right(layer)
            return str(error)

    first, second = ranks_of_torch(rank_main, 2)
    assert first.startswith("rank 0: the all-reduce of partial sums (reduce='after') ended without")
    assert f"within 1 s: rank 1 {NOT_THERE}" in first
    assert second == "None"


@pytest.mark.parametrize(("killed", "connected"), in_turn([0, 2], [True, False]))
def test_a_rank_that_is_killed_amid_the_all_reduce_is_named(killed: int, connected: bool) -> None:
    """But for rank 0: it serves the store, in which others say that they wait."""

    def rank_main(_: World) -> str:
        with slices(3.0) as (world, layer, engine):
            if connected:
                require_right(layer)
            if world.rank == killed:
                engine._add_up = lambda tensors: os.kill(os.getpid(), signal.SIGKILL)
            return str(raised_by(lambda: layer(CALLS[0].x)))

    said = ranks_of_torch(rank_main, 3, killed=[killed])
    del said[killed]
    which = f"{killed} {NOT_THERE}"
    named = [which if killed else "the ranks' store", "gave up"]
    assert any(named[0] in one for one in said), said
    assert all(any(word in one for word in named) for one in said), said
    assert all("reset()" in one for one in said)


def test_connections_and_threads_of_sums_go_with_their_workspace() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def rank_main(world: World) -> int:
        def once() -> None:
            workspace = moeos.Workspace(world)
            layer = WEIGHTS.layer(world, workspace=workspace, parallel="tensor", reduce="after")
            require_right(layer)
            workspace.close()

        once()
        before = threads()
        for _ in range(5):
            once()
        gc.collect()
        for _ in range(1000):
            if threads() <= before:
                break
            time.sleep(0.01)
        return threads() - before

    assert max(ranks_of_torch(rank_main, 2)) <= 0


def test_what_a_call_has_given_up_writes_nothing_later() -> None:
    given_up = fork.Event()

    def rank_main(_: World) -> bool:
        with slices(FAR) as (world, layer, engine):
            require_right(layer)
            really, out = engine._add_up, torch.empty_like(CALLS[0].x)
            if world.rank == 0:
                rank = engine._shape.rank

                def look() -> NoReturn:
                    raise KeyboardInterrupt

                engine._add_up = lambda tensors: engine._reduction.add_up(tensors.out, look)
                assert isinstance(raised_by(lambda: layer(CALLS[0].x, out=out)), KeyboardInterrupt)
                kept = out.clone()
                given_up.set()
                world.control.barrier()
                assert torch.equal(out, kept)
                assert rank.failure().kind == FailureKind.INTERRUPTED
            else:
                engine._add_up = lambda tensors: (given_up.wait(100), really(tensors))
                with contextlib.suppress(PeerTimeout):  # what it has sent is sent
                    layer(CALLS[0].x, out=out)
                world.control.barrier()
            engine._add_up = really
            world.reset()
            require_right(layer)
            return True

    assert ranks_of_torch(rank_main, 2) == [True, True]
