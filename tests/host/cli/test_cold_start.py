# SPDX-License-Identifier: Apache-2.0
"""`moeos trace --cold` on GPUs that are recorders: what is put into the stream, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moeos
from moeos.cli.shared import device_reader, process_group
from moeos.cli.timeline import gathering
from moeos.partition.slicing import WHOLE
from moeos.world.control import SoloControl
from moeos.world.world import TwinOptions
from tests.host.cli import commands

Value = TypeVar("Value")

CONFIG = "hidden = 32\nintermediate = 48\nexperts = 8\ntop_k = 2\nmax_tokens = 16\n"
GROUP = object()


class OneOfTwo(SoloControl):
    """Rank 1 of two ranks that say the same, each a process: rank 1 reports nothing."""

    rank = 1
    size = 2
    shares_memory = False

    def allgather(
        self, value: Value, what: str = "an exchange", *, beyond: float = 0.0
    ) -> list[Value]:
        return [value, value]


class VirtualOneOfTwo(OneOfTwo):
    """The same, in one process with the other."""

    shares_memory = True


class RecordingLayer:
    """A layer that only notes that it is called and checked."""

    record: list[str]

    def __init__(self, cfg: moeos.MoEConfig, world: moeos.World, **slices: object) -> None:
        assert slices == WHOLE.arguments
        self.w1 = torch.zeros(0)

    def __call__(self, *_: object) -> None:
        self.record.append("call")

    def check(self) -> None:
        self.record.append("check")

    def trace(self) -> None:
        pass


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command does on the GPU, in that order."""
    found: list[str] = []

    def noting(what: str, returned: object = None) -> object:
        def note(*_: object) -> object:
            found.append(what)
            return returned

        return note

    def all_reduce(number: Tensor, *, group: object) -> None:
        assert (number.numel(), group) == (1, GROUP)
        found.append("meet")

    monkeypatch.setattr(moeos, "MoELayer", RecordingLayer)
    monkeypatch.setattr(RecordingLayer, "record", found, raising=False)
    monkeypatch.setattr(gathering, "gather", lambda control, own: [])
    monkeypatch.setattr(device_reader.Reader, "__init__", lambda reader: None)
    monkeypatch.setattr(device_reader.Reader, "flush", noting("flush"))
    monkeypatch.setattr(process_group, "start", noting("connect", GROUP))
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch.cuda, "_sleep", noting("rest"))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", noting("disconnect"))
    return found


def traced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, control: SoloControl, *options: object
) -> tuple[int, str, str]:
    """The command on one rank of a world of GPUs."""
    config = folder / "layer.toml"
    config.write_text(CONFIG)
    world = moeos.World(control, backend="cuda", deadline=1.0, twin=TwinOptions())
    monkeypatch.setattr(moeos, "init", lambda *_, **options: world)
    return commands.invoke("trace", config, "--calls", 2, *options)


def test_processes_meet_on_the_gpu_after_the_flush_and_before_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: list[str]
) -> None:
    assert traced(tmp_path, monkeypatch, OneOfTwo(), "--cold") == (0, "", "")
    before, prepared = ["connect", "rest", "meet"], ["flush", "rest", "meet"]
    assert record == [*before, "call", "call", *prepared, "call", "check", "disconnect"]


def test_virtual_ranks_which_one_launch_begins_meet_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: list[str]
) -> None:
    assert traced(tmp_path, monkeypatch, VirtualOneOfTwo(), "--cold") == (0, "", "")
    assert record == ["rest", "call", "call", "flush", "rest", "call", "check"]


def test_a_trace_that_is_not_cold_neither_flushes_nor_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: list[str]
) -> None:
    assert traced(tmp_path, monkeypatch, OneOfTwo()) == (0, "", "")
    assert record == ["call", "call", "call", "check"]
