# SPDX-License-Identifier: Apache-2.0
"""What layers share on a GPU, with memory of the host in place of a GPU's: growth, graphs, ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeos import MoEConfig, World
from moeos.compile.kernel_shape import KernelShape
from moeos.engines.cuda import records as cuda_records
from moeos.engines.cuda import wait as cuda_wait
from moeos.engines.cuda import workspace as cuda_workspace
from moeos.engines.cuda.peers import Peers
from moeos.engines.cuda.workspace import CudaWorkspace
from moeos.world import virtual
from tests.layers import config

SMALL = config(dtype=torch.bfloat16, max_tokens=32)
OTHER = config(dtype=torch.float16, hidden=128, max_tokens=8)
SHORT = config(dtype=torch.bfloat16, hidden=256, max_tokens=32)
"""Whose rows are as long as those of LARGE: it fits without growth."""
LARGE = config(dtype=torch.bfloat16, hidden=256, intermediate=512, max_tokens=700)
PROCESSORS = 4
CPU = torch.device("cpu")


class StandInFailure(cuda_records.HostFailure):
    """The host's memory without CUDA, which pins it."""

    def __init__(self) -> None:
        self._words = torch.zeros(16, dtype=torch.int32).numpy()
        self._looked_at = memoryview(self._words)
        self._order = threading.Lock()


class OnGpu:
    """Heaps in the host's memory. Attributes: `freed` and `given_back`, sizes in order."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.given_back: list[int] = []
        self.launches = SimpleNamespace(wait=lambda: True)

    def take_heap(self, size: int) -> Any:
        own = torch.full((size,), 255, dtype=torch.uint8)  # as of one that was used
        return SimpleNamespace(size=size, own=own, heaps=[own], put_addresses=[own.data_ptr()])

    def free_heap(self, heap: Any) -> None:
        self.freed.append(heap.size)

    def give_heap_back(self, heap: Any) -> None:
        self.given_back.append(heap.size)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    made = OnGpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(CudaWorkspace, "_abort", lambda *_: None)
    monkeypatch.setattr(cuda_wait, "synchronize", lambda _: None)
    monkeypatch.setattr(cuda_records, "HostFailure", StandInFailure)
    monkeypatch.setattr(cuda_records, "host_abort", lambda _: (None, None))
    monkeypatch.setattr(cuda_workspace.SharedOnGpu, "of", lambda *_: made)
    return made


class Layer:
    """What an engine does with its workspace. Attributes: `place`, `epoch` of its buffers."""

    def __init__(self, cfg: MoEConfig, shared: CudaWorkspace) -> None:
        sizes = KernelShape(cfg=cfg, world_size=1, processors=PROCESSORS).sizes
        self._epoch_at = sizes.offsets["epoch"]
        self._shared = shared
        self.shape = shared.admit(cfg, sizes, Peers((True,), "none"), CPU)
        self.cleared = 0
        self.move()
        shared.add(self, self.clear, self.move)

    def move(self) -> None:
        self.buffers = self._shared.buffers(self.shape)

    def clear(self) -> None:
        self.cleared += 1

    @property
    def epoch(self) -> int:
        return int(self.buffers.control[self._epoch_at :][:4].view(torch.int32))


def alone(function: Any) -> None:
    def rank_main(world: World) -> None:
        shared = CudaWorkspace(world, 0)
        world.hold(None, shared)
        function(world, shared)

    virtual.run(rank_main, ranks=1)


def test_layers_of_one_shape_share_all_and_of_others_all_but_their_tables(on_gpu: OnGpu) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        first, second, other = (Layer(cfg, shared) for cfg in (LARGE, LARGE, SHORT))
        assert first.buffers.tables is second.buffers.tables is not other.buffers.tables
        for name in ("heap", "control", "between", "peers"):
            assert getattr(first.buffers, name) is getattr(other.buffers, name)
        assert not first.buffers.heap.any()
        assert first.epoch == 1
        sizes = [first.shape.sizes, other.shape.sizes]
        assert world.memory() == {
            "heap": len(first.buffers.heap),
            "queues": sizes[0].control_bytes + sum(each.tables_bytes for each in sizes) + 16,
            "between": sizes[0].intermediate_bytes,
        }
        assert on_gpu.freed == []

    alone(run)


def test_a_larger_layer_moves_all_others_to_larger_buffers_and_frees_the_old_ones(
    on_gpu: OnGpu,
) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        layers = [Layer(SMALL, shared)]
        size = len(layers[0].buffers.heap)
        layers += [Layer(LARGE, shared), Layer(OTHER, shared)]
        assert on_gpu.freed == [size]
        heap = layers[0].buffers.heap
        assert len(heap) > size
        ends = []
        for layer in layers:
            assert layer.buffers.heap is heap
            sizes, place = layer.shape.sizes, layer.buffers.place
            rows = sizes.cells * place.stride_rows + sizes.tile_rows
            assert place.rows_at + rows * sizes.sent_bytes <= place.results_at
            assert place.results_at + sizes.result_bytes <= len(heap)
            assert place.stride_rows >= sizes.cell_places
            ends.append((place.words_at, place.words_at + sizes.words_bytes))
            assert ends[-1][1] <= place.rows_at
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert world.memory()["heap"] == len(heap)

    alone(run)


def test_a_failure_finds_the_call_whose_backward_has_failed(on_gpu: OnGpu) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        Layer(SMALL, shared)
        shared.begun = 6
        shared.note_backward(4)
        shared.begun += 1
        assert (shared.derived_in(6), shared.derived_in(7)) == (0, 4)
        Layer(LARGE, shared)  # other buffers, whose epochs begin at 1
        shared.begun += 1
        shared.note_backward(8)
        assert [shared.derived_in(epoch) for epoch in (1, 2, 7, 9)] == [0, 8, 0, 0]
        for of in range(3, 3 + cuda_workspace._KNOWN_BACKWARDS):
            shared.begun += 1
            shared.note_backward(of)
        assert (shared.derived_in(2), shared.derived_in(3)) == (0, 3)
        shared.note_capture()  # a replay counts on the device alone
        assert shared.derived_in(3) == 0

    alone(run)


def test_buffers_of_a_captured_call_stay_as_they_are_and_are_reset_with_the_others(
    on_gpu: OnGpu,
) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        layer = Layer(SMALL, shared)
        before = layer.buffers
        before.control[layer._epoch_at] = 9  # calls that the graph's buffers have seen
        shared.note_capture()
        Layer(LARGE, shared)
        assert on_gpu.freed == []
        assert layer.epoch == 1
        assert before.control[layer._epoch_at] == 9
        assert world.memory()["heap"] == len(before.heap) + len(layer.buffers.heap)
        assert not shared.end()  # a graph may replay the call
        shared.settle()
        shared.clear()
        assert before.control[layer._epoch_at] == 1
        assert layer.cleared == 1
        assert shared.end(world_ends=True)
        assert sorted(on_gpu.given_back) == sorted([len(before.heap), len(layer.buffers.heap)])
        assert world.memory() == {}

    alone(run)


def test_a_workspace_without_captured_calls_gives_back_all_when_it_is_closed(on_gpu: OnGpu) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        layer = Layer(SMALL, shared)
        shared.close()
        world.release(shared)
        assert on_gpu.given_back == [len(layer.buffers.heap)]
        with pytest.raises(RuntimeError, match="workspace of this layer is closed"):
            shared.require_open()

    alone(run)


def test_memory_that_cannot_be_had_leaves_the_workspace_as_it_was(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(world: World, shared: CudaWorkspace) -> None:
        layer = Layer(SMALL, shared)
        before, said = layer.buffers, world.memory()

        def fail(self: CudaWorkspace, size: int) -> torch.Tensor:
            raise RuntimeError("CUDA out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(CudaWorkspace, "_zeros", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                Layer(LARGE, shared)
        assert layer.buffers is before
        assert world.memory() == said
        assert len(on_gpu.given_back) == 1
        Layer(LARGE, shared)

    alone(cast(Any, run))
