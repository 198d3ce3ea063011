# SPDX-License-Identifier: Apache-2.0
"""The order of a world's launches on one GPU: each waits for the one before, whatever its stream.

Each call fills the GPU, and waits for calls of other ranks. If two calls could change places on one
rank, each of two ranks could run what the other is not at. Launches on one stream are in order by
themselves; where the stream changes, the new one waits by an event. Must not depend on layers, nor
on what is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.driver import ask

Value = TypeVar("Value")


class _Last(NamedTuple):
    """The last launch that was not captured.

    Attributes:
        stream: its handle.
        marked: whether the chain's event was recorded right after it.
    """

    stream: int
    marked: bool


class LaunchChain:
    """Orders the launches of all layers of a world on the current device.

    Threads use it one at a time. Call `join` for the stream before a launch, and `launched` after
    it; neither is needed on the stream `stream`, unless it is being captured.

    Attributes:
        stream: handle of the stream on which a launch is in order by itself; None if there is none.
    """

    def __init__(self) -> None:
        self.stream: int | None = None
        driver = self._driver = cuda_driver.load()
        self._context = ask(driver.cuCtxGetCurrent())
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        # An event that was recorded in a capture may not be asked for afterwards: so there are two.
        self._event, self._event_of_capture = (ask(driver.cuEventCreate(flags)) for _ in range(2))
        self._last: _Last | None = None
        self._captured: tuple[int, int] | None = None  # the last captured launch: capture, stream

    def join(self, stream: int) -> bool:
        """Makes a stream's next launch wait for the last one; returns whether it is captured.

        Raises `RuntimeError` where an event cannot do that: in a capture, while an earlier launch
        is not known to have ended, and outside, while the last launch's stream is being captured.
        """
        driver = self._driver
        # The thread's current context may not be set yet: torch does that when it first needs it.
        ask(driver.cuCtxSetCurrent(self._context))
        capture = self._capture_of(stream)
        if capture is not None:
            self._join_in(capture, stream)
            return True
        last = self._last
        if last is not None and (last.marked or last.stream != stream):
            if not last.marked:
                if self._capture_of(last.stream) is not None:
                    raise RuntimeError(
                        "the last call of a layer of this world was made on a stream that is now "
                        "being captured, and a call on another stream cannot wait for it: make "
                        "the call before the capture begins or when it has ended"
                    )
                ask(driver.cuEventRecord(self._event, last.stream))
            ask(driver.cuStreamWaitEvent(stream, self._event, 0))
        return False

    def launched(self, stream: int, *, lives: bool) -> None:
        """Notes a launch that was not captured.

        `lives`: whether the handle means this stream as long as the process lives. If not, the
        stream could be gone, or be another thread's, when the next launch comes: then the event is
        recorded now.
        """
        if not lives:
            ask(self._driver.cuEventRecord(self._event, stream))
        self._last = _Last(stream, marked=not lives)
        self.stream = stream if lives else None

    def wait(self) -> bool:
        """Waits for all launches that were not captured. False if that cannot be done in a capture.

        May be called in any thread, during captures of other threads and during a launch.
        """
        driver, last = self._driver, self._last
        if last is None:
            return True

        def ended() -> bool:
            if last.marked:
                ask(driver.cuEventSynchronize(self._event))
            elif self._capture_of(last.stream) is not None:
                return False
            else:
                ask(driver.cuStreamSynchronize(last.stream))
            return True

        with cuda_driver.current(self._context):
            return self._relaxed(ended)

    def _join_in(self, capture: int, stream: int) -> None:
        """Orders a launch that becomes part of a graph after those before it."""
        driver = self._driver
        if self._captured is not None and self._captured[0] == capture:
            before = self._captured[1]
            if before != stream:
                ask(driver.cuEventRecord(self._event_of_capture, before))
                ask(driver.cuStreamWaitEvent(stream, self._event_of_capture, 0))
        elif self._last is not None and self._last.stream != stream and not self._ended():
            raise RuntimeError(
                "a call of a layer of this world has not ended on another stream, and a call that "
                "is captured cannot wait for it: call torch.cuda.synchronize() before the capture "
                "begins, as torch.cuda.graph does, or capture on the stream of that call"
            )
        self._captured = capture, stream

    def _ended(self) -> bool:
        """Whether the last launch that was not captured has ended, as far as can be known."""
        driver, last = self._driver, self._last
        assert last is not None

        def found() -> bool:
            if last.marked:
                return int(driver.cuEventQuery(self._event)[0]) == 0
            # A stream that was captured since cannot be asked. What it held before is no part of
            # the graph, and the code that replays the graph orders the graph after it.
            return (
                self._capture_of(last.stream) is not None
                or int(driver.cuStreamQuery(last.stream)[0]) == 0
            )

        return self._relaxed(found)

    def _relaxed(self, do: Callable[[], Value]) -> Value:
        """What `do()` returns where no capture, of this thread or another, forbids to ask."""
        driver = self._driver
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = ask(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            return do()
        finally:
            ask(driver.cuThreadExchangeStreamCaptureMode(before))

    def _capture_of(self, stream: int) -> int | None:
        """The number of the capture that a stream is in, or None."""
        driver = self._driver
        answer: tuple[Any, ...] = driver.cuStreamGetCaptureInfo(stream)
        if int(answer[0]) != 0:
            ask(answer[:1])
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(answer[2]) if answer[1] == active else None


def lives(device: int) -> bool:
    """Whether the handle of a device's current stream means that stream as long as the process.

    The handles of the default stream and of torch's pool do. Any other, an `ExternalStream`, is its
    maker's, or the default stream of a thread; torch numbers it by its handle, which is even, while
    numbers of torch's own streams are odd, and 0 is the default stream's.
    """
    number = int(torch._C._cuda_getCurrentStream(device)[0])
    return number == 0 or number % 2 == 1
