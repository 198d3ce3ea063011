# SPDX-License-Identifier: Apache-2.0
"""The order of a world's launches, with a driver that only notes what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeos.engines.cuda import chain as cuda_chain
from moeos.engines.cuda.chain import LaunchChain

OK = 0
ACTIVE = 1


class Driver:
    """Streams and events by number. Attributes: `captures`, the capture that each stream is in;
    `busy`, streams whose work has not ended; `asked`, what orders streams, in order."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=ACTIVE)

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.busy: set[int] = set()
        self.asked: list[tuple[Any, ...]] = []
        self.events = 0
        self.context = "the chain's"

    def cuCtxGetCurrent(self) -> tuple[int, str]:
        return OK, self.context

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:
        self.context = context
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        self.asked.append(("synchronize", stream, self.context))
        return (OK,)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        self.events += 1
        return OK, self.events

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.asked.append(("record", event, stream))
        return (OK,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        self.asked.append(("wait", event, stream))
        return (OK,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, int]:
        capture = self.captures.get(stream)
        return (OK, 0, 0) if capture is None else (OK, ACTIVE, capture)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        return OK, mode

    def cuStreamQuery(self, stream: int) -> tuple[int]:
        return (int(stream in self.busy),)

    def cuEventQuery(self, event: int) -> tuple[int]:
        return (int(bool(self.busy)),)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_chain.cuda_driver, "load", lambda: made)
    return made


def launch(chain: LaunchChain, stream: int, *, lives: bool = True) -> None:
    if chain.stream != stream and not chain.join(stream):
        chain.launched(stream, lives=lives)


def test_launches_on_one_stream_ask_the_driver_for_nothing(driver: Driver) -> None:
    chain = LaunchChain()
    for _ in range(3):
        launch(chain, 7)
    assert driver.asked == []


def test_a_launch_on_another_stream_waits_for_the_last_one(driver: Driver) -> None:
    chain = LaunchChain()
    for stream in (7, 8, 8, 7):
        launch(chain, stream)
    assert driver.asked == [("record", 1, 7), ("wait", 1, 8), ("record", 1, 8), ("wait", 1, 7)]


def test_a_stream_that_may_be_gone_later_is_marked_at_once(driver: Driver) -> None:
    chain = LaunchChain()
    launch(chain, 7, lives=False)
    launch(chain, 8)
    assert driver.asked == [("record", 1, 7), ("wait", 1, 8)]


def test_a_captured_launch_beside_one_that_runs_on_another_stream_is_an_error(
    driver: Driver,
) -> None:
    chain = LaunchChain()
    launch(chain, 7)
    driver.busy, driver.captures = {7}, {8: 100}
    with pytest.raises(RuntimeError, match=r"call torch.cuda.synchronize\(\) before the capture"):
        chain.join(8)
    driver.busy = set()
    assert chain.join(8)


def test_a_launch_cannot_wait_for_a_stream_that_is_being_captured_since(driver: Driver) -> None:
    chain = LaunchChain()
    launch(chain, 7)
    driver.captures = {7: 100}
    with pytest.raises(RuntimeError, match="a call on another stream cannot wait for it"):
        chain.join(8)


def test_launches_of_one_capture_on_two_streams_are_ordered_within_the_graph(
    driver: Driver,
) -> None:
    chain = LaunchChain()
    driver.captures = {7: 100, 8: 100}
    assert chain.join(7)
    assert chain.join(8)
    assert driver.asked == [("record", 2, 7), ("wait", 2, 8)]


def test_who_waits_for_launches_has_its_own_device_afterwards(driver: Driver) -> None:
    chain = LaunchChain()
    launch(chain, 1)
    driver.context = "another device's"
    driver.asked.clear()
    assert chain.wait()
    assert driver.asked == [("synchronize", 1, "the chain's")]
    assert driver.context == "another device's"


def test_a_context_is_put_back_also_behind_an_error(driver: Driver) -> None:
    def fail() -> None:
        with cuda_chain.cuda_driver.current("a kernel's"):
            raise KeyError(driver.context)

    with pytest.raises(KeyError, match="a kernel's"):
        fail()
    assert driver.context == "the chain's"
