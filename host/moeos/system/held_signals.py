# SPDX-License-Identifier: Apache-2.0
"""Keeps or notes what the handlers of signals raise during a piece of work.

Must not depend on what the work is.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from moeos.system.process import Home


class HeldSignals:
    """A context manager in which handlers run when their signals come but raise only at its end.

    So work that ends threads is not left half done, however often Ctrl-C is pressed. It must look
    at `raised` and end early. Handlers run in the main thread alone: elsewhere this does nothing.

    Attributes:
        raised: what the first handler to raise has raised, or None.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._held = False
        self._home = Home()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                self._held = True
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):  # not the default action, and not one of C
                        self._handlers[number] = handler
                        signal.signal(number, self._handle)
            except BaseException:  # raised by a handler that is not held yet
                self._release()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()
        self._come_out()

    def _come_out(self) -> None:
        """Raises what was kept."""
        if self.raised is not None:
            raise self.raised

    def _release(self) -> None:
        self._held = False  # from here on a handler raises as it would without this
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:  # or a handler has set another
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handled = sys.exc_info()[1]  # by the work, where the signal came
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if not (self._held and self._home.here):
                raise
            self._take(error, handled)

    def _take(self, error: BaseException, handled: BaseException | None) -> None:
        if self.raised is None:
            if error.__context__ is handled:
                error.__context__ = None  # which has nothing to do with it
            self.raised = error


class NotedSignals(HeldSignals):
    """Lets handlers raise when their signals come: `raised` separates that from other errors.

    Attributes:
        raised: what the last handler to raise has raised, or None.
    """

    def _take(self, error: BaseException, handled: BaseException | None) -> None:
        self.raised = error
        raise error

    def _come_out(self) -> None:
        """Does nothing: the error has been raised."""
