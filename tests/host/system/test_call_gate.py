# SPDX-License-Identifier: Apache-2.0
"""The gate before a layer's calls: order of arrival, closing beside a call, no way to lock up."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from moeos.system import call_gate, program_end
from moeos.system.call_gate import CallGate

FAR = 60.0  # seconds: longer than any of this takes


class Visitor(threading.Thread):
    """A thread that goes in, notes its name, and stays until it is let go."""

    def __init__(self, gate: CallGate, notes: list[str], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.let_go = threading.Event()
        self.inside = threading.Event()
        self.error: BaseException | None = None
        self._gate, self._notes = gate, notes
        self.start()

    def run(self) -> None:
        try:
            self._gate.run(self._stay)
        except RuntimeError as error:
            self.error = error

    def _stay(self) -> None:
        self._notes.append(self.name)
        self.inside.set()
        assert self.let_go.wait(FAR)

    def leave(self) -> None:
        self.let_go.set()
        self.join(FAR)
        assert not self.is_alive()


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + FAR
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.001)


def queued(gate: CallGate, notes: list[str], name: str) -> Visitor:
    """A visitor that is known to stand in the queue behind all others."""
    last = gate._last
    visitor = Visitor(gate, notes, name)
    until(lambda: gate._last is not last)
    return visitor


def test_threads_come_in_one_at_a_time_in_order_of_arrival() -> None:
    gate, notes = CallGate(0), list[str]()
    names = [str(number) for number in range(20)]
    visitors = [queued(gate, notes, name) for name in names]
    for number, visitor in enumerate(visitors):
        assert visitor.inside.wait(FAR)
        assert notes == names[: number + 1]
        visitor.leave()
    assert not gate.busy


def test_an_error_inside_leaves_the_gate_to_the_next() -> None:
    gate = CallGate(0)
    for _ in range(3):
        with pytest.raises(KeyError):
            gate.run(lambda: {}["nothing"])
    assert gate.run(lambda: gate.busy)
    assert not gate.busy


def test_a_call_within_a_call_in_one_thread_is_an_error_and_not_a_wait() -> None:
    gate = CallGate(2)

    def call() -> None:
        with pytest.raises(
            RuntimeError, match="rank 2 is in a call, a reset or the making of a layer"
        ):
            gate.run(lambda: None)
        assert gate.held_here

    for _ in range(2):
        gate.run(call)
        assert not gate.held_here


def test_who_gives_up_waiting_lets_the_next_wait_for_the_one_before() -> None:
    """The main thread gives up by a signal, in the middle of the queue."""
    gate, notes = CallGate(0), list[str]()
    first = Visitor(gate, notes, "first")
    assert first.inside.wait(FAR)

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, raise_it)
    last: list[Visitor] = []

    def when_main_waits() -> None:
        until(lambda: gate._last is not None and gate._last is not turn)
        last.append(queued(gate, notes, "last"))
        os.kill(os.getpid(), signal.SIGUSR1)

    turn = gate._last
    helper = threading.Thread(target=when_main_waits, daemon=True)
    helper.start()
    try:
        with pytest.raises(InterruptedError):
            gate.run(lambda: pytest.fail("came in beside the first"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    helper.join(FAR)
    assert not last[0].inside.wait(0.2)
    first.leave()
    assert last[0].inside.wait(FAR)
    last[0].leave()
    assert notes == ["first", "last"]


class Interruption(Exception):
    """What a signal's handler raises."""


class InterruptAt:
    """A profiler that raises where a signal's handler can: as a function begins or has ended."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        ours = frame.f_code.co_filename == call_gate.__file__
        if ours and event in ("call", "return", "c_return"):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise Interruption


def assert_open(gate: CallGate, when: str) -> None:
    assert not gate.busy, when
    assert not gate.held_here, when
    other = threading.Thread(target=gate.run, args=(lambda: None,), daemon=True)
    other.start()
    other.join(FAR)
    assert not other.is_alive(), when


@pytest.mark.parametrize("fails", [False, True])
def test_an_exception_wherever_a_function_begins_or_ends_leaves_the_gate_open(fails: bool) -> None:
    gate = CallGate(0)

    def call() -> None:
        if fails:
            raise KeyError

    number, interrupt = 0, InterruptAt(0)
    while interrupt.left == 0:
        number += 1
        interrupt = InterruptAt(number)
        profiler = sys.getprofile()
        sys.setprofile(interrupt)
        try:
            gate.run(call)
        except (Interruption, KeyError):
            pass
        finally:
            sys.setprofile(profiler)
        assert_open(gate, f"after event {number}")
    assert number > 8


def test_signals_that_raise_at_any_time_leave_the_gate_open() -> None:
    gate = CallGate(0)

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise Interruption

    def call_until_interrupted(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            gate.run(lambda: None)

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        for number in range(500):
            with pytest.raises(Interruption):
                call_until_interrupted(1e-5 + 1e-7 * number)
            assert_open(gate, f"after signal {number}")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_comes_again_at_once_is_not_taken_for_one_who_is_inside() -> None:
    """While another, which has waited for the end of its turn, is about to begin."""
    gate = CallGate(0)
    notes = list[str]()
    first = Visitor(gate, notes, "first")
    assert first.inside.wait(FAR)
    turn = gate._turn
    assert turn is not None
    waiting = queued(gate, notes, "waiting")
    first.leave()
    assert waiting.inside.wait(FAR)
    waiting.leave()
    call_gate._turns.last = turn
    with turn.held:  # as who waits holds it for a moment
        assert not gate.held_here


def test_a_closed_gate_lets_nobody_in_and_who_waits_is_told_so() -> None:
    gate, notes = CallGate(3), list[str]()
    inside = queued(gate, notes, "inside")
    waiting = [queued(gate, notes, str(number)) for number in range(3)]
    gate.close()
    assert not gate.wait_until_left(0.01)
    inside.leave()
    assert gate.wait_until_left(FAR)
    assert inside.error is None  # its call ended well, as far as it can say
    for visitor in waiting:
        visitor.join(FAR)
        assert "the world of rank 3 was closed during this call" in str(visitor.error)
    assert notes == ["inside"]
    with pytest.raises(RuntimeError, match="the world of rank 3 is closed"):
        gate.run(lambda: None)
    with pytest.raises(RuntimeError, match="the world of rank 3 is closed"):
        gate.require_open()


def closed_inside(error: BaseException) -> None:
    """A gate is closed while a thread is inside, which then leaves by an error."""
    gate = CallGate(0)

    def call() -> None:
        gate.close()
        raise error

    gate.run(call)


def test_the_error_of_a_call_in_a_gate_that_was_closed_is_that_it_was_closed() -> None:
    with pytest.raises(RuntimeError, match="closed during this call") as raised:
        closed_inside(ValueError("what the interruption looks like inside"))
    assert isinstance(raised.value.__cause__, ValueError)


def test_the_end_of_the_interpreter_within_a_call_is_not_replaced() -> None:
    with pytest.raises(SystemExit):
        closed_inside(SystemExit(3))


def test_at_the_end_of_the_program_threads_stand_still_and_the_gate_counts_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, notes = CallGate(0), list[str]()
    visitors = [queued(gate, notes, str(number)) for number in range(3)]
    monkeypatch.setattr(program_end, "begun", True)
    gate.close()
    visitors[0].let_go.set()
    assert gate.wait_until_left(FAR)
    visitors.append(Visitor(gate, notes, "late"))
    for visitor in visitors:
        visitor.join(0.05)
        assert visitor.is_alive()
        assert visitor.error is None
    assert notes == ["0"]


def test_who_waits_is_refused_a_second_turn_in_the_same_thread() -> None:
    """A signal's handler or a finalizer begins one: it would wait for what waits for it."""
    gate, notes = CallGate(0), list[str]()
    first = Visitor(gate, notes, "first")
    assert first.inside.wait(FAR)

    def handler(number: int, frame: FrameType | None) -> None:
        with pytest.raises(RuntimeError, match="the same thread begins another"):
            gate.run(lambda: notes.append("handler"))
        notes.append("refused")
        first.let_go.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        gate.run(lambda: notes.append("second"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gate.run(lambda: notes.append("third"))
    assert notes == ["first", "refused", "second", "third"]


def test_who_is_inside_takes_another_gate_only_as_part_of_that() -> None:
    """A handler would wait there for a thread that waits for the gate that it interrupted."""
    outer, inner = CallGate(1), CallGate(1)

    def handler() -> None:
        with pytest.raises(RuntimeError, match=r"rank 1 is in a call.*begins another"):
            inner.run(lambda: None)
        assert inner.run(lambda: outer.held_here and inner.held_here, within=True)
        assert not inner.held_here

    outer.run(handler)
    inner.run(lambda: None)
    assert not outer.held_here
