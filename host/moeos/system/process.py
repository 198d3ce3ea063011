# SPDX-License-Identifier: Apache-2.0
"""Which process an object belongs to: a child must not use or end what a fork has copied.

A child has the memory of its parent and one thread. Locks may be held there by threads that it does
not have, and memory, sockets and MPI are shared with the parent, which goes on.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch

# Asked for once in each process: a call of a layer would ask for it each time, and it is the kernel
# that answers.
_here = os.getpid()


def _arrive() -> None:
    global _here
    _here = os.getpid()


os.register_at_fork(after_in_child=_arrive)


class Home:
    """The process that makes this object."""

    def __init__(self) -> None:
        self._process = _here

    @property
    def here(self) -> bool:
        """Whether this is that process, and not a forked child of it."""
        return self._process == _here

    def require(self, what: str) -> None:
        """Raises `RuntimeError` in a child; `what` belongs to the parent, like "rank 1's world"."""
        if not self.here:
            raise RuntimeError(
                f"{what} belongs to process {self._process}, and this is process {_here}, "
                "which a fork has made of it with neither its threads nor its peers: make a world "
                "after the fork, in the child, or start the process by spawn"
            )


_first = Home()  # where moeos was imported
_settled = False


def settle() -> None:
    """Makes torch usable in a child that is to make a world: once, and nothing elsewhere.

    A loop that torch divides among OpenMP's threads never ends in a child whose parent has done so
    before: it waits for the parent's threads. One thread waits for none.
    """
    global _settled
    if not _first.here and not _settled:
        _settled = True
        torch.set_num_threads(1)


_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_in_children(thing: object) -> None:
    """Keeps a child from ending `thing`, even when the child exits: that would wait for a thread
    that only the parent has.
    """
    _kept.add(thing)


def _keep() -> None:
    for thing in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep)
