# SPDX-License-Identifier: Apache-2.0
"""Which peers' memory a GPU addresses, and which world NVSHMEM, where there are others, serves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos.engines.cuda import device_heap, nvshmem_heap
from moeos.engines.cuda.peers import Peers
from moeos.world.control import StoreControl, ThreadControl
from moeos.world.world import TwinOptions, World
from tests.fake_gpu import Driver, install
from tests.host.world.test_control import control_at
from tests.processes import ForkedRanks, free_port

DEVICE = torch.device("cpu")
NVLINK = {("a", "b"), ("b", "a")}
"""Pairs of GPUs, of a, b and c, which all have access to each other's memory."""


def found_by_all(monkeypatch: pytest.MonkeyPatch, visible: str = "abc") -> list[list[bool]]:
    names = "abc"
    monkeypatch.setattr(device_heap, "_uuid_of", lambda device: names[device.index])
    driver = device_heap.cuda_driver
    monkeypatch.setattr(driver, "visible_gpus", lambda: {name: name for name in visible})
    monkeypatch.setattr(driver, "has_atomics", lambda gpu, peer: (gpu, peer) in NVLINK)
    found: dict[int, Any] = {}

    def ask(control: ThreadControl) -> None:
        device = torch.device("cuda", control.rank)
        found[control.rank] = device_heap.peers_with_atomics(control, device)

    controls = ThreadControl.group(3, deadline=20.0)
    threads = [threading.Thread(target=ask, args=(control,)) for control in controls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(3)]


def test_a_gpu_over_pcie_is_a_remote_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_all(monkeypatch) == [
        [True, True, False],
        [True, True, False],
        [False, False, True],
    ]


def test_a_gpu_that_a_process_may_not_see_is_taken_for_one_on_nvlink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found_by_all(monkeypatch, visible="ab")[0] == [True, True, True]


class Nvshmem:
    """NVSHMEM of one process: `nvshmem.core` and `nvshmem.bindings`, as far as the host uses them.

    Attributes:
        started: (rank, size) of each start.
        addressed: whether it addresses the memory of a peer.
    """

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.addressed = False
        self.freed = 0

    def get_unique_id(self, empty: bool) -> Any:
        return SimpleNamespace(_data=torch.zeros(4).numpy())

    def init(self, *, rank: int, nranks: int, **_: Any) -> None:
        self.started.append((rank, nranks))

    def tensor(self, shape: tuple[int], **_: Any) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def free_tensor(self, memory: Tensor) -> None:
        self.freed += 1

    def get_peer_tensor(self, own: Tensor, peer: int) -> Tensor:
        return own

    def ptr(self, address: int, peer: int) -> int:
        return int(self.addressed or peer == self.started[0][0])


@pytest.fixture
def nvshmem(monkeypatch: pytest.MonkeyPatch) -> Nvshmem:
    fake = Nvshmem()
    monkeypatch.setattr(nvshmem_heap, "_core", lambda: fake)
    monkeypatch.setattr(nvshmem_heap, "_bindings", lambda: fake)
    monkeypatch.setattr(nvshmem_heap, "_device_of", lambda device: None)
    monkeypatch.setattr(nvshmem_heap, "_running", None)
    return fake


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


def world_over(control: StoreControl, ranks_per_node: int | None = None) -> World:
    return World(
        control,
        backend="cuda",
        deadline=20.0,
        twin=TwinOptions(),
        ranks_per_node=ranks_per_node,
    )


def in_pairs(live: Any, size: int = 2) -> list[Any]:
    """`live(rank, meet)` in processes; `meet(place, rank, size)` is a control plane."""
    ports = [free_port() for _ in range(4)]

    def process(rank: int) -> Any:
        return live(rank, lambda at, place, of: control_at(ports[at], place, of, 20.0))

    return ForkedRanks(process, size).ended(60)


def test_peers_of_one_host_need_no_nvshmem(driver: Driver, nvshmem: Nvshmem) -> None:
    def live(rank: int, meet: Any) -> Any:
        with world_over(meet(0, rank, 2)) as world:
            peers = Peers.find(world, DEVICE)
            assert Peers.find(world, DEVICE) is peers
            return peers, nvshmem.started

    assert in_pairs(live) == [(Peers((True, True), "none"), [])] * 2


@pytest.mark.parametrize("addressed", [False, True])
def test_nvshmem_serves_a_world_whose_gpus_share_no_memory(
    driver: Driver, nvshmem: Nvshmem, addressed: bool
) -> None:
    """Where it addresses the peers' memory by itself, they are direct."""
    driver.shares, nvshmem.addressed = False, addressed

    def live(rank: int, meet: Any) -> Any:
        with world_over(meet(0, rank, 2)) as world:
            return Peers.find(world, DEVICE), nvshmem.started

    for rank, (peers, started) in enumerate(in_pairs(live)):
        direct = (True, True) if addressed else (rank == 0, rank == 1)
        assert peers == Peers(direct, "none" if addressed else "nvshmem", by_nvshmem=True)
        assert started == [(rank, 2)]


def error_of(world: World) -> str:
    try:
        Peers.find(world, DEVICE)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_second_open_world_with_remote_peers_is_refused_by_name_on_all_ranks(
    driver: Driver, nvshmem: Nvshmem
) -> None:
    def live(rank: int, meet: Any) -> Any:
        first = world_over(meet(0, rank, 2), ranks_per_node=1)
        second = world_over(meet(1, rank, 2), ranks_per_node=1)
        third = world_over(meet(2, rank, 2))
        said = [error_of(first), error_of(second), error_of(third)]
        first.close()
        again = world_over(meet(3, rank, 2), ranks_per_node=1)
        said.append(error_of(again))
        for world in (second, third, again):
            world.close()
        return said, nvshmem.started

    refused = (
        "rank 0, a world with remote peers: NVSHMEM, by which remote peers are reached, starts "
        "once in a process and serves one world, and this process is rank 0 of 2 of an open world "
        "already: make the layers in that world, or run this one in processes of its own"
    )
    for rank, (said, started) in enumerate(in_pairs(live)):
        assert said == ["", refused, "", ""]
        assert started == [(rank, 2)]


def test_nvshmem_serves_no_world_of_other_processes_than_it_was_started_with(
    driver: Driver, nvshmem: Nvshmem
) -> None:
    """Processes 0 and 1, then 1 and 2: the one that NVSHMEM is new to hears of it as well."""

    def live(rank: int, meet: Any) -> Any:
        said = []
        for at, members in enumerate([(0, 1), (1, 2)]):
            if rank in members:
                with world_over(meet(at, members.index(rank), 2), ranks_per_node=1) as world:
                    said.append(error_of(world))
        return said

    first, both, last = in_pairs(live, 3)
    assert first == [""]
    assert both == ["", *last]
    assert last == [
        "rank 0, a world with remote peers: NVSHMEM, by which remote peers are reached, starts "
        "once in a process and serves one world, and this process is rank 1 of 2 of a world of "
        "other processes already: make the layers in that world, or run this one in processes of "
        "its own"
    ]


def test_without_nvshmem_the_error_says_which_peer_is_remote_and_why(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.shares = False

    def missing(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(nvshmem_heap.importlib, "import_module", missing)

    def live(rank: int, meet: Any) -> Any:
        with world_over(meet(0, rank, 2)) as world:
            return error_of(world)

    message = (
        "rank 0, a world with remote peers: NVSHMEM, which reaches the GPUs of remote peers, is "
        "missing (no module nvshmem.core): pip install 'moeos[cuda]' (rank 1 is remote to rank 0: "
        "rank 0, sharing memory of a GPU: CUDA's driver failed: CUDA_ERROR_NOT_SUPPORTED)"
    )
    assert in_pairs(live) == [message] * 2
