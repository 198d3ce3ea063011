# SPDX-License-Identifier: Apache-2.0
"""Runs collective work so that, when a signal interrupts one rank, the others learn it at once.

An error of the work itself is raised on all ranks, or reported by an exchange. What a signal's
handler raises is neither: it leaves the work wherever it was, whatever the error's class. Must not
depend on the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moeos.system.held_signals import HeldSignals, NotedSignals
from moeos.world.control import ControlPlane

Value = TypeVar("Value")


def told(
    control: ControlPlane,
    what: str,
    do: Callable[[], Value],
    known: HeldSignals | None = None,
) -> Value:
    """What `do()` returns or raises. Collective, as `do` is; `what` names it to the other ranks.

    If a signal's handler raises in `do`, the control plane is aborted, so that no rank waits for
    this one until the deadline. So it is after an error that is no `Exception`, such as one that
    another thread has this one raise. `known`: what it has kept, `do` has already reported.
    """
    signals = NotedSignals()
    try:
        with signals:
            return do()
    except BaseException as error:
        of_handler = error is signals.raised or not isinstance(error, Exception)
        if of_handler and (known is None or error is not known.raised):
            control.abort(f"{type(error).__name__} in {what}")
        raise
