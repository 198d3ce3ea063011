# SPDX-License-Identifier: Apache-2.0
"""The parts of the twin that the layers of a workspace share: a heap, memory, threads.

It makes them as large as the largest layer needs. Must not depend on calls or weights.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
import weakref
from collections.abc import Callable

from moeos import _runtime, _twin
from moeos._runtime import FailureKind
from moeos.engines.failure import may_go_on
from moeos.engines.shared_heap import SharedHeap
from moeos.partition.slicing import WHOLE, Slicing
from moeos.system import host_memory
from moeos.system.call_gate import CallGate
from moeos.system.held_signals import HeldSignals
from moeos.system.thread_limits import no_thread
from moeos.world import agreement
from moeos.world.all_reduce import AllReduce
from moeos.world.control import raise_together
from moeos.world.heap import SymmetricHeap
from moeos.world.world import World

_FEWER = "make the world with fewer processors: moeos.TwinOptions(processors=...)"


@dataclasses.dataclass
class TwinShape:
    """What the calls of one config's layers, forward or of gradients, share in addition to what all
    calls do.
    """

    sizes: _runtime.Sizes
    gradients: bool
    slicing: Slicing
    rank: _twin.Rank | None = None


class TwinWorkspace:
    """See `moeos.world.world.SharedMemory`."""

    def __init__(self, world: World, number: int) -> None:
        self.gate = CallGate(world.rank)
        self.closed = False
        self.number = number
        self.all_reduces: dict[int, AllReduce] = {}
        self._world = weakref.ref(world)  # which may be garbage together with its layers
        self._plan = SharedHeap()
        self._between = 0
        self._shapes: dict[object, TwinShape] = {}  # by key, and whether calls are of gradients
        self._layers: dict[object, Callable[[], None]] = {}
        self._heap: SymmetricHeap | None = None
        self._shared: _twin.Shared | None = None
        # No heap is unmapped while an abort writes into it. A handler may abort during a growth,
        # too: it then finds either heap whole.
        self._lock = threading.RLock()

    def admit(
        self,
        key: object,
        sizes: _runtime.Sizes,
        *,
        gradients: bool = False,
        slicing: Slicing = WHOLE,
    ) -> TwinShape:
        """Makes room for a layer's calls: forward, or of gradients; `key`: what says its shape.
        Collective, in the world's gate.

        Raises what `agreement.agree_workspace` raises, what a heap raises, and `ValueError` where
        experts of the workspace's other layers are cut otherwise.
        """
        slicing.require_alike([shape.slicing for shape in self._shapes.values()])
        key = (key, gradients)
        found = self._shapes.get(key)
        plan, between = self._plan, self._between
        if found is None:
            plan, between = plan.with_shape(sizes), max(between, sizes.intermediate_bytes)
        grows = plan.grew_from(self._plan) or between > self._between
        remote = bool(sizes.remote)
        mine = agreement.Admission(self.number, self.closed, grows, captured=False, remote=remote)
        grows = agreement.agree_workspace(self._live_world(), mine).grows
        if found is not None:
            return found
        shape = TwinShape(sizes, gradients, slicing)
        shapes = {**self._shapes, key: shape}
        if grows:
            self.gate.run(lambda: self._grow(plan, between, shapes), within=True)
            return shape
        made = self._together(lambda: self._ranks(plan, shapes, self._shared, [shape]))
        with HeldSignals():
            shape.rank = made[0]
            self._plan, self._between, self._shapes = plan, between, shapes
        return shape

    def add(self, key: object, clear: Callable[[], None]) -> None:
        """Adds a layer; `clear` clears its records."""
        self._layers[key] = clear

    def remove(self, key: object) -> None:
        """Removes a layer that is gone."""
        self._layers.pop(key, None)

    def require_open(self) -> None:
        """Raises `RuntimeError` if it is closed."""
        if self.closed:
            raise agreement.closed("the workspace of this layer is closed")

    def settle(self) -> None:
        """See `SharedMemory.settle`: a call of the twin has ended when it returns."""

    def clear(self) -> None:
        """See `SharedMemory.clear`."""
        if self._shared is not None:
            self._shared.clear()
        for shape in self._shapes.values():
            if shape.rank is not None:
                shape.rank.clear()
        for clear in list(self._layers.values()):
            clear()
        for one in self.all_reduces.values():
            one.renew()

    def go_on_alone(self) -> None:
        """Clears an earlier call's failure before a call, if no other rank must agree. A rank that
        gave up stays so, and damage lasts.
        """
        if self._live_world().size > 1:
            return
        rank = self._rank()
        if rank is not None and may_go_on(rank.failure().kind):
            with HeldSignals():
                self.clear()

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`."""
        if self._heap is None:
            return {}
        tables = [shape.sizes.tables_bytes for shape in self._shapes.values()]
        return {
            "heap": self._plan.size,
            "queues": self._plan.shapes[0].control_bytes + sum(tables),
            "between": self._between,
        }

    def close(self) -> None:
        """See `SharedMemory.close`."""
        self.closed = True

    def interrupt(self, reason: str) -> None:
        """Ends this rank's call, and its peers'."""
        with self._lock:
            rank = self._rank()
            if rank is not None:
                rank.abort()

    def give_up(self, *, interrupted: bool) -> None:
        """Aborts this rank's calls where none has failed. `interrupted`: by a signal, after the
        kernel of the last call.
        """
        with self._lock:
            rank = self._rank()
            if rank is not None and rank.failure().kind == FailureKind.NONE:
                rank.abort(interrupted)

    def _rank(self) -> _twin.Rank | None:
        """Any of the ranks: they share failures."""
        return next((shape.rank for shape in self._shapes.values() if shape.rank), None)

    def end(self, *, world_ends: bool = False) -> bool:
        """Joins the threads, frees the buffers, unmaps the heap. False during an interruption."""
        if not self._lock.acquire(blocking=world_ends):
            return False
        try:
            self.closed = True
            for shape in self._shapes.values():
                shape.rank = None
            self._shared = None  # joins the threads, so that the heap may be unmapped
            self._free(self._heap)
            self._heap = None
            while self.all_reduces:
                self.all_reduces.popitem()[1].end()
        finally:
            self._lock.release()
        return True

    def _grow(self, plan: SharedHeap, between: int, shapes: dict[object, TwinShape]) -> None:
        """Replaces the buffers by larger ones; a failure leaves the old ones as they are."""
        world = self._live_world()
        world.control.barrier("the growth of a workspace")  # no rank is inside a call any more
        heap = world.allocate_heap(plan.size)
        every = list(shapes.values())

        def make() -> tuple[_twin.Shared, list[_twin.Rank]]:
            shared = _twin.Shared(
                rank=world.rank,
                heaps=list(heap.addresses),
                heap_bytes=plan.size,
                control_bytes=plan.shapes[0].control_bytes,
                between_bytes=between,
            )
            return shared, self._ranks(plan, shapes, shared, every)

        try:
            shared, ranks = self._together(make)
        except BaseException:
            world.free_heap(heap)
            raise
        with HeldSignals(), self._lock:
            for shape, rank in zip(every, ranks, strict=True):
                shape.rank = rank
            self._shared = shared
            self._free(self._heap)
            self._heap = heap
            self._plan, self._between, self._shapes = plan, between, shapes

    def _ranks(
        self,
        plan: SharedHeap,
        shapes: dict[object, TwinShape],
        shared: _twin.Shared | None,
        wanted: list[TwinShape],
    ) -> list[_twin.Rank]:
        world = self._live_world()
        options = world.twin
        assert shared is not None
        made = []
        for index, shape in enumerate(shapes.values()):
            if all(shape is not other for other in wanted):
                continue
            place = plan.place(index)
            made.append(
                _twin.Rank(
                    sizes=shape.sizes,
                    rank=shape.slicing.place(world.rank, world.size)[0],
                    shared=shared,
                    words_at=place.words_at,
                    rows_at=place.rows_at,
                    results_at=place.results_at,
                    stride_rows=place.stride_rows,
                    deadline=world.deadline,
                    split_os=options.split_os,
                    jitter_us=options.jitter_us,
                    jitter_seed=options.jitter_seed,
                    ranks_per_node=world.ranks_per_node or world.size,
                    gradients=shape.gradients,
                    slice_number=shape.slicing.slice_of(world.rank) if shape.slicing.sums else 0,
                    peers=shape.slicing.peers(world.rank, world.size),
                )
            )
        return made

    def _together(self, make: Callable):  # type: ignore[no-untyped-def,type-arg]
        """What `make()` returns here, if it returns on all ranks; else its error, on all ranks."""
        world = self._live_world()
        error: Exception | None = None
        made = None
        try:
            made = make()
        except (OSError, MemoryError) as raised:
            error = raised
            if isinstance(raised, OSError) and raised.errno == errno.EAGAIN:
                error = no_thread(f"rank {world.rank}, {raised.strerror}", _FEWER)
            else:
                who = f"rank {world.rank} of {world.size}"
                error = host_memory.refused(raised, who, "the calls of a layer") or raised
        raise_together(world.control, error, "the threads of a layer")
        return made

    def _free(self, heap: SymmetricHeap | None) -> None:
        world = self._world()
        if heap is None:
            return
        if world is None:
            heap.close()
        else:
            world.free_heap(heap)

    def _live_world(self) -> World:
        world = self._world()
        assert world is not None  # a layer is being made in it
        return world
