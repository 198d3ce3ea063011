# SPDX-License-Identifier: Apache-2.0
"""Signals: waits see them, who is interrupted is named, and threads end before Python does.

Deadlines are far longer than what a test may take: a signal that is seen only at the deadline fails
it by the limit on its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import moeos
from moeos import MoELayer, PeerTimeout, TwinOptions, World
from moeos.engines.twin.workspace import TwinWorkspace
from moeos.system.held_signals import HeldSignals
from moeos.world.faults import Fault, FaultPlan
from tests.layers import assert_matches, config, draw_call, draw_weights
from tests.nightly import in_turn
from tests.processes import IMPORTED, MOEOS, ROOT, ForkedRanks, free_port, torchrun_environment

fork = multiprocessing.get_context("fork")

FAR = 300.0  # seconds: a deadline that no test lives to see
CFG = config(max_tokens=64)
WEIGHTS = draw_weights(CFG)
CALLS = [draw_call(CFG, 40 + rank, rank) for rank in range(4)]


def process_ranks(function: Callable[[World], Any], size: int = 4, **way: Any) -> list[Any]:
    """What `function(world)` returns or raises on each of some forked processes."""
    port = free_port()

    def live(rank: int) -> object:
        os.environ.update(torchrun_environment(rank, size, port))
        with moeos.init(deadline=FAR, **way) as world:
            return function(world)

    return ForkedRanks(live, size).ended(150.0)


def signal_in(function: str, number: signal.Signals = signal.SIGINT, times: int = 1) -> None:
    """Sends a signal to this process when its main thread waits in a function of that name."""
    main = threading.main_thread().ident
    assert main is not None

    def waiting() -> bool:
        frame: FrameType | None = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == function and "moeos" in frame.f_globals["__name__"]:
                return True
            frame = frame.f_back
        return False

    def send() -> None:
        for _ in range(times):
            while not waiting():
                time.sleep(0.01)
            time.sleep(0.1)  # it may have been about to leave
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


INTERRUPTED: dict[str, dict[str, Any]] = {
    "direct": {},
    "remote": {"ranks_per_node": 1},
    "split-os": {"twin": TwinOptions(processors=1, split_os=True)},
}


@pytest.mark.parametrize(("name", "victim"), in_turn(INTERRUPTED, [0, 2]))
def test_an_interrupted_call_raises_at_once_is_named_by_the_peers_and_reset_recovers(
    name: str, victim: int
) -> None:
    way = INTERRUPTED[name]
    absent = 3  # so that the others wait
    interrupted = fork.Event()

    def rank_main(world: World) -> BaseException:
        layer, call = WEIGHTS.layer(world), CALLS[world.rank]
        call(layer)
        if world.rank == victim:
            signal_in("forward")
        if world.rank == absent:
            assert interrupted.wait(100)
        error = raised_by(lambda: call(layer))
        interrupted.set()
        layer.reset()
        for _ in range(3):
            assert_matches(WEIGHTS, call, call(layer))
        return error

    errors = process_ranks(rank_main, **way)
    assert isinstance(errors[victim], KeyboardInterrupt), repr(errors[victim])
    for rank in {0, 1, 2, 3} - {victim}:
        assert isinstance(errors[rank], PeerTimeout), repr(errors[rank])
        assert f"rank {victim} was interrupted by a signal in call 2" in str(errors[rank])


def test_a_rank_alone_goes_on_behind_an_interrupted_call_and_one_that_gave_up_does_not() -> None:
    stall = Fault(kind="stall", rank=0, call=2, stage="product0")

    def rank_main(world: World) -> list[str]:
        layer, call = WEIGHTS.layer(world), CALLS[0]
        call(layer)
        signal_in("forward")
        said = [repr(raised_by(lambda: call(layer)))]
        for _ in range(3):
            assert_matches(WEIGHTS, call, call(layer))
        world.interrupt("of a test")
        return said + [repr(raised_by(lambda: call(layer))) for _ in range(2)]

    [[interrupted, *given_up]] = process_ranks(rank_main, 1, faults=FaultPlan(faults=(stall,)))
    assert interrupted == "KeyboardInterrupt()"
    for said in given_up:
        assert "PeerTimeout" in said
        assert "rank 0 gave up" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGALRM])
def test_whatever_a_handler_raises_comes_out_of_the_call(number: signal.Signals) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(7) if number == signal.SIGTERM else LookupError("of a handler")

    interrupted = fork.Event()

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        if world.rank == 0:
            signal.signal(number, handle)
            signal_in("forward", number)
        else:
            assert interrupted.wait(100)
        error = raised_by(lambda: CALLS[world.rank](layer))
        interrupted.set()
        return repr(error)

    expected = "SystemExit(7)" if number == signal.SIGTERM else "LookupError('of a handler')"
    first, second = process_ranks(rank_main, 2)
    assert first == expected
    assert second.startswith("PeerTimeout(")
    assert "rank 0 was interrupted" in second


def test_a_handler_that_returns_lets_the_call_go_on() -> None:
    handled = fork.Semaphore(0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        if world.rank == 0:
            signal.signal(signal.SIGUSR1, lambda *_: handled.release())
            signal_in("forward", signal.SIGUSR1, times=3)
        else:
            for _ in range(3):
                assert handled.acquire(timeout=100)
        for _ in range(3):
            assert_matches(WEIGHTS, CALLS[world.rank], CALLS[world.rank](layer))

    assert process_ranks(rank_main, 2) == [None, None]


def test_an_interrupted_exchange_raises_at_once_and_ends_those_of_the_peers() -> None:
    interrupted = fork.Event()

    def rank_main(world: World) -> BaseException:
        if world.rank == 1:
            signal_in("_wait")
            assert isinstance(raised_by(world.control.barrier), KeyboardInterrupt)
            interrupted.set()
        else:
            assert world.rank == 0 or interrupted.wait(100)
            # A rank that is interrupted has posted before: this one may still end well.
            with contextlib.suppress(PeerTimeout):
                world.control.barrier()
        return raised_by(world.control.barrier)

    for error in process_ranks(rank_main, 3):
        assert isinstance(error, PeerTimeout), repr(error)
        assert "rank 1 gave up: KeyboardInterrupt in a barrier" in str(error)


@pytest.mark.parametrize("kind", [ValueError, TimeoutError])
def test_what_a_handler_raises_comes_out_of_an_exchange_and_ends_those_of_the_peers(
    kind: type[Exception],
) -> None:
    """Amid a question to the store, too, whose own errors mean that it is lost."""

    def rank_main(world: World) -> BaseException:
        if world.rank == 0:
            world.control.barrier()
            return raised_by(lambda: [world.control.barrier() for _ in range(1000)])
        world.control.barrier()

        def handler(number: int, frame: FrameType | None) -> None:
            raise kind("of the handler")

        signal.signal(signal.SIGALRM, handler)
        signal_in("result", signal.SIGALRM)
        return raised_by(lambda: [world.control.barrier() for _ in range(1000)])

    of_peer, own = process_ranks(rank_main, 2)
    assert isinstance(own, kind), repr(own)
    assert f"rank 1 gave up: {kind.__name__} in a barrier" in str(of_peer)


@pytest.mark.parametrize("step", ["clear", "_free"])
def test_what_a_handler_raises_amid_a_reset_or_a_growth_comes_behind_its_change(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace that is cleared, or replaced, in part would be written where nobody reads."""
    done: list[str] = []
    of_step = getattr(TwinWorkspace, step)

    def interrupted(self: TwinWorkspace, *arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        of_step(self, *arguments)
        done.append(step)

    def handler(number: int, frame: FrameType | None) -> None:
        raise ValueError("of the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with moeos.init(backend="twin", deadline=FAR) as world:
            layer = WEIGHTS.layer(world)
            with monkeypatch.context() as patched:
                patched.setattr(TwinWorkspace, step, interrupted)
                larger = dataclasses.replace(layer.cfg, max_tokens=4 * layer.cfg.max_tokens)
                change = world.reset if step == "clear" else lambda: MoELayer(larger, world)
                with pytest.raises(ValueError, match="of the handler"):
                    change()
            assert done
            world.reset()
            for _ in range(2):
                assert_matches(WEIGHTS, CALLS[0], CALLS[0](layer))
            MoELayer(larger, world)
            assert_matches(WEIGHTS, CALLS[0], CALLS[0](layer))
    finally:
        signal.signal(signal.SIGALRM, before)


# --- Ctrl-C and virtual ranks -------------------------------------------------------------------

IN_CALLS = """
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    say(world)
    while True:
        layer(x)
"""
WHILE_ONE_WAITS = """
    layer = moeos.MoELayer(cfg, world)
    say(world)
    if world.rank == 1:
        while True:
            pass
    layer(torch.randn(50, 64).bfloat16())
"""
WHILE_LAYERS_ARE_MADE = """
    say(world)
    while True:
        moeos.MoELayer(cfg, world)
"""
IN_PYTHON = """
    say(world)
    while True:
        pass
"""
IN_DESTRUCTORS = """
    class Slow:
        def __del__(self):
            for _ in range(100_000):
                pass
    say(world)
    while True:
        Slow().__del__()
"""
WHILE_RANKS_RUN_RANKS = """
    def inner_main(inner):
        layer = moeos.MoELayer(cfg, inner)
        x = torch.randn(50, 64).bfloat16()
        say(world)
        while True:
            layer(x)
    moeos.virtual.run(inner_main, 2, deadline=300.0)
"""
PROGRAM = """
import os, signal, sys, torch, moeos
cfg = moeos.MoEConfig(hidden=64, intermediate=64, experts=8, top_k=2, max_tokens=64)
def say(world):
    if world.rank == 0:
        print("there", flush=True)
def rank_main(world):
    try:
        work(world)
    finally:
        if {again}:
            os.kill(os.getpid(), signal.SIGINT)
def work(world):
{body}
print("before", flush=True)
moeos.virtual.run(rank_main, 4, deadline=300.0)
"""


def interrupted(command: list[str], line: str) -> tuple[int, str]:
    """Status and stderr of a program that gets SIGINT when it prints a line that begins so."""
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        while not program.stdout.readline().startswith(line):
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        printed = program.communicate(timeout=150)[1]
        return program.returncode, printed
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("body", "line", "again"),
    [
        pytest.param(IN_CALLS, "there", True, id="in-calls-again"),
        pytest.param(IN_PYTHON, "there", False, id="in-python"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.nightly)
            for name, case in {
                "before-layers": (IN_CALLS, "before", False),
                "before-layers-again": (IN_CALLS, "before", True),
                "in-calls": (IN_CALLS, "there", False),
                "one-waits": (WHILE_ONE_WAITS, "there", False),
                "one-waits-again": (WHILE_ONE_WAITS, "there", True),
                "while-made-again": (WHILE_LAYERS_ARE_MADE, "there", True),
                "while-made": (WHILE_LAYERS_ARE_MADE, "there", False),
                "in-python-again": (IN_PYTHON, "there", True),
                "in-destructors": (IN_DESTRUCTORS, "there", False),
                "ranks-in-ranks": (WHILE_RANKS_RUN_RANKS, "there", False),
            }.items()
        ),
    ],
)
def test_ctrl_c_ends_virtual_ranks_by_keyboard_interrupt_alone(
    body: str, line: str, again: bool
) -> None:
    program = PROGRAM.format(body=body, again=again)
    status, printed = interrupted([sys.executable, "-c", IMPORTED + program], line)
    assert status == -signal.SIGINT, printed  # a shell makes 130 of it
    assert printed.startswith("Traceback (most recent call last):"), printed
    assert printed.endswith("\nKeyboardInterrupt\n"), printed
    assert printed.count("Traceback") == 1, printed


def test_ctrl_c_ends_the_command_with_status_130_and_nothing_on_stderr(tmp_path: Path) -> None:
    config_file = tmp_path / "layer.toml"
    config_file.write_text(
        "hidden = 64\nintermediate = 64\nexperts = 8\ntop_k = 2\nmax_tokens = 64\n"
        "[run]\niterations = 10000\n"
    )
    command = [sys.executable, "-c", MOEOS, "run", str(config_file), "--ranks", "4"]
    assert interrupted(command, "10000 calls") == (130, "")


def test_signals_are_held_back_until_the_work_has_ended() -> None:
    seen: list[int] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        seen.append(len(seen))
        raise LookupError(seen[-1])

    def work() -> None:
        with HeldSignals() as held:
            assert held.raised is None
            for number in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                while len(seen) == number:
                    time.sleep(0.001)
            assert isinstance(held.raised, LookupError)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(LookupError, match="0"):
            work()
        assert seen == [0, 1]
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_set_while_signals_are_held_stays() -> None:
    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as who lets the second one through

    before = signal.signal(signal.SIGUSR1, first)
    try:
        with HeldSignals() as held:
            os.kill(os.getpid(), signal.SIGUSR1)
            while signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
                time.sleep(0.001)
        assert held.raised is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
