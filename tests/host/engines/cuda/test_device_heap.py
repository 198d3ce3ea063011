# SPDX-License-Identifier: Apache-2.0
"""Heaps on GPUs between processes, with a driver whose memory is files: shared, and never left."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.engines.cuda.device_heap import DeviceHeap, shareable_peers
from moeos.system.errors import ConfigMismatch
from moeos.world import descriptors
from moeos.world.control import ControlPlane, StoreControl
from tests.fake_gpu import GRANULE, Driver, install
from tests.host.world.test_control import control_at, over_a_store, store_rank
from tests.processes import ForkedRanks, free_port

DEVICE = torch.device("cpu")
UNSHARED = "rank 1, sharing memory of a GPU: CUDA's driver failed: CUDA_ERROR_NOT_SUPPORTED"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


def written(heap: DeviceHeap, control: ControlPlane, mark: int = 0) -> list[list[int]]:
    """What all ranks have put to all, as this one reads it in its own heap."""
    for peer in range(control.size):
        heap.of(peer)[control.rank] = mark + 10 * control.rank + peer
    control.barrier()
    return [heap.own[: control.size].tolist(), heap.own[control.size :].unique().tolist()]


def left(driver: Driver) -> tuple[Any, ...]:
    """What a process still holds of the driver, and descriptors and mappings of memory."""
    files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if exists(n)]
    maps = re.findall(r"moeos-fake-gpu", Path("/proc/self/maps").read_text())
    return driver.ranges, driver.handles, [f for f in files if "fake-gpu" in f], maps


def exists(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


NOTHING: tuple[Any, ...] = ({}, set(), [], [])


def test_ranks_write_into_each_others_heaps_which_start_as_zeros(driver: Driver) -> None:
    def live(control: ControlPlane) -> Any:
        heaps = [DeviceHeap(control, size, DEVICE) for size in (100, GRANULE + 1)]
        seen = [written(heap, control, mark) for mark, heap in enumerate(heaps)]
        sizes = [(len(heap.own), len(heap.put_addresses)) for heap in heaps]
        for heap in heaps:
            heap.close()
            heap.close()
        return seen, sizes, left(driver)

    for rank, outcome in enumerate(over_a_store(live, 3)):
        seen = [[[mark + 10 * peer + rank for peer in range(3)], [0]] for mark in range(2)]
        assert outcome == (seen, [(100, 3), (GRANULE + 1, 3)], NOTHING)


def test_a_heap_is_closed_in_any_order_and_a_peer_may_still_write_into_it(driver: Driver) -> None:
    def live(control: ControlPlane) -> Any:
        heap = DeviceHeap(control, 64, DEVICE)
        if control.rank == 0:
            heap.close()
        control.barrier()
        if control.rank == 1:
            heap.of(0)[3] = 7
            seen = heap.of(0)[3].item()
            heap.close()
            return seen, left(driver)
        return left(driver)

    assert over_a_store(live, 2) == [NOTHING, (7, NOTHING)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_killed_leaves_its_peers_the_memory_that_they_map(
    driver: Driver, number: signal.Signals
) -> None:
    def live(control: ControlPlane) -> Any:
        heap = DeviceHeap(control, 64, DEVICE)
        heap.own[0] = control.rank
        control.barrier()
        if control.rank == 1:
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        control._deadline = 1.0  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            control.barrier()
        seen = [heap.of(peer)[0].item() for peer in range(2)]
        heap.close()
        return seen, left(driver)

    outcomes = ForkedRanks(store_rank(live, 2), 2).ended()
    assert outcomes == [([0, 1], NOTHING), None]


def test_two_worlds_of_a_process_have_heaps_of_their_own(driver: Driver) -> None:
    """Four processes as rows and as columns of 2 x 2."""
    ports = [free_port() for _ in range(4)]

    def live(rank: int) -> Any:
        row, column = divmod(rank, 2)
        worlds = [
            control_at(ports[row], column, 2, 20.0),
            control_at(ports[2 + column], row, 2, 20.0),
        ]
        heaps = [DeviceHeap(world, 64, DEVICE) for world in worlds]
        seen = [written(heaps[i], worlds[i], 50 * i) for i in range(2)]
        order = (0, 1) if rank < 2 else (1, 0)
        for place in order:
            heaps[place].close()
            worlds[place].close()
        return [own for own, _ in seen], left(driver)

    for rank, outcome in enumerate(ForkedRanks(live, 4).ended(60)):
        row, column = divmod(rank, 2)
        assert outcome == ([[column, 10 + column], [50 + row, 60 + row]], NOTHING)


def fail_on(
    rank: int, driver: Driver, change: Callable[[Driver], None]
) -> Callable[[ControlPlane], Any]:
    """Makes a heap where one rank's driver is changed, and tells what is left then."""

    def live(control: ControlPlane) -> Any:
        if control.rank == rank:
            change(driver)
        try:
            DeviceHeap(control, 64, DEVICE)
        except RuntimeError as error:
            return str(error), left(driver)
        return None

    return live


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda driver: setattr(driver, "memory", 0),
            "rank 1, allocating a heap of 64 bytes: CUDA's driver failed: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            lambda driver: setattr(driver, "shares", False),
            "rank 1, allocating a heap of 64 bytes: CUDA's driver failed: CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            lambda driver: setattr(driver, "maps", False),
            "rank 1, mapping the peers' heaps: the memory of rank 0: CUDA's driver failed: "
            "CUDA_ERROR_NOT_SUPPORTED",
        ),
    ],
    ids=["memory", "export", "map"],
)
def test_a_heap_that_one_rank_cannot_make_is_an_error_on_all_and_leaves_nothing(
    driver: Driver, change: Callable[[Driver], None], message: str
) -> None:
    assert over_a_store(fail_on(1, driver, change), 3) == [(message, NOTHING)] * 3


def test_ranks_that_ask_for_different_sizes_all_hear_of_it(driver: Driver) -> None:
    outcomes = over_a_store(lambda control: DeviceHeap(control, 64 + control.rank, DEVICE), 2)
    assert [type(one) for one in outcomes] == [ConfigMismatch] * 2


@pytest.mark.parametrize(
    ("change", "why_not"),
    [
        (lambda driver: None, [["", ""], ["", ""]]),
        (
            lambda driver: setattr(driver, "maps", False),
            [["", ""], ["CUDA's driver failed: CUDA_ERROR_NOT_SUPPORTED", ""]],
        ),
        (
            lambda driver: setattr(driver, "shares", False),
            [
                [
                    "",
                    UNSHARED,
                ],
                [
                    UNSHARED,
                    "",
                ],
            ],
        ),
    ],
    ids=["all", "map", "export"],
)
def test_peers_are_remote_where_their_memory_cannot_be_shared_and_the_reason_is_told(
    driver: Driver, change: Callable[[Driver], None], why_not: list[list[str]]
) -> None:
    def live(control: ControlPlane) -> Any:
        if control.rank == 1:
            change(driver)
        return shareable_peers(control, DEVICE), left(driver)

    assert over_a_store(live, 2) == [(why_not[0], NOTHING), (why_not[1], NOTHING)]


def test_a_rank_in_another_place_is_remote(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(control: ControlPlane) -> Any:
        descriptors.place = lambda: ("a host", control.rank // 2)
        return shareable_peers(control, DEVICE), left(driver)

    away = "it is on another host, or in a container with another network"
    expected = [["", "", away], ["", "", away], [away, away, ""]]
    assert over_a_store(live, 3) == [(row, NOTHING) for row in expected]


def test_a_message_of_a_process_that_is_no_rank_is_not_taken(driver: Driver) -> None:
    """It knows the socket's name, which all processes see, and no token."""

    def live(control: ControlPlane) -> Any:
        real = control.allgather

        def intrude(value: Any, what: str = "", *, beyond: float = 0.0) -> Any:
            values = real(value, what, beyond=beyond)
            if what == "the sockets of the ranks":
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                    stranger.connect(values[control.rank][1])
                    socket.send_fds(stranger, [b"guess 1"], [0])
                real(None, "the intrusion")
            return values

        control.allgather = intrude  # type: ignore[method-assign]
        heap = DeviceHeap(control, 64, DEVICE)
        seen = written(heap, control)
        heap.close()
        return seen, left(driver)

    assert over_a_store(live, 2) == [([[0, 10], [0]], NOTHING), ([[1, 11], [0]], NOTHING)]


def test_a_rank_that_leaves_before_it_sends_is_named_by_the_others(driver: Driver) -> None:
    def live(control: StoreControl) -> Any:
        control.barrier()
        control._deadline = 1.0
        if control.rank == 1:
            return "left"
        try:
            DeviceHeap(control, 64, DEVICE)
        finally:
            assert left(driver) == NOTHING
        return None

    error, gone = over_a_store(live, 2)  # type: ignore[arg-type]
    assert gone == "left"
    assert "rank 1 did not arrive" in str(error)
