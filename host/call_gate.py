"""A gate that threads pass one at a time, in order of arrival: calls of a layer go through one.

It knows who is inside, so that a world can end beside a call: the gate is closed, the call is made
to end, and when all have left nobody comes in any more. It knows nothing of layers, of worlds but
their rank, or of what a call does.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import NoReturn

from moeos.process import Home


class _Turn:
    """One thread's turn: its lock is held until the turn is over."""

    __slots__ = ("before", "held")

    def __init__(self) -> None:
        self.held = threading.Lock()
        self.held.acquire()
        # Set where the turn is given up unused: whoever waits for it then waits for that one.
        self.before: _Turn | None = None


class CallGate:
    """A context manager that one thread is in at a time; the others wait in order of arrival.

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
        self._turn: _Turn | None = None  # of the thread inside
        self._thread: int | None = None  # the thread inside
        self._closed = False
        self._parking = False
        self._home = Home()

    def __enter__(self) -> None:
        self.require_open()
        if self.held_here:
            raise RuntimeError(
                f"rank {self._rank} is in a call of this layer, and the same thread begins "
                "another: return from the callback or signal handler first"
            )
        turn = _Turn()
        with self._mutex:
            before, self._last = self._last, turn
        try:
            while before is not None:
                with before.held:
                    pass
                before = before.before
            if self._closed:
                raise RuntimeError(self._closed_during())
            self._turn = turn
            self._thread = threading.get_ident()
        except BaseException:
            turn.before = before
            turn.held.release()
            if self._parking:
                _park()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        turn = self._turn
        assert turn is not None
        self._turn = self._thread = None
        turn.held.release()
        if self._parking:
            _park()
        if self._closed and isinstance(error, Exception):
            raise RuntimeError(self._closed_during()) from error

    @property
    def held_here(self) -> bool:
        """Whether the thread that asks is inside."""
        return self._thread == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether a thread is inside or waits."""
        last = self._last
        return last is not None and last.held.locked()

    def require_open(self) -> None:
        """Raises `RuntimeError` if the gate is closed, or the parent's of a forked process."""
        self._home.require(f"the world of rank {self._rank}")
        if self._closed:
            self._refuse()

    def close(self, *, parking: bool = False) -> None:
        """Nobody comes in any more; who is inside stays there.

        `parking`: the program ends. Then threads that leave, wait or come stand still for ever: the
        interpreter would end them while it ends, in the middle of others' code.
        """
        self._parking = self._parking or parking
        self._closed = True

    def wait_until_left(self, seconds: float) -> bool:
        """Whether all have left a closed gate within so many seconds."""
        ends = time.monotonic() + seconds
        turn = self._last
        while turn is not None:
            if not turn.held.acquire(timeout=max(0.0, ends - time.monotonic())):
                return False
            turn.held.release()
            turn = turn.before
        return True

    def _refuse(self) -> NoReturn:
        if self._parking:
            _park()
        raise RuntimeError(
            f"the world of rank {self._rank} is closed; use it and its layers in its with block"
        )

    def _closed_during(self) -> str:
        return f"the world of rank {self._rank} was closed during this call"


def _park() -> None:
    """Blocks for ever, without the interpreter's lock; not the main thread, which ends all."""
    if threading.current_thread() is threading.main_thread():
        return
    forever = threading.Lock()
    forever.acquire()
    forever.acquire()
