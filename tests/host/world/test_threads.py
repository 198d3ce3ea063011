# SPDX-License-Identifier: Apache-2.0
"""Threads that share a layer, close its world or delete it: every call right or an error, no crash.

Every deadline is far longer than what a test may take: what is seen only there fails the test by
the limit on its threads or processes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import moeos
from moeos import MoELayer, PeerTimeout, TwinOptions, World
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan
from tests import programs
from tests.layers import Weights, assert_matches, config, draw_call, draw_weights
from tests.nightly import all_but
from tests.processes import ForkedRanks, free_port, torchrun_environment

FAR = 120.0  # seconds
CFG = config(max_tokens=64)
WEIGHTS = draw_weights(CFG)
OTHERS = [WEIGHTS, *(draw_weights(CFG, seed) for seed in (1, 2))]

WAYS: dict[str, dict[str, Any]] = {
    "one-thread": {"twin": TwinOptions(processors=1)},
    "split-os": {"twin": TwinOptions(processors=2, split_os=True)},
    "remote": {"twin": TwinOptions(processors=1), "ranks_per_node": 1},
    "jitter": {"twin": TwinOptions(processors=1, jitter_us=50.0)},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=[*WAYS])


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Runs `work(number)` in so many threads at once; raises the first error of any."""
    errors: list[BaseException] = []

    def live(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR)
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"
    if errors:
        raise errors[0]


def call_and_compare(
    layers: Sequence[MoELayer], weights: Sequence[Weights], calls: int, seed: int
) -> None:
    """Calls of many sizes of all layers in turn, each compared with the float64 reference."""
    for number in range(calls):
        for layer, mine in zip(layers, weights, strict=True):
            call = draw_call(CFG, (seed + 13 * number) % (CFG.max_tokens + 1), seed + number)
            assert_matches(mine, call, call(layer), f"call {number} of the thread with {seed}")


@pytest.mark.parametrize(
    ("threads", "way"),
    all_but([(8, WAYS["split-os"]), (2, WAYS["remote"])], itertools.product([2, 8], WAYS.values())),
)
def test_every_call_of_a_layer_that_threads_share_is_right(
    threads: int, way: dict[str, Any]
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        in_threads(
            threads,
            lambda number: call_and_compare([layer], [WEIGHTS], 6, 100 * number + world.rank),
        )

    virtual.run(rank_main, ranks=4, deadline=FAR, **way)


def test_every_call_of_a_layer_that_threads_of_processes_share_is_right() -> None:
    port = free_port()

    def rank_main(rank: int) -> str:
        os.environ.update(torchrun_environment(rank, 2, port))
        with moeos.init(deadline=FAR) as world:
            layer = WEIGHTS.layer(world)
            in_threads(
                4, lambda number: call_and_compare([layer], [WEIGHTS], 10, 100 * number + rank)
            )
        return "right"

    assert ForkedRanks(rank_main, 2).ended(FAR) == ["right"] * 2


def test_layers_that_threads_call_in_another_order_on_every_rank_are_right() -> None:
    """Each has a workspace of its own, so none waits for another."""

    def rank_main(world: World) -> None:
        layers = [weights.layer(world, moeos.Workspace(world)) for weights in OTHERS]

        def work(number: int) -> None:
            order = (number + world.rank) % len(layers)  # of the threads' starts
            time.sleep(0.01 * order)
            call_and_compare([layers[number]], [OTHERS[number]], 10, 10 * number + world.rank)

        in_threads(len(layers), work)

    virtual.run(rank_main, ranks=4, deadline=FAR)


def test_what_a_thread_reads_of_a_layer_is_of_one_call_whatever_the_others_do() -> None:
    sizes = (1, 30, 64)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        layer(draw_call(CFG, sizes[0], 0).x)
        done = threading.Event()

        def work(number: int) -> None:
            if number > 0:
                while not done.is_set():
                    stats = layer.stats()
                    assert stats["tokens"] in sizes
                    assert sum(stats["pairs_sent"]) == stats["tokens"] * CFG.top_k
                    assert layer.trace().events
                    layer.check()
            else:
                try:
                    for tokens in sizes * 10:
                        layer(draw_call(CFG, tokens, 0).x)
                finally:
                    done.set()

        in_threads(3, work)

    virtual.run(rank_main, ranks=2, deadline=FAR, trace_events=256)


def test_layers_are_reset_from_several_threads() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call_and_compare([layer], [WEIGHTS], 2, world.rank)
        in_threads(2, lambda number: layer.reset())
        call_and_compare([layer], [WEIGHTS], 2, world.rank)

    virtual.run(rank_main, ranks=2, deadline=FAR)


def closed_beside(world: World, layer: MoELayer, threads: int) -> list[BaseException]:
    """What threads that call a layer for ever get when the world is closed."""
    errors: list[BaseException] = []
    x = draw_call(CFG, 64, 0).x
    begun = threading.Barrier(threads + 1)

    def work() -> None:
        begun.wait(FAR)
        try:
            while True:
                layer(x)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    begun.wait(FAR)
    while not any(gate.busy for gate in world._gates()):  # till one is in a call
        time.sleep(0.001)
    world.close()
    for worker in workers:
        worker.join(FAR)
    assert len(errors) == threads, "a thread does not end"
    return errors


@pytest.mark.parametrize("attempt", range(5))
def test_closing_a_world_ends_the_calls_of_other_threads_with_an_error(attempt: int) -> None:
    with moeos.init(backend="twin", deadline=FAR) as world:
        errors = closed_beside(world, WEIGHTS.layer(world), 1 + attempt)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "the world of rank 0" in str(error)
        assert "closed" in str(error)


def test_closing_a_world_ends_a_call_that_waits_for_a_peer_and_the_peer_is_told() -> None:
    """Rank 1 never calls before rank 0's world is closed."""

    def rank_main(world: World) -> BaseException:
        layer = WEIGHTS.layer(world)
        if world.rank == 0:
            (error,) = closed_beside(world, layer, 1)
            return error
        while not layer_is_left.is_set():
            time.sleep(0.01)
        with pytest.raises(PeerTimeout) as raised:
            layer(draw_call(CFG, 5, 0).x)
        return raised.value

    layer_is_left = threading.Event()

    def live(world: World) -> BaseException:
        try:
            return rank_main(world)
        finally:
            if world.rank == 0:
                layer_is_left.set()

    closed, told = virtual.run(live, ranks=2, deadline=FAR)
    assert str(closed) == "the world of rank 0 was closed during this call"
    assert "rank 0 gave up" in str(told)


def test_a_call_and_a_close_within_a_call_of_the_same_thread_are_errors() -> None:
    """A signal's handler runs within the call that the main thread makes."""
    hold = Fault(kind="delay", rank=0, call=1, stage="start", seconds=0.5)
    errors: list[BaseException] = []
    x = draw_call(CFG, 40, 0)

    def handler(number: int, frame: FrameType | None) -> None:
        for what in (lambda: layer(x.x), layer.stats, layer.reset, world.close):
            try:
                what()
            except RuntimeError as error:
                errors.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        plan = FaultPlan(faults=(hold,))
        with moeos.init(backend="twin", deadline=FAR, faults=plan) as world:
            layer = WEIGHTS.layer(world)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert_matches(WEIGHTS, x, x(layer))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(errors) == 4
    assert all("in a call" in str(error) for error in errors[:3])
    assert "cannot be closed within a call in the same thread" in str(errors[3])


def test_a_close_within_a_call_does_not_wait_for_one_in_another_thread() -> None:
    """Which waits for the call."""
    taken, free = threading.Event(), threading.Event()
    with moeos.init(backend="twin", deadline=FAR) as world:

        def close_elsewhere() -> None:
            with world._closing:
                taken.set()
                assert free.wait(FAR)

        thread = threading.Thread(target=close_elsewhere)
        thread.start()
        assert taken.wait(FAR)
        try:
            with pytest.raises(RuntimeError, match="cannot be closed within a call"):
                world.gate.run(world.close)
        finally:
            free.set()
            thread.join(FAR)


def test_a_layer_may_be_called_while_another_thread_moves_it_to_where_it_is() -> None:
    x = draw_call(CFG, 40, 0)
    with moeos.init(backend="twin") as world:
        layer = WEIGHTS.layer(world)

        def call_and_keep(tensor: torch.Tensor) -> torch.Tensor:
            assert_matches(WEIGHTS, x, x(layer))
            return tensor

        layer._apply(call_and_keep)


AT_THE_END = f"""
import sys, threading, time, torch, moeos
world = moeos.init(backend="twin", deadline={FAR})
cfg = moeos.MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2, dtype=torch.float32,
                      max_tokens=128)
layer = moeos.MoELayer(cfg, world).requires_grad_(False)
x = torch.randn(128, 64)
begun = threading.Event()

def call():
    while True:
        begun.set()
        layer(x)

for _ in range(int(sys.argv[1])):
    threading.Thread(target=call, daemon=True).start()
begun.wait()
time.sleep(0.05)
sys.exit(7)
"""


def ended(program: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return programs.ended(program, *arguments, environment=changes, seconds=FAR)


def assert_ends_well(threads: int) -> None:
    found = ended(AT_THE_END, str(threads))
    assert (found.returncode, found.stdout, found.stderr) == (7, "", "")


@pytest.mark.parametrize("threads", all_but([4], [1, 4]))
def test_a_program_ends_with_its_own_status_beside_calls_of_daemon_threads(threads: int) -> None:
    assert_ends_well(threads)


@pytest.mark.nightly
@pytest.mark.parametrize("attempt", range(20))
def test_programs_end_with_their_own_status_beside_calls_of_daemon_threads(attempt: int) -> None:
    assert_ends_well(1 + attempt % 4)


def test_a_program_that_ends_in_a_call_which_waits_for_a_peer_tells_the_peer() -> None:
    """Rank 0 calls on a daemon thread and ends; rank 1 calls when it has."""
    port = free_port()
    over = multiprocessing.get_context("fork").Event()

    def rank_main(rank: int) -> object:
        os.environ.update(torchrun_environment(rank, 2, port))
        if rank == 0:
            found = ended(AT_THE_END, "2", **torchrun_environment(rank, 2, port))
            over.set()
            return found.returncode, found.stdout, found.stderr
        with moeos.init(backend="twin", deadline=100.0) as world:  # as of AT_THE_END
            layer = MoELayer(config(max_tokens=128), world).requires_grad_(False)
            assert over.wait(FAR)
            layer(torch.randn(128, 64))
        return None

    first, second = ForkedRanks(rank_main, 2).ended(FAR)
    assert first == (7, "", "")
    assert isinstance(second, PeerTimeout)
    assert "rank 0 gave up" in str(second)


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def heaps_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("moeos-heap")


def test_a_hundred_layers_made_and_deleted_hold_no_more_than_one() -> None:
    cfg = config(max_tokens=1024)
    x = torch.randn(1024, cfg.hidden)
    with moeos.init(backend="twin", deadline=FAR, twin=TwinOptions(processors=2)) as world:

        def make_and_delete(count: int) -> None:
            for _ in range(count):
                MoELayer(cfg, world)(x)

        make_and_delete(5)
        threads, kib = native_threads(), resident_kib()
        make_and_delete(96)
        assert native_threads() <= threads  # some of a test before may have ended meanwhile
        assert resident_kib() < kib + 20 * 1024  # a layer has touched 4 MiB


def test_layers_deleted_at_other_times_on_every_rank_give_back_all_they_hold() -> None:
    """Some are in reference cycles, so that the garbage collector finds them, sooner or later."""
    port = free_port()

    def rank_main(rank: int) -> tuple[int, int]:
        os.environ.update(torchrun_environment(rank, 2, port))
        with moeos.init(backend="twin", deadline=FAR, twin=TwinOptions(processors=1)) as world:
            kept = WEIGHTS.layer(world)
            call_and_compare([kept], [WEIGHTS], 1, rank)
            gc.collect()
            threads, heaps = native_threads(), heaps_mapped()
            assert heaps == 2
            for number in range(20):
                layer = WEIGHTS.layer(world)
                if number % 3 == rank:
                    layer.itself = [layer]  # type: ignore[assignment]
                call_and_compare([layer, kept], [WEIGHTS, WEIGHTS], 2, number + rank)
                del layer
                if number % 5 == 2 * rank:
                    gc.collect()
            gc.collect()
            return native_threads() - threads, heaps_mapped() - heaps

    assert ForkedRanks(rank_main, 2).ended(FAR) == [(0, 0)] * 2


def test_a_close_beside_the_making_of_a_layer_keeps_nothing_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither waits for the other: the layer is made, and the world then closed."""
    world = moeos.init("twin", deadline=5.0)
    begun = threading.Event()
    workspace = World.workspace.fget
    assert workspace is not None

    def late(world: World) -> Any:
        begun.set()
        while not world.closed:
            time.sleep(0.001)
        world.abort("as a rank does whose peer is gone")
        return workspace(world)

    monkeypatch.setattr(World, "workspace", property(late))

    def live(number: int) -> None:
        if number == 0:
            with contextlib.suppress(RuntimeError):  # that the world is closed
                WEIGHTS.layer(world)
        else:
            begun.wait(FAR)
            world.close()  # raises, if the other one does not end

    in_threads(2, live)
    assert world.closed


def test_a_layer_may_be_deleted_while_its_world_is_aborted_and_closed() -> None:
    def rank_main(world: World) -> None:
        layers = [WEIGHTS.layer(world) for _ in range(10)]
        world.control.barrier()

        def work(number: int) -> None:
            if number == 0:
                while layers:
                    layers.pop()
            elif number == 1:
                for _ in range(10):
                    world.interrupt("a test")
            else:
                time.sleep(0.002)
                world.close()

        in_threads(3, work)

    virtual.run(rank_main, ranks=4, deadline=FAR)


def test_a_world_in_a_reference_cycle_that_nobody_closed_ends_with_its_layers() -> None:
    threads = native_threads()
    for _ in range(5):
        world = moeos.init(backend="twin", twin=TwinOptions(processors=2))
        layer = WEIGHTS.layer(world)
        call_and_compare([layer], [WEIGHTS], 1, 0)
        world.itself = [world, layer]  # type: ignore[attr-defined]
        del world, layer
    gc.collect()
    assert native_threads() <= threads  # others may have ended
