# SPDX-License-Identifier: Apache-2.0
"""What all layers of a world share on its GPU: the order of launches, and symmetric heaps.

A heap of NVSHMEM is freed by all ranks together, and a workspace may be collected on one rank
earlier than on another. So its heap is kept, for the next workspace that fits. Must not depend on
layers, kernels or what lies in a heap.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from moeos.engines.cuda.chain import LaunchChain
from moeos.engines.cuda.device_heap import DeviceHeap
from moeos.engines.cuda.nvshmem_heap import finish_puts
from moeos.engines.cuda.peers import Peers
from moeos.system.call_gate import CallGate
from moeos.world.control import ControlPlane, require_equal
from moeos.world.world import World

MakeHeap = Callable[[int], DeviceHeap]
"""Makes a heap of the given number of bytes. Collective."""


class HeapPool:
    """The symmetric heaps of a world, made one after the other on all ranks, and used again.

    The `Holdings` of a world: it frees them all when the world is closed.
    """

    def __init__(
        self,
        control: ControlPlane,
        gate: CallGate,
        make: MakeHeap,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.gate = gate
        self._control = control
        self._make = make
        self._settle = settle  # waits for all kernels
        self._heaps: dict[int, DeviceHeap] = {}  # by numbers that are equal on all ranks
        self._made = 0
        self._free: set[int] = set()  # which of them this rank does not use
        self._ended = False

    def take(self, size: int) -> tuple[DeviceHeap, bool]:
        """A heap of at least `size` bytes, and whether it has been used. Collective.

        It is the smallest that fits and that no rank uses. Its memory holds anything, and no rank
        but this one writes into it before this rank has taken part in another exchange.
        """
        require_equal(self._control, size, "the size of a heap")
        mine = sorted(self._free)
        offers = self._control.allgather(mine, "the heaps that can be used again")
        fitting = [
            number for number in set(mine).intersection(*offers) if self._heaps[number].size >= size
        ]
        if not fitting:
            heap = self._make(size)
            self._heaps[self._made] = heap
            self._made += 1
            return heap, False
        number = min(fitting, key=lambda number: (self._heaps[number].size, number))
        self._free.discard(number)
        return self._heaps[number], True

    def give_back(self, heap: DeviceHeap) -> None:
        """Notes that no kernel of this rank uses the heap any more. Not collective; any thread."""
        self._free.add(self._number_of(heap))

    def free(self, heap: DeviceHeap) -> None:
        """Frees a heap that no kernel of any rank uses any more. Collective."""
        del self._heaps[self._number_of(heap)]
        heap.close()

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`: of heaps that this rank does not use."""
        spare = [self._heaps[number].size for number in list(self._free)]
        return {"spare": sum(spare)} if spare else {}

    def interrupt(self, reason: str) -> None:
        """See `Holdings`: it makes no calls."""

    def end(self, *, world_ends: bool = False) -> bool:
        """Frees all heaps, together with the peers."""
        if not self._ended:
            self._ended = True
            self._settle()
            for heap in reversed(self._heaps.values()):
                heap.close()
        return True

    def _number_of(self, heap: DeviceHeap) -> int:
        return next(number for number, other in self._heaps.items() if other is heap)


class SharedOnGpu:
    """What the layers of one world share on the current device; `of` finds or makes it."""

    def __init__(self, world: World, device: torch.device) -> None:
        control = world.control
        self.launches = LaunchChain()
        self._control = control
        self._deadline = world.deadline
        by_nvshmem = Peers.find(world, device).by_nvshmem

        def make(size: int) -> DeviceHeap:
            return DeviceHeap(control, size, device, by_nvshmem=by_nvshmem)

        def settle() -> None:
            with contextlib.suppress(RuntimeError):  # a kernel that crashed has said so before
                torch.cuda.synchronize(device)

        self._pool = HeapPool(control, world.gate, make, settle)
        world.hold(None, self._pool)

    @classmethod
    def of(cls, world: World, device: torch.device) -> SharedOnGpu:
        """The shared parts of a world's layers; its first layer's device is the current one."""
        found = _of_world.get(world)
        if found is None:
            found = _of_world[world] = cls(world, device)
        return found

    def take_heap(self, size: int) -> DeviceHeap:
        """A heap into which no rank writes until this one has cleared it. Collective."""
        heap, used = self._pool.take(size)
        if used:
            # Its last kernels have ended on all ranks; what they put may be on the way.
            if heap.symmetric:
                finish_puts(self._control.rank, self._deadline)
            self._control.barrier("the clearing of a heap")
        return heap

    def give_heap_back(self, heap: DeviceHeap) -> None:
        """Gives a heap back that no kernel of this rank uses any more."""
        self._pool.give_back(heap)

    def free_heap(self, heap: DeviceHeap) -> None:
        """Frees a heap that no kernel of any rank uses any more. Collective."""
        self._pool.free(heap)


_of_world: weakref.WeakKeyDictionary[World, SharedOnGpu] = weakref.WeakKeyDictionary()
