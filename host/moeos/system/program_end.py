# SPDX-License-Identifier: Apache-2.0
"""The end of the program: threads that come by here from then on stand still.

While it ends, the interpreter ends daemon threads where they next ask for its lock. Inside C++ code
that aborts the process. So they had better wait elsewhere: without the lock, in Python code.
Must not depend on what threads do.
"""

from __future__ import annotations

import sys
import threading
import time

_LOOK = 0.001  # seconds from one look at what threads do to the next
_STILL = 0.05  # seconds in which a thread that goes on at all is seen elsewhere
_PATIENCE = 1.0  # seconds in which threads that go on reach a wait of moeos

begun = False
"""Whether the program ends. A variable and not a function: each call of a layer reads it."""
_known: set[int] = set()  # threads that have come by, and may again
_standing: set[int] = set()


class Visitor(threading.local):
    """Notes each thread that touches it: a thread makes its attributes when it first does."""

    def __init__(self) -> None:
        _known.add(threading.get_ident())


def begin() -> None:
    """Notes that the program ends."""
    global begun
    begun = True


def stand_still() -> None:
    """Blocks for ever, without the interpreter's lock; not the main thread, which ends all."""
    if threading.current_thread() is threading.main_thread():
        return
    _standing.add(threading.get_ident())
    forever = threading.Lock()
    forever.acquire()
    forever.acquire()


def let_come() -> None:
    """Waits until the threads that have come by before stand still, or wait for something else.

    What they do in between is their own, such as an operator of PyTorch, and may be C++.
    """
    ends = time.monotonic() + _PATIENCE
    seen, since = _elsewhere(), time.monotonic()
    while seen and time.monotonic() < min(ends, since + _STILL):
        time.sleep(_LOOK)
        now = _elsewhere()
        if now != seen:
            seen, since = now, time.monotonic()


def _elsewhere() -> dict[int, tuple[int, int]]:
    """The positions of the threads that have come by and do not stand still."""
    asks = threading.get_ident()
    return {
        thread: (id(frame), frame.f_lasti)
        for thread, frame in sys._current_frames().items()
        if thread in _known and thread not in _standing and thread != asks
    }
