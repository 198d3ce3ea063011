# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU that the layers of a workspace share: a heap, memory, loaded kernels.

It makes them as large as the largest layer needs. Must not depend on calls or weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from moeos import _runtime
from moeos.engines.cuda import records as cuda_records
from moeos.engines.cuda import wait as cuda_wait
from moeos.engines.cuda.arguments import RankBuffers
from moeos.engines.cuda.device_heap import DeviceHeap
from moeos.engines.cuda.kernel import LoadedKernel
from moeos.engines.cuda.nvshmem_heap import finish_puts
from moeos.engines.cuda.peers import Peers
from moeos.engines.cuda.shared import SharedOnGpu
from moeos.engines.shared_heap import SharedHeap
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world import agreement
from moeos.world.all_reduce import AllReduce
from moeos.world.control import raise_together
from moeos.world.world import World

Value = TypeVar("Value")


@dataclasses.dataclass
class CudaShape:
    """The layers of one config: what they share in addition to what all layers do.

    Attributes:
        index: of the shape, in the order in which they came.
        kernels: by their code. Among virtual ranks, rank 0 alone has some.
    """

    index: int
    sizes: _runtime.Sizes
    kernels: dict[bytes, LoadedKernel] = dataclasses.field(default_factory=dict)


_KNOWN_BACKWARDS = 4096
"""More calls than a stream takes before the host sees that one of them has failed."""


@dataclasses.dataclass
class _Generation:
    """Buffers of one size. The epochs in them are their own: calls that use other buffers do not
    count here.

    Attributes:
        tables: of each shape.
        captured: whether a call that uses them is part of a graph, which may be replayed.
        since: `CudaWorkspace.begun` when they were made.
        backwards: by epoch, the call whose backward a call is: of the last that have begun.
    """

    plan: SharedHeap
    heap: DeviceHeap
    control: Tensor
    tables: list[Tensor]
    between: Tensor
    peers: Tensor
    captured: bool = False
    since: int = 0
    backwards: dict[int, int] = dataclasses.field(default_factory=dict)

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`."""
        return {
            "heap": self.heap.size,
            "queues": len(self.control) + sum(map(len, self.tables)) + self.peers.nbytes,
            "between": len(self.between),
        }


class CudaWorkspace:
    """See `moeos.world.world.SharedMemory`.

    Attributes:
        failure: what ended a call of any of its layers.
        on_gpu: what all workspaces of the world share; from the first layer on.
        begun: calls of all its layers, since it was made or cleared.
    """

    failure: cuda_records.HostFailure
    on_gpu: SharedOnGpu
    begun: int
    _peers: Peers
    _slicing: Slicing
    _device: torch.device
    _offsets: dict[str, int]
    _abort_stream: torch.cuda.Stream

    def __init__(self, world: World, number: int) -> None:
        self.gate = world.gate  # launches of all layers are in one order
        self.closed = False
        self.number = number
        self.begun = 0
        self.all_reduces: dict[int, AllReduce] = {}
        self._world = weakref.ref(world)  # which may be garbage together with its layers
        self._rank = world.rank
        self._deadline = world.deadline
        self._shapes: dict[object, CudaShape] = {}
        self._layers: dict[object, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._now: _Generation | None = None
        self._before: list[_Generation] = []  # which graphs may use
        self._lock = threading.Lock()  # nothing is given back while an abort writes into heaps

    def admit(
        self,
        key: object,
        sizes: _runtime.Sizes,
        peers: Peers,
        device: torch.device,
        slicing: Slicing = WHOLE,
    ) -> CudaShape:
        """Makes room for a layer on the current device; `key`: what says its shape. Collective, in
        the world's gate.

        Raises what `agreement.agree_workspace` raises, what a heap raises, and `ValueError` where
        experts of the workspace's other layers are cut otherwise.
        """
        slicing.require_alike([] if self._now is None else [self._slicing])
        now = self._now
        found = self._shapes.get(key)
        plan = SharedHeap() if now is None else now.plan
        between = 0 if now is None else len(now.between)
        if found is None:
            plan, between = plan.with_shape(sizes), max(between, sizes.intermediate_bytes)
        grows = now is None or plan.grew_from(now.plan) or between > len(now.between)
        mine = agreement.Admission(
            self.number, self.closed, grows, now is not None and now.captured, bool(sizes.remote)
        )
        agreed = agreement.agree_workspace(self._live_world(), mine)
        if found is not None:
            return found
        if now is None:
            self._start(sizes, peers, device, slicing)
        every = [*(shape.sizes for shape in self._shapes.values()), sizes]
        if agreed.grows:
            del now  # or it would keep what is given back
            self._grow(plan, between, every, keeps=agreed.captured)
        else:
            assert now is not None  # it was not made here
            now.tables.append(self._agree(lambda: self._zeros(sizes.tables_bytes), "the queues"))
            now.plan = plan
            torch.cuda.synchronize(device)
        shape = self._shapes[key] = CudaShape(len(self._shapes), sizes)
        return shape

    def buffers(self, shape: CudaShape) -> RankBuffers:
        """The buffers that calls of a shape use."""
        now = self._now
        assert now is not None  # the shape has been admitted
        return RankBuffers(
            heap=now.heap.own,
            place=now.plan.place(shape.index),
            control=now.control,
            tables=now.tables[shape.index],
            between=now.between,
            peers=now.peers,
        )

    def add(self, key: object, clear: Callable[[], None], move: Callable[[], None]) -> None:
        """Adds a layer: `clear` clears its records, and `move` asks anew for the `buffers` that it
        uses.
        """
        self._layers[key] = clear, move

    def remove(self, key: object) -> None:
        """Removes a layer that is gone."""
        self._layers.pop(key, None)

    def note_backward(self, of: int) -> None:
        """Notes that the call that begins next is the backward of call `of`."""
        now = self._now
        assert now is not None  # its layer has been admitted
        now.backwards[self.begun + 1 - now.since] = of
        if len(now.backwards) > _KNOWN_BACKWARDS:
            del now.backwards[next(iter(now.backwards))]

    def derived_in(self, epoch: int) -> int:
        """The call whose backward the call of an epoch is; 0 if unknown, as where graphs make
        calls.
        """
        now = self._now
        return 0 if now is None or now.captured else now.backwards.get(epoch, 0)

    def note_capture(self) -> None:
        """Notes that a call is part of a graph: its buffers stay until the world is closed."""
        assert self._now is not None  # a layer was called
        self._now.captured = True

    def require_open(self) -> None:
        """Raises `RuntimeError` if it is closed."""
        if self.closed:
            raise agreement.closed("the workspace of this layer is closed")

    def first_failure(self) -> _runtime.Failure | None:
        """The failure of a call of any of its layers. Waits for the current stream."""
        said = self.failure.read()
        if said is not None:
            return said
        found = [
            cuda_records.first_failure(generation.heap.own, self._offsets)
            for generation in self._generations()
        ]
        return next((failure for failure in found if failure is not None), None)

    def settle(self) -> None:
        """See `SharedMemory.settle`."""
        if self._now is None:
            return
        cuda_wait.synchronize(self._device)
        if self._peers.transport == "nvshmem":
            with torch.cuda.device(self._device):
                finish_puts(self._rank, self._deadline)

    def clear(self) -> None:
        """See `SharedMemory.clear`."""
        self.begun = 0
        if self._now is None:
            return
        with torch.cuda.device(self._device):
            for generation in self._generations():
                generation.since = 0
                generation.backwards.clear()
                cuda_records.clear(generation.heap.own, generation.control, self._offsets)
                for tables in generation.tables:
                    tables.zero_()
            for clear, _ in list(self._layers.values()):
                clear()
            self.failure.clear()
            torch.cuda.synchronize(self._device)
        for one in self.all_reduces.values():
            one.renew()

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`."""
        found: dict[str, int] = {}
        for generation in self._generations():
            for kind, size in generation.memory().items():
                found[kind] = found.get(kind, 0) + size
        return found

    def close(self) -> None:
        """See `SharedMemory.close`."""
        self.closed = True

    def interrupt(self, reason: str) -> None:
        """Raises the abort words of this rank and, as far as they can be reached, of its peers.

        The record has no room for the reason.
        """
        with self._lock:
            for generation in self._generations():
                self._abort(generation.heap)

    def end(self, *, world_ends: bool = False) -> bool:
        """Waits for the calls and gives back memory, kernels and heaps.

        False during an interruption and, unless the world ends, as long as a capture forbids to
        wait or a graph may replay a call.
        """
        if self._now is None:
            return True
        captured = any(generation.captured for generation in self._generations())
        if (captured and not world_ends) or not self._lock.acquire(blocking=world_ends):
            return False
        try:
            # A kernel that crashed has said so before.
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
                if world_ends:
                    torch.cuda.synchronize(self._device)
                elif not self.on_gpu.launches.wait():
                    return False
            self.closed = True
            for shape in self._shapes.values():
                for kernel in shape.kernels.values():
                    kernel.unload()
            self._shapes.clear()
            for generation in self._generations():
                self.on_gpu.give_heap_back(generation.heap)
            self._now = None
            self._before.clear()
            while self.all_reduces:
                self.all_reduces.popitem()[1].end()
        finally:
            self._lock.release()
        return True

    def _start(
        self, sizes: _runtime.Sizes, peers: Peers, device: torch.device, slicing: Slicing
    ) -> None:
        """Collective."""
        self._peers = peers
        self._slicing = slicing
        self._device = device
        self._offsets = sizes.offsets  # offsets in a heap and in control hold for all shapes
        self._abort_stream = torch.cuda.Stream()
        self._abort_record, self._abort_word = cuda_records.host_abort(self._rank)
        self.failure = self._agree(cuda_records.HostFailure, "the host's pinned memory")
        self.on_gpu = SharedOnGpu.of(self._live_world(), device)

    def _grow(
        self, plan: SharedHeap, between: int, shapes: list[_runtime.Sizes], *, keeps: bool
    ) -> None:
        """Replaces the buffers by larger ones; a failure leaves the old ones as they are.

        `keeps`: a graph of some rank may use the old ones, which stay, then.
        """
        control = self._live_world().control
        self.settle()
        heap = self.on_gpu.take_heap(plan.size)

        def make() -> _Generation:
            return _Generation(
                plan=plan,
                heap=heap,
                control=self._zeros(shapes[0].control_bytes),
                tables=[self._zeros(sizes.tables_bytes) for sizes in shapes],
                # Zeros, as GEMM1 reads rows that no tile of this call has written.
                between=self._zeros(between),
                peers=torch.tensor(self._table(heap), device=self._device),
                since=self.begun,
            )

        try:
            made = self._agree(make, "the memory of a workspace")
        except BaseException:
            self.on_gpu.give_heap_back(heap)
            raise
        cuda_records.clear(heap.own, made.control, self._offsets)
        torch.cuda.synchronize(self._device)
        # Every heap is clean, and no rank is inside a call any more.
        control.barrier("the growth of a workspace")
        old = self._now
        with self._lock:
            self._now = made
            if old is not None and keeps:
                old.captured = True
                self._before.append(old)
        for _, move in list(self._layers.values()):
            move()
        if old is not None and not keeps:
            self.on_gpu.free_heap(old.heap)
            del old
            torch.cuda.empty_cache()  # or torch keeps what others could not use

    def _table(self, heap: DeviceHeap) -> list[int]:
        """`Peers.table`, as the runtime counts peers."""
        ways = self._peers.table(heap)
        world = self._live_world()
        return [ways[peer] for peer in self._slicing.peers(world.rank, world.size)] or ways

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _generations(self) -> list[_Generation]:
        return [*self._before, *([] if self._now is None else [self._now])]

    def _abort(self, mine: DeviceHeap) -> None:
        heaps = mine.heaps
        own = self._rank
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._abort_stream):
            for peer in [own, *range(own), *range(own + 1, len(heaps))]:
                heap = heaps[peer]
                if not self._peers.direct[peer]:
                    self._put_abort(mine, peer)
                elif heap is not None and cuda_records.first_failure(heap, self._offsets) is None:
                    at = self._offsets["failures"] + own * cuda_records.CACHE_LINE
                    record, word = self._abort_record, self._abort_word
                    heap[at : at + len(record)].copy_(record, non_blocking=True)
                    at = self._offsets["abort_word"]
                    heap[at : at + len(word)].copy_(word, non_blocking=True)
            self._abort_stream.synchronize()

    def _put_abort(self, mine: DeviceHeap, peer: int) -> None:
        """Puts what a sender would put of this rank's failure (runtime/memory/watchdog.hpp), if it
        is the one that has ended the calls here."""
        own = self._rank
        failure = cuda_records.first_failure(mine.own, self._offsets)
        if failure is not None and failure.rank == own:
            word = self._abort_word
            at = self._offsets["put_failures"] + own * len(word)
            mine.own[at : at + len(word)].copy_(word, non_blocking=True)
            record_at = self._offsets["failures"] + own * cuda_records.CACHE_LINE
            mine.put(peer, record_at, cuda_records.CACHE_LINE)
            mine.put(peer, at, len(word))

    def _agree(self, do: Callable[[], Value], what: str) -> Value:
        """What `do()` returns here, if it returns on all ranks; else its error, on all ranks."""
        error: Exception | None = None
        value: Value | None = None
        try:
            value = do()
        except (ValueError, RuntimeError) as raised:  # CUDA's and torch's are RuntimeErrors
            error = raised
        raise_together(self._live_world().control, error, what)
        return value  # type: ignore[return-value]

    def _live_world(self) -> World:
        world = self._world()
        assert world is not None  # a layer is being made in it
        return world
