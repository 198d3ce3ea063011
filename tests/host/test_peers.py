"""Which peers' memory a GPU addresses by itself: atomics decide, and not only access."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeos import device_heap
from moeos.control import ThreadControl

NVLINK = {("a", "b"), ("b", "a")}
"""Pairs of GPUs, of a, b and c, which all have access to each other's memory."""


def processes(size: int) -> list[ThreadControl]:
    controls = ThreadControl.group(size, deadline=20.0)
    for control in controls:
        control.shares_memory = False  # as of ranks that are processes
    return controls


def found_by_all(monkeypatch: pytest.MonkeyPatch, visible: str = "abc") -> list[list[bool]]:
    names = "abc"
    nvshmem = SimpleNamespace(tensor=lambda *_, **__: None, free_tensor=lambda _: None)
    monkeypatch.setattr(device_heap, "_start_nvshmem", lambda *_: None)
    monkeypatch.setattr(device_heap, "_nvshmem", lambda: nvshmem)
    monkeypatch.setattr(device_heap, "_addresses", lambda *_: True)
    monkeypatch.setattr(device_heap, "_uuid_of", lambda device: names[device.index])
    driver = device_heap.cuda_driver
    monkeypatch.setattr(driver, "visible_gpus", lambda: {name: name for name in visible})
    monkeypatch.setattr(driver, "has_atomics", lambda gpu, peer: (gpu, peer) in NVLINK)
    found: dict[int, Any] = {}

    def ask(control: ThreadControl) -> None:
        device = torch.device("cuda", control.rank)
        found[control.rank] = device_heap.addressable_peers(control, device)

    threads = [threading.Thread(target=ask, args=(control,)) for control in processes(3)]
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
