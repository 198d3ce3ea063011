# SPDX-License-Identifier: Apache-2.0
"""Functions on a thread of their own: results, errors, and signals while the main thread waits."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from types import FrameType

import pytest

from moeos.system import caller
from moeos.system.caller import Caller
from tests import programs
from tests.processes import ForkedRanks


def fail() -> None:
    raise LookupError("of the function")


def test_what_a_function_returns_or_raises_comes_back() -> None:
    calls = Caller("test")
    assert calls.result(threading.get_ident) != threading.get_ident()
    with pytest.raises(LookupError, match="of the function"):
        calls.result(fail)
    leave = threading.Event()
    with pytest.raises(concurrent.futures.TimeoutError):
        calls.result(leave.wait, 0.001)
    leave.set()
    calls.close()


def test_a_wait_that_sees_no_signal_is_left_when_a_handler_raises() -> None:
    leave = threading.Event()
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        leave.wait()

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        waits.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Thread(target=send).start()
        with pytest.raises(KeyboardInterrupt):
            caller.interruptibly(wait)
    finally:
        signal.signal(signal.SIGUSR1, before)
        leave.set()
    with pytest.raises(LookupError):
        caller.interruptibly(fail)


def test_other_threads_wait_by_themselves() -> None:
    where: list[int] = []
    thread = threading.Thread(
        target=lambda: caller.interruptibly(lambda: where.append(threading.get_ident()))
    )
    thread.start()
    thread.join()
    assert where == [thread.ident]


def test_a_forked_child_has_a_thread_of_its_own_for_waits() -> None:
    caller.interruptibly(lambda: None)

    def wait(_rank: int) -> str:
        caller.interruptibly(lambda: None)
        return "waited"

    assert ForkedRanks(wait, 1).ended() == ["waited"]


PROGRAM = """
import concurrent.futures, os, threading, time
from moeos.system import caller

caller._PATIENCE = {patience}
given_up = threading.Event()
def call():
    {call}
    os.write(1, b"came back")
try:
    caller.Caller("given up").result(call, 0.1)
except concurrent.futures.TimeoutError:
    os.write(1, b"given up, ")
    given_up.set()
"""


@pytest.mark.parametrize(
    ("call", "patience", "said"),
    [
        ("given_up.wait(); time.sleep(0.5)", 30.0, "given up, came back"),
        ("threading.Event().wait()", 0.2, "given up, "),
    ],
    ids=["a call that returns", "one that never does"],
)
def test_the_end_of_a_program_waits_a_while_for_what_was_given_up(
    call: str, patience: float, said: str
) -> None:
    """A thread that came back from C++ while the interpreter ends would end the process."""
    ended = programs.ended(PROGRAM.format(call=call, patience=patience))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


def test_the_end_of_a_program_waits_for_what_a_closed_caller_has_not_begun() -> None:
    """No thread takes the interpreter's lock from another here: the caller's has begun nothing.

    It would be ended amid what it calls, such as the end of gloo's connections: where that is C++,
    the process ends by SIGABRT.
    """
    ended = programs.ended(
        """
import os, sys, time
from moeos.system.caller import Caller

def last():
    time.sleep(0.2)
    os.write(1, b"called")

sys.setswitchinterval(1000.0)
Caller("closed").close(last)
sys.exit(7)
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "called", "")
