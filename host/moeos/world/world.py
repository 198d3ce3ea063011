# SPDX-License-Identifier: Apache-2.0
"""A world: the ranks that run layers together, seen from one of them.

It owns the rank's control plane and heaps, and ends them in the right order. Must not depend on
layers, nor on how the ranks were started; what a layer holds of the machine is `Holdings` to it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, TypeVar

import torch

from moeos.partition.rates import H200, DeviceRates
from moeos.partition.sharding import Group
from moeos.system import host_memory, program_end
from moeos.system.call_gate import CallGate, stop_at_the_end
from moeos.system.errors import said, tell_rank
from moeos.system.held_signals import HeldSignals
from moeos.system.process import Home, settle
from moeos.world import interruption
from moeos.world.control import ControlPlane
from moeos.world.faults import FaultPlan
from moeos.world.heap import SymmetricHeap
from moeos.world.tracing import MAX_EVENTS

if TYPE_CHECKING:
    from moeos.world.all_reduce import AllReduce

Backend = Literal["twin", "cuda"]
Value = TypeVar("Value")

MAX_DEADLINE = 86_400.0
"""The longest deadline, in seconds."""

MARGIN = 5.0
"""Seconds beyond the deadline in which a call that is made to leave must end."""

MEMORY: dict[Backend, Callable[[World, int], SharedMemory]] = {}
"""Makes the memory of a workspace, by its number. Engines set it (`moeos.engines.machines`), as
worlds must not depend on them."""

_worlds: weakref.WeakValueDictionary[int, World] = weakref.WeakValueDictionary()  # by id
_stuck: list[object] = []  # what calls that never ended may still use


class Holdings(Protocol):
    """The parts of a machine that a layer holds on one rank: threads, buffers, part of a heap."""

    @property
    def gate(self) -> CallGate:
        """The gate that the layer's calls go through."""

    def interrupt(self, reason: str) -> None:
        """Makes this rank leave the call that it is in. From any thread, at any time."""

    def end(self, *, world_ends: bool = False) -> bool:
        """Gives all of it back; no call is running. False if that cannot be now, but later.

        The garbage collector may call it, in any thread and anywhere: it waits for no other thread
        that could wait for this one. `world_ends`: the world is being closed; there is no later.
        """

    def memory(self) -> dict[str, int]:
        """Bytes that it holds, by kind."""


class Beside(Protocol):
    """What a world shares with ranks of other worlds."""

    def abort(self, reason: str) -> None:
        """Ends the waits of all these ranks."""

    def close(self) -> None:
        """Gives it back. Idempotent."""


class SharedMemory(Holdings, Protocol):
    """What the layers of a workspace share on one rank, as an engine has it.

    Attributes:
        number: of the workspace, in the order in which those of its world are made.
        closed: whether no call can begin any more.
        all_reduces: what adds up after its calls, by the number of slices.
    """

    number: int
    closed: bool
    all_reduces: dict[int, AllReduce]

    def require_open(self) -> None:
        """Raises `RuntimeError` if it is closed."""

    def settle(self) -> None:
        """Returns when this rank's calls have ended, and what they have put has arrived."""

    def clear(self) -> None:
        """Makes all of it as before a first call. Between two barriers, and no call running."""

    def close(self) -> None:
        """Lets no call begin any more. After a barrier, and no call running on any rank."""


@dataclasses.dataclass(frozen=True)
class TwinOptions:
    """How a rank of the twin uses this machine. No option changes a result.

    Attributes:
        processors: processor threads of each rank, 1 to 1024; None divides the cores that this
            process may use among the ranks of this host, at least 1 each.
        split_os: runs the scheduler and the subscribers as threads of their own; otherwise they
            take turns in one.
        jitter_us: longest of the random delays put between the steps of all actors, in
            microseconds, 0 to 1e6; for tests of the protocol.
        jitter_seed: seed of these delays, 0 to 2^63 - 1.
    """

    processors: int | None = None
    split_os: bool = False
    jitter_us: float = 0.0
    jitter_seed: int = 0

    def __post_init__(self) -> None:
        if self.processors is not None:
            _check_integer("processors", self.processors, 1, 1024)
        _check_number("jitter_us", self.jitter_us, 0.0, 1e6)
        _check_integer("jitter_seed", self.jitter_seed, 0, 2**63 - 1)
        if not isinstance(self.split_os, bool):
            raise TypeError(f"split_os is {self.split_os!r}; it must be True or False")

    def processors_for(self, ranks: int) -> int:
        """Processor threads of each of `ranks` ranks on this host."""
        if self.processors is not None:
            return self.processors
        return max(1, len(os.sched_getaffinity(0)) // ranks)


class World:
    """The ranks that run layers together; made by `moeos.init` and `moeos.virtual.run`.

    A context manager. Leaving it by an exception aborts it: the other ranks' waits end with
    `PeerTimeout`.

    Attributes:
        control: the control plane, whose calls are collective.
        backend: "twin" or "cuda".
        deadline: seconds after which a wait for another rank raises `PeerTimeout`.
        twin: the twin's options, and `processors`, what they mean here: processor threads of this
            rank.
        ranks_per_node: ranks that this world treats as being on one node, or None; see `near`.
        trace_events: events that each actor of this rank notes of a call, at most; see
            `moeos.init`.
        faults: what goes wrong in it, or None.
        device: this rank's GPU; None is the current one when a layer is made.
        group: the process group that it was made of, or None.
        rates: the numbers of a GPU by which its layers choose layouts, equal on all ranks.
        gate: the thread that is inside has the control plane for itself.
        layer_names: of layers that have one, by their numbers.
        beside: what it shares with ranks of other worlds, by a name; that ends with this world.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        backend: Backend,
        deadline: float,
        twin: TwinOptions,
        ranks_per_node: int | None = None,
        trace_events: int = 0,
        faults: FaultPlan | None = None,
        device: torch.device | None = None,
        group: Group | None = None,
        rates: DeviceRates | None = None,
    ) -> None:
        check_deadline(deadline)
        check_ranks_per_node(ranks_per_node)
        check_trace_events(trace_events)
        self.control = control
        self.backend: Backend = backend
        self.deadline = float(deadline)
        self.twin = twin
        self.processors = twin.processors_for(control.size)
        self.ranks_per_node = ranks_per_node
        self.trace_events = trace_events
        self.faults = faults
        self.device = device
        self.group = group
        self.rates = H200 if rates is None else rates
        self.gate = CallGate(control.rank)
        # By identity. What one thread takes out no other finds: it is the one to end it.
        self._holdings: dict[int, Holdings] = {}
        self._retired: list[Holdings] = []  # could not be ended when its layer was deleted
        self._heaps: dict[int, SymmetricHeap] = {}
        self._layers = 0
        self.layer_names: dict[int, str] = {}
        self.beside: dict[object, Beside] = {}
        self._resets = 0
        self._aside: ControlPlane | None = None
        self._own_workspaces: dict[bool, Workspace] = {}  # by whether their layers are in slices
        self._workspaces: list[weakref.ref[Workspace]] = []
        self._workspace_count = 0
        self._closed = False
        settle()
        self._home = Home()
        # Each is held by one thread at a time, and none for long but `_closing`, in which a close
        # waits for calls and for layers that are being made. So those never wait for it.
        self._lock = threading.RLock()  # `_closed`, and the control plane's abort
        self._making = threading.RLock()  # `_own_workspaces`
        self._closing = threading.RLock()
        _worlds[id(self)] = self
        stop_at_the_end()  # which finds this world, or has begun

    @property
    def rank(self) -> int:
        """This rank, 0 ≤ rank < size."""
        return self.control.rank

    @property
    def size(self) -> int:
        """The number of ranks, P."""
        return self.control.size

    def near(self, peer: int) -> bool:
        """Whether a peer's memory may be written directly, if this machine can.

        False for ranks of other nodes where `ranks_per_node` makes nodes of that many consecutive
        ranks: they are reached by puts, as over a network.
        """
        size = self.ranks_per_node or self.size
        return peer // size == self.rank // size

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def require_trace(self) -> None:
        """Raises `RuntimeError` if this world's actors note no events, or it is closed."""
        self.require_open()
        if self.trace_events == 0:
            raise RuntimeError(
                f"nothing notes what rank {self.rank} does: make its world with "
                "moeos.init(..., trace_events=4096)"
            )

    def number_layer(self) -> int:
        """The number of a layer that is being made: 0 for this world's first."""
        self._layers += 1
        return self._layers - 1

    @property
    def workspace(self) -> Workspace:
        """The workspace of layers that are made without one; it is made when it is first used."""
        return self._own_workspace(sliced=False)

    @property
    def sliced_workspace(self) -> Workspace:
        """The workspace of layers with parallel='tensor', which no other layers may share."""
        return self._own_workspace(sliced=True)

    def _own_workspace(self, *, sliced: bool) -> Workspace:
        with self._making:
            if sliced not in self._own_workspaces:
                self._own_workspaces[sliced] = Workspace(self)
            return self._own_workspaces[sliced]

    def number_workspace(self) -> int:
        """The number of a workspace that is being made: 0 for this world's first."""
        self._workspace_count += 1
        return self._workspace_count - 1

    def note_workspace(self, workspace: Workspace) -> None:
        """A workspace that has been made."""
        self._workspaces.append(weakref.ref(workspace))

    def together(self, what: str, do: Callable[[], Value]) -> Value:
        """What `do()` returns or raises, in the gate. Collective, as `do` is; `what` names it if a
        signal interrupts it: see `moeos.world.interruption.told`.

        Raises `OSError` where PyTorch gets no memory.
        """
        try:
            return interruption.told(self.control, what, lambda: self.gate.run(do))
        except (RuntimeError, MemoryError) as error:
            refused = host_memory.refused(error, f"rank {self.rank} of {self.size}", what)
            if refused is None:
                raise
            raise refused from error

    def reset(self) -> None:
        """Makes all layers usable after a failed call. Collective; no rank may be in a call.

        All ranks must have the same workspaces.
        """
        self.require_open()
        reset(self, self._live_workspaces())

    @property
    def aside(self) -> ControlPlane:
        """The plane for exchanges that leave nothing half done: an exchange that fails ends no more
        than this, and `reset` makes it anew.
        """
        if self._aside is None:
            self.require_open()
            self._aside = self.control.aside(f"aside/{self._resets}")
        return self._aside

    def renew_aside(self) -> None:
        """Replaces `aside`. Between two barriers."""
        self._resets += 1
        self._aside = None

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's memory that moeos has allocated, by kind; weights are no kind.

        heap: symmetric heaps, which peers write; queues: queues, counters and maps; between: rows
        between the GEMMs; records: what layers note of their last calls; spare, on a GPU alone:
        heaps that wait for another workspace. No key is a sum of others. A kind without memory has
        no key: before the first layer the dict is empty.
        """
        self.require_open()
        found: dict[str, int] = {}
        for holdings in [*self._holdings.values(), *self._retired]:
            for kind, size in holdings.memory().items():
                found[kind] = found.get(kind, 0) + size
        return found

    def _live_workspaces(self) -> list[Workspace]:
        found = [reference() for reference in self._workspaces]
        return [workspace for workspace in found if workspace is not None]

    def allocate_heap(self, size: int) -> SymmetricHeap:
        """A zeroed heap of `size` bytes on every rank; lives as long as this world. Collective.

        Raises what `SymmetricHeap` raises, and `RuntimeError` if this world is closed.
        """
        self.require_open()
        heap = SymmetricHeap(self.control, size)
        self._heaps[id(heap)] = heap
        return heap

    def free_heap(self, heap: SymmetricHeap) -> None:
        """Unmaps a heap of this world here; a peer keeps what it has mapped. Not collective."""
        if self._heaps.pop(id(heap), None) is not None:
            heap.close()

    def hold(self, owner: object | None, holdings: Holdings) -> None:
        """Ends `holdings` when `owner`, if there is one, is deleted or collected, or with this
        world.

        `holdings` must not refer to `owner`.
        """
        self.end_retired()
        self._holdings[id(holdings)] = holdings
        if owner is not None:
            # Not with this world, which may be garbage together with the owner.
            finalizer = weakref.finalize(owner, _give_back, weakref.ref(self), self._home, holdings)
            finalizer.atexit = False

    def release(self, holdings: Holdings) -> None:
        """Ends holdings before their owner is gone; later, if that cannot be now."""
        if self._holdings.pop(id(holdings), None) is not None and not holdings.end():
            self._retired.append(holdings)

    def end_retired(self) -> None:
        """Ends what could not be ended when its layer was deleted, if it can be now."""
        for _ in range(len(self._retired)):
            holdings = self._retired.pop(0)
            if not holdings.end():
                self._retired.append(holdings)

    def require_open(self) -> None:
        """Raises `RuntimeError` if this world is closed, or the parent's of a forked process."""
        self.gate.require_open()

    def abort(self, reason: str) -> None:
        """Gives up, and makes the other ranks' waits and calls end with `PeerTimeout`.

        Does nothing in a process that a fork has made.
        """
        if not self._home.here:
            return
        stop_at_the_end()
        with self._lock:
            if not self._closed:
                self.control.abort(reason)
        self.interrupt(reason)

    def interrupt(self, reason: str) -> None:
        """Makes this rank leave the call that it is in. May be called from any thread."""
        if not self._home.here:
            return
        stop_at_the_end()
        self._interrupt(reason)

    def _interrupt(self, reason: str) -> None:
        for holdings in list(self._holdings.values()):
            holdings.interrupt(reason)

    def close(self) -> None:
        """Ends engines, unmaps heaps, leaves the control plane. Idempotent, not collective.

        During a call in another thread it first aborts this world. That call then raises
        `RuntimeError`, and other ranks' calls `PeerTimeout`.

        Raises `RuntimeError` within a call in the same thread, as in a signal handler, and then
        closes nothing. It raises it, too, if a call in another thread does not end within the
        deadline and 5 s. Then what the call may use stays until the process ends.

        A forked process ends nothing: all of it is the parent's.
        """
        if not self._home.here:
            self._closed = True
            return
        stop_at_the_end()
        try:
            self._close()
        finally:
            stop_at_the_end()

    def _close(self) -> None:
        # Before the lock: the thread that holds it waits for this thread's call.
        if any(gate.held_here for gate in self._gates()):
            raise RuntimeError(
                f"the world of rank {self.rank} cannot be closed within a call in the same "
                "thread: let the callback or signal handler raise, and close it behind the call"
            )
        with self._closing, contextlib.ExitStack() as last_first:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
            ends = time.monotonic() + self.deadline + MARGIN
            gates = self._make_leave("its world was closed during a call")
            last_first.callback(self.control.close)
            while self.beside:
                last_first.callback(self.beside.popitem()[1].close)
            if not _left(gates, ends):
                _stuck.append((self._holdings, self._heaps))
                raise RuntimeError(
                    f"the world of rank {self.rank} is closed, but a call in another thread did "
                    f"not end within {self.deadline + MARGIN:g} s: its memory stays until this "
                    "process ends"
                )
            while self._heaps:
                last_first.callback(self._heaps.popitem()[1].close)
            for key in list(self._holdings):
                taken = self._holdings.pop(key, None)  # None: a layer has just been deleted
                if taken is not None:
                    last_first.callback(taken.end, world_ends=True)
            while self._retired:
                last_first.callback(self._retired.pop().end, world_ends=True)

    def _gates(self) -> set[CallGate]:
        return {self.gate, *(holdings.gate for holdings in list(self._holdings.values()))}

    def _make_leave(self, reason: str) -> set[CallGate]:
        """Closes all gates and makes the threads inside leave; returns the gates."""
        gates = self._gates()
        for gate in gates:
            gate.close()
        if any(gate.busy for gate in gates):
            self.control.abort(reason)
            for one in list(self.beside.values()):
                one.abort(reason)
            self._interrupt(reason)  # and stands nowhere still: the program's end waits for a close
        return gates

    def __enter__(self) -> World:
        self.require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(said(error))
            if self.size > 1:
                tell_rank(error, f"rank {self.rank} of {self.size}")
        self.close()

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """This world: a copy of what holds it is one of the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the world of rank {self.rank} cannot be pickled: it is memory and threads of this "
            "process; make one with moeos.init where the pickle is read"
        )

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend!r}{state})"


def _give_back(world: weakref.ref[World], home: Home, holdings: Holdings) -> None:
    """Ends what a layer that is gone has held. May run anywhere, as garbage is collected."""
    if not home.here:
        return
    lives = world()
    if lives is None:
        holdings.end()
    elif lives._holdings.pop(id(holdings), None) is not None and not holdings.end():
        lives._retired.append(holdings)


def _left(gates: Iterable[CallGate], ends: float) -> bool:
    """Whether all threads have left these closed gates by `ends`, of `time.monotonic()`."""
    return all(gate.wait_until_left(ends - time.monotonic()) for gate in gates)


@atexit.register
def _end_open_worlds() -> None:
    """Runs before the interpreter ends, which would end threads that are in a call or a close.

    Threads that are no daemons have ended by now, and callbacks that were registered later have
    run. The peers of a world without a call in flight get no message: their last call, which this
    rank has done its part of, may still go on.
    """
    program_end.begin()  # from here on no other thread makes a world
    begun = time.monotonic()
    worlds = [
        world for one in _worlds.valuerefs() if (world := one()) is not None and world._home.here
    ]
    gates = [
        () if world.closed else world._make_leave("its program ended during a call")
        for world in worlds
    ]
    for world, closed in zip(worlds, gates, strict=True):
        ends = begun + world.deadline + MARGIN
        _left(closed, ends)
        if world._closing.acquire(timeout=max(0.0, ends - time.monotonic())):  # no thread closes it
            world._closing.release()
    program_end.let_come()


def check_deadline(deadline: float) -> None:
    """Raises unless `deadline` is a number of seconds above 0 and up to MAX_DEADLINE."""
    _require_number("deadline", deadline)
    if not 0 < deadline <= MAX_DEADLINE:  # as nan is not
        raise ValueError(
            f"deadline is {deadline}; allowed: above 0 and up to {MAX_DEADLINE:g} seconds"
        )


def check_trace_events(trace_events: int) -> None:
    """Raises `TypeError` or `ValueError` unless this many events can be noted."""
    _check_integer("trace_events", trace_events, 0, MAX_EVENTS)


def check_ranks_per_node(ranks_per_node: int | None) -> None:
    """Raises unless `ranks_per_node` is None or an integer from 1 to 2^16."""
    if ranks_per_node is not None:
        _check_integer("ranks_per_node", ranks_per_node, 1, 1 << 16)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; allowed: {low} to {high}")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    _require_number(name, value)
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value}; allowed: {low:g} to {high:g}")


class Workspace:
    """What calls write: the symmetric heap, queues, buffers between the GEMMs.

    Layers of a world, of any shapes, share its default one, `world.workspace`, unless they are made
    with another: `MoELayer(cfg, world, workspace=moeos.Workspace(world))`. Calls of its layers run
    one at a time, and all ranks must make them in the same order. Each buffer is as large as the
    largest layer needs; a layer that needs more makes it grow when it is made, never in a call. A
    graph that was captured before keeps the buffers that it was captured with. A failed call fails
    all layers of its workspace until `reset`.

    All ranks must make their workspaces in the same order.

    Attributes:
        world: the ranks' world.
        shared: the engine's memory.
    """

    def __init__(self, world: World) -> None:
        require_world(world)
        self.world = world
        self.shared: SharedMemory = MEMORY[world.backend](world, world.number_workspace())
        world.note_workspace(self)  # as one that a reset finds, and so with its memory
        world.hold(self, self.shared)

    def reset(self) -> None:
        """Makes its layers usable after a failure. Collective; no rank may be in a call."""
        reset(self.world, [self])

    def close(self) -> None:
        """Gives the memory back; calls of its layers raise `RuntimeError` then. Collective.

        Memory that a captured graph may use stays until the world is closed.
        """
        if self.shared.gate.held_here:
            raise RuntimeError("a workspace cannot be closed within a call of one of its layers")
        interruption.told(
            self.world.control,
            "the end of a workspace",
            lambda: in_gates(self.world, [self], self._close),
        )
        self.world.release(self.shared)

    def _close(self) -> None:
        self.shared.settle()
        self.world.control.barrier("the end of a workspace")  # no rank is inside a call any more
        self.shared.close()

    def __copy__(self) -> Workspace:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Workspace:
        """This one: a copy of a layer writes where the layer does."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a workspace cannot be pickled: it is memory of this process")


def require_workspace(workspace: object, world: World) -> None:
    """Raises unless it is one of this world, or None: before anything is sent."""
    if workspace is None:
        return
    if not isinstance(workspace, Workspace):
        raise TypeError(
            f"workspace is a {type(workspace).__name__}; it must be a moeos.Workspace, or None for "
            "the world's own"
        )
    if workspace.world is not world:
        raise ValueError(
            f"the workspace is of another world, {workspace.world}, and the layer of {world}: pass "
            "moeos.Workspace(world), or None for the world's own"
        )


def reset(world: World, workspaces: list[Workspace]) -> None:
    """Resets workspaces of a world, the same ones on all ranks. Collective."""

    def settle_and_clear() -> None:
        for workspace in workspaces:
            workspace.shared.settle()
        # This rank is in no call. A peer may be in one that this rank has not made, as when this
        # rank's arguments were wrong, and leaves it at the deadline.
        world.control.barrier("reset", beyond=MARGIN)
        with HeldSignals():  # memory that is cleared in part would be taken for a call's
            for workspace in workspaces:
                workspace.shared.clear()
            world.renew_aside()
        world.control.barrier("the end of reset")  # all heaps are clean before any rank writes

    interruption.told(world.control, "reset", lambda: in_gates(world, workspaces, settle_and_clear))


def in_gates(world: World, workspaces: list[Workspace], do: Callable[[], None]) -> None:
    """Calls `do` inside the gates of a world and of its workspaces, each of them once."""
    for gate in dict.fromkeys([*(each.shared.gate for each in workspaces), world.gate]):
        do = functools.partial(gate.run, do, within=gate is not world.gate)
    do()


def require_world(world: object) -> None:
    """Raises unless it is a world, and open."""
    if not isinstance(world, World):
        raise TypeError(f"world is a {type(world).__name__}; it must be what moeos.init returned")
    world.require_open()
