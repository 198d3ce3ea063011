# SPDX-License-Identifier: Apache-2.0
"""A gate that threads pass one at a time, in order of arrival: calls of a layer go through one.

It knows which threads are inside, so that a world can end during a call: the gate is closed, the
call is made to end, and the world waits until all threads have left. Must not depend on layers, on
worlds but for their rank, or on what a call does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from moeos.system import program_end
from moeos.system.process import Home

_LOOK = 0.001  # seconds between two looks at a gate that is being left

Value = TypeVar("Value")


class _Turns(program_end.Visitor):
    """The turn that each thread took last, at whichever gate."""

    last: _Turn | None = None


_turns = _Turns()


class _Turn:
    """One thread's turn: its locks are held until the turn is over.

    A thread that waits for the turn's end takes `held` for a moment. No other thread takes `lasts`:
    it is locked if and only if the turn lasts.
    """

    __slots__ = ("before", "gate", "held", "lasts", "outer")

    def __init__(self, gate: CallGate) -> None:
        self.gate = gate
        self.outer: _Turn | None = None  # the thread's turn in which this one was begun
        self.held = threading.Lock()
        self.lasts = threading.Lock()
        # Set until the turn begins, and kept if it is given up: its waiters then wait for `before`.
        self.before: _Turn | None = None


class CallGate:
    """Runs functions of one thread at a time; the other threads wait in order of arrival.

    Each turn waits for the end of the turn that came before it, so the order is fair and needs no
    list. Waiting has no deadline of its own: it ends with the calls before, whose waits have one.

    Raises:
        RuntimeError: the gate is closed, is closed while the thread waits or is inside (then in
            place of the error that the call ended with), or the thread is inside already, as a
            callback or a signal handler within a call is.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._mutex = threading.Lock()  # for an exchange of two words, in which nothing else runs
        self._last: _Turn | None = None
        self._turn: _Turn | None = None  # the turn of the thread inside
        self._closed = False
        self._home = Home()

    def run(self, function: Callable[[], Value], *, within: bool = False) -> Value:
        """What `function` returns or raises, called inside.

        `within`: the thread is inside another gate, and takes this one as part of that. Otherwise
        it must not be in any: a handler or finalizer would wait for other threads, and these for
        what it interrupted.

        The next thread is let in whatever a signal's handler raises, and wherever. The interpreter
        itself releases the locks: a signal could keep the exit of a Python manager from beginning.
        """
        self.require_open()
        outer = _lasting()
        if outer is not None and (not within or self.held_here):
            raise RuntimeError(
                f"rank {outer.gate._rank} is in a call, a reset or the making of a layer, and the "
                "same thread begins another: return from the callback, finalizer or signal handler "
                "first"
            )
        turn = _Turn(self)
        try:
            with turn.lasts, turn.held:
                self._begin(turn)
                return function()
        except Exception as error:
            if self._closed and self._turn is turn:
                raise RuntimeError(self._closed_during()) from error
            raise
        finally:
            if program_end.begun:
                stop_at_the_end()

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside, or waits; a finalizer or a signal's handler may ask
        in the middle of either.
        """
        turn = _lasting()
        while turn is not None and turn.gate is not self:
            turn = turn.outer
        return turn is not None

    @property
    def busy(self) -> bool:
        """Whether a thread is inside or waits."""
        turn = self._last
        while turn is not None:
            if turn.lasts.locked():
                return True
            turn = turn.before
        return False

    def _begin(self, turn: _Turn) -> None:
        """Waits for the end of all turns that came before this one, whose locks are held."""
        turn.outer = _lasting()
        _turns.last = turn  # what begins in this thread from now on would wait for this turn
        with self._mutex:
            turn.before, self._last = self._last, turn
        before = turn.before
        while before is not None:
            with before.held:
                pass
            before = before.before
        if self._closed:
            raise RuntimeError(self._closed_during())
        turn.before = None
        self._turn = turn

    def require_open(self) -> None:
        """Raises `RuntimeError` if the gate is closed, or the parent's of a forked process."""
        if not self._home.here:
            self._home.require(f"the world of rank {self._rank}")
        if self._closed:
            self._refuse()

    def close(self) -> None:
        """Lets no thread in any more; a thread that is inside stays there."""
        self._closed = True

    def wait_until_left(self, seconds: float) -> bool:
        """Whether all threads have left a closed gate within `seconds`."""
        ends = time.monotonic() + seconds
        while self.busy:
            if time.monotonic() >= ends:
                return False
            time.sleep(_LOOK)
        return True

    def _refuse(self) -> NoReturn:
        stop_at_the_end()
        raise RuntimeError(
            f"the world of rank {self._rank} is closed; use it and its layers in its with block"
        )

    def _closed_during(self) -> str:
        return f"the world of rank {self._rank} was closed during this call"


def _lasting() -> _Turn | None:
    """This thread's innermost turn that lasts. A turn copied from the parent by a fork is none."""
    turn = _turns.last
    while turn is not None and not (turn.lasts.locked() and turn.gate._home.here):
        turn = turn.outer
    return turn


def stop_at_the_end() -> None:
    """Stops this thread where the program ends, unless others wait for it to leave a gate.

    Threads call it when they come to a closed gate, leave any gate, or make or end a world.
    """
    if _lasting() is None and program_end.begun:
        program_end.stand_still()
