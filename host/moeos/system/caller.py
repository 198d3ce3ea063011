# SPDX-License-Identifier: Apache-2.0
"""Calls functions on a thread of its own, so that one which does not return can be given up.

Must not depend on what the functions do.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from moeos.system.process import Home
from moeos.system.thread_limits import no_thread

Value = TypeVar("Value")

_LOOK = 0.25  # seconds from one look at a function that runs to the next
# Seconds that the end of the program waits for functions that were given up. PyTorch's store writes
# stacks of C++ before it returns: seconds of a full machine.
_PATIENCE = 15.0


class Caller:
    """A thread that calls functions, one after the other.

    Raises `OSError` if the thread cannot be started, naming `who`, such as "rank 1 of 4".
    """

    def __init__(self, name: str, who: str = "") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._free = threading.Lock()  # held while a function runs
        self._home = Home()
        self._closed = False
        _callers[id(self)] = self
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            whose = f"{who}, " if who else ""
            raise no_thread(f"{whose}the thread {name}", "start fewer ranks here") from error

    def result(self, function: Callable[[], Value], seconds: float | None = None) -> Value:
        """What `function` returns or raises; `futures.TimeoutError` if it takes longer.

        In the main thread a signal's handler runs while this waits, and what it raises is raised
        here; the function goes on, and later ones wait for it.
        """
        future: concurrent.futures.Future[Value] = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        ends = None if seconds is None else time.monotonic() + seconds
        try:
            # It polls: a signal that comes just before a wait begins does not end that wait.
            while not future.done() and (ends is None or time.monotonic() < ends):
                left = _LOOK if ends is None else min(_LOOK, max(0.0, ends - time.monotonic()))
                concurrent.futures.wait([future], left)
            return future.result(0)
        except BaseException:
            if not future.done():
                _given_up.add(self)
            raise

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Ends the thread when it has called what was asked for before, and `last`, which raises
        nothing. Only the program's end waits for that.
        """
        self._closed = True
        if last is not None:
            self._calls.put(last)
        self._calls.put(None)

    def _work(self) -> None:
        while call := self._calls.get():
            with self._free:
                call()
                del call  # it may hold the last reference to a store


_callers: weakref.WeakValueDictionary[int, Caller] = weakref.WeakValueDictionary()  # by id
_given_up: set[Caller] = set()


@atexit.register
def _let_return() -> None:
    """Runs before the interpreter ends: a thread that then returns from foreign code is ended where
    it is, and if that is C++ the process ends by SIGABRT.

    The thread of a closed caller ends once it has made the calls that it still owes. A caller that
    was given up and whose function has returned stays in `_work`; the other callers may make the
    calls that are asked for after this. A thread that has not returned within the patience is left.
    """
    ends = time.monotonic() + _PATIENCE
    for one in _callers.valuerefs():
        caller = one()
        if caller is None or not caller._home.here:  # a child has no such thread
            continue
        left = max(0.0, ends - time.monotonic())
        if caller._closed:
            caller._thread.join(left)
            continue
        has_come_back = caller._free.acquire(timeout=left)
        if has_come_back and caller not in _given_up:
            caller._free.release()


_waiter: tuple[Home, Caller] | None = None


def interruptibly(wait: Callable[[], None]) -> None:
    """Makes a wait that sees no signal see them, in the main thread; elsewhere none would come.

    Raises what `wait` raises, and what a signal's handler does: then the wait goes on by itself,
    and the next one begins after it.
    """
    global _waiter
    if threading.current_thread() is not threading.main_thread():
        wait()
        return
    if _waiter is None or not _waiter[0].here:  # a child does not have its parent's thread
        _waiter = Home(), Caller("moeos-wait")
    _waiter[1].result(wait)
