"""The host control plane: how the ranks of a world exchange small Python objects.

It is used when a world, a heap or a layer is made and when it is closed, never in a forward call.
Every wait has a deadline, and its error names the ranks that did not arrive. This file knows
nothing of heaps, layers or launchers.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar, cast

from moeos.caller import Caller
from moeos.errors import ConfigMismatch, PeerTimeout
from moeos.process import Home, keep_in_children

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Value = TypeVar("Value")

MAX_PAYLOAD_BYTES = 1 << 20
"""The most bytes, pickled, that one rank may contribute to one exchange between processes."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds between two looks at what has arrived
_GRACE = 5.0  # seconds that a rank which leaves waits for peers that should be leaving as well
_MAX_REASON = 2000  # characters of an abort's reason that the peers are told
_NOTHING = object()  # a post that has not arrived yet


class ControlPlane(Protocol):
    """Collective exchange of small Python objects among the ranks of a world.

    All ranks make the same calls in the same order. After a timeout, and after `abort` on any rank,
    every later exchange raises `PeerTimeout`.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 ≤ rank < size."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks live in one address space; objects are then exchanged by reference."""

    def allgather(self, value: Value, what: str = "an exchange") -> list[Value]:
        """Every rank's value, in rank order; `what` names the exchange in an error.

        Raises `PeerTimeout` naming the ranks that did not take part before the deadline or the rank
        that aborted, and `ValueError` if `value` takes more than `MAX_PAYLOAD_BYTES`.
        """

    def barrier(self) -> None:
        """Returns when all ranks have called it; raises `PeerTimeout` as `allgather` does."""

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks with a `PeerTimeout` that tells the reason."""

    def close(self) -> None:
        """Frees what this rank holds. Idempotent; waits for other ranks a few seconds at most."""


def raise_together(control: ControlPlane, error: Exception | None, what: str) -> None:
    """Raises on all ranks if any rank has an error: the error of the lowest rank that has one.

    Collective. `what` names in a `PeerTimeout` what the ranks were about to agree on.
    """
    errors = control.allgather(error, what)
    for rank, first in enumerate(errors):
        if first is not None:
            raise first if rank == control.rank else copy.copy(first)


def require_equal(control: ControlPlane, value: object, what: str) -> None:
    """Raises `ConfigMismatch`, the same on all ranks, unless all of them hold an equal value.

    Collective. Values are compared by their `repr`; `what` names them in the message.
    """
    texts = control.allgather(repr(value), what)
    if len(set(texts)) > 1:
        held = "; ".join(
            f"{name_ranks(rank for rank in range(control.size) if texts[rank] == text)}: {text}"
            for text in dict.fromkeys(texts)
        )
        raise ConfigMismatch(f"{what} must be the same on all ranks, but they differ: {held}")


def _pickled(value: object) -> bytes:
    payload = pickle.dumps(value)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a value takes {len(payload)} bytes; allowed: {MAX_PAYLOAD_BYTES}")
    return payload


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a person writes them: "rank 3", "ranks 1, 2"."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class SoloControl:
    """The control plane of a world of one rank."""

    rank = 0
    size = 1
    shares_memory = True

    def __init__(self) -> None:
        self._home = Home()

    def allgather(self, value: Value, what: str = "an exchange") -> list[Value]:
        self._home.require(f"the control plane of rank {self.rank}")
        return [value]

    def barrier(self) -> None:
        self.allgather(None, "a barrier")

    def abort(self, reason: str) -> None:
        return

    def close(self) -> None:
        return


class _PolledControl:
    """A control plane over a transport that is asked again and again until all posts are there.

    A transport offers `_post`, `_take` and `_find_abort`; none of them waits for another rank.
    """

    shares_memory = False

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank = rank
        self.size = size
        self._deadline = deadline
        self._home = Home()
        self._sequence = -1  # the number of the exchange that began last
        self._failure: str | None = None
        self._closed = False

    def allgather(self, value: Value, what: str = "an exchange") -> list[Value]:
        self._home.require(f"the control plane of rank {self.rank}")
        if self._closed:
            raise RuntimeError(f"rank {self.rank} cannot begin {what}: its world is closed")
        if self._failure is not None:
            raise PeerTimeout(f"rank {self.rank} cannot begin {what}: {self._failure}")
        self._sequence += 1
        values = [value] * self.size

        def arrived(peer: int) -> bool:
            taken = self._take(peer)
            if taken is _NOTHING:
                return False
            values[peer] = cast(Value, taken)
            return True

        try:
            self._post(value)
            self._wait(arrived, what)
        except PeerTimeout:
            raise
        except BaseException as error:
            # A signal's handler, say. The peers may be in the next exchange already, so this one
            # cannot be made again: nobody may take a later one of theirs for it.
            self.abort(f"{type(error).__name__} in {what}")
            raise
        return values

    def barrier(self) -> None:
        self.allgather(None, "a barrier")

    def abort(self, reason: str) -> None:
        """See `ControlPlane.abort`."""
        raise NotImplementedError

    def _wait(self, arrived: Callable[[int], bool], what: str) -> None:
        """Polls until `arrived(peer)` has been true once for each peer."""
        ends = time.monotonic() + self._deadline
        missing = [peer for peer in range(self.size) if peer != self.rank]
        pause = _SHORTEST_PAUSE
        while missing := [peer for peer in missing if not arrived(peer)]:
            aborted = self._failure or self._find_abort()  # another thread may give up as well
            if aborted is not None:
                # A rank posts before it gives up: what all have posted still counts.
                if all(arrived(peer) for peer in missing):
                    return
                self._fail(f"rank {self.rank} stopped waiting for {what}: {aborted}")
            if time.monotonic() > ends:
                self._fail(
                    f"rank {self.rank} of {self.size} waited {self._deadline:g} s for {what}: "
                    f"{name_ranks(missing)} did not arrive (ended, stuck, or never made this call)"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _fail(self, message: str) -> NoReturn:
        self._failure = message
        raise PeerTimeout(message)

    def _gave_up(self, reason: str) -> str:
        """Marks this rank as aborted; the sentence that its peers are told."""
        note = f"rank {self.rank} gave up: {reason[:_MAX_REASON]}"
        if self._failure is None:
            self._failure = note
        return note

    def _post(self, value: object) -> None:
        """Offers this rank's value of the current exchange to all peers."""
        raise NotImplementedError

    def _take(self, peer: int) -> Any:
        """The peer's value of the current exchange, or `_NOTHING` if it has not arrived."""
        raise NotImplementedError

    def _find_abort(self) -> str | None:
        """The sentence of a peer that gave up, if there is one."""
        raise NotImplementedError


class _Board:
    """What the virtual ranks of one process share: posts by (exchange, rank), and who gave up."""

    def __init__(self) -> None:
        self.posts: dict[tuple[int, int], object] = {}
        self.aborted: str | None = None


class ThreadControl(_PolledControl):
    """The control plane of one of several virtual ranks, which are threads of this process.

    Made by `ThreadControl.group`. Values are passed by reference, so nobody may change them
    afterwards.
    """

    shares_memory = True

    def __init__(self, rank: int, size: int, deadline: float, board: _Board) -> None:
        super().__init__(rank, size, deadline)
        self._board = board

    @staticmethod
    def group(size: int, deadline: float) -> list[ThreadControl]:
        """The control planes of `size` virtual ranks, whose waits end after `deadline` seconds."""
        board = _Board()
        return [ThreadControl(rank, size, deadline, board) for rank in range(size)]

    def abort(self, reason: str) -> None:
        if not self._home.here:
            return
        note = self._gave_up(reason)
        if self._board.aborted is None:
            self._board.aborted = note

    def close(self) -> None:
        self._closed = True

    def _post(self, value: object) -> None:
        self._board.posts[self._sequence, self.rank] = value
        # This rank saw every peer in the exchange before, so all had read the one before that.
        self._board.posts.pop((self._sequence - 2, self.rank), None)

    def _take(self, peer: int) -> Any:
        return self._board.posts.get((self._sequence, peer), _NOTHING)

    def _find_abort(self) -> str | None:
        return self._board.aborted


class MpiControl(_PolledControl):
    """The control plane of a process that mpirun (or srun with PMIx) started, over mpi4py.

    Importing mpi4py starts MPI, which has no deadline: it waits until every process of the job has
    done so, and mpirun ends the job if one of them exits before. It talks over a duplicate of
    MPI.COMM_WORLD, so its messages meet none of the application's. `deadline` is in seconds; raises
    `PeerTimeout` if a rank of MPI.COMM_WORLD does not make one in time.
    """

    _VALUE = 1  # message tag: a value of an exchange
    _NOTE = 2  # message tag: the sentence of a rank that gave up

    def __init__(self, deadline: float) -> None:
        _start_mpi()
        from mpi4py import MPI

        super().__init__(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, deadline)
        self._mpi = MPI
        self._communicator: MPI.Intracomm | None = None
        self._sends: dict[int, tuple[MPI.Request, bytes]] = {}
        self._receives: dict[int, tuple[MPI.Request, bytearray]] = {}
        self._notes: dict[int, str] = {}  # by the peer that gave up
        self._notes_sent: list[tuple[MPI.Request, bytes]] = []
        self._communicator = self._join(MPI.COMM_WORLD)

    def abort(self, reason: str) -> None:
        if not self._home.here:
            return
        note = self._gave_up(reason).encode()
        if self._communicator is None or self._notes_sent:
            return
        atexit.register(self._leave)
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(self._mpi.Exception):  # the peer's process is gone
                    request = self._communicator.Isend([note, self._mpi.BYTE], peer, self._NOTE)
                    self._notes_sent.append((request, note))

    def close(self) -> None:
        self._closed = True
        if not self._home.here:
            return
        # After a failure messages may still be under way, so the communicator then ends with MPI.
        if self._failure is None and self._communicator is not None:
            self._communicator.Free()
            self._communicator = None

    def _join(self, world: MPI.Intracomm) -> MPI.Intracomm:
        """Duplicates `world` with a deadline.

        A duplication does not tell who is missing. So each rank first scatters one byte: the
        scatter of root r ends here once r has begun it.
        """
        sent, received = bytearray(self.size), [bytearray(1) for _ in range(self.size)]
        byte = self._mpi.BYTE
        requests = [
            world.Iscatter([sent, 1, byte] if root == self.rank else None, [one, 1, byte], root)
            for root, one in enumerate(received)
        ]
        self._wait(lambda peer: requests[peer].Test(), "the start of a world")
        if self.size == 1:
            return world.Dup()
        communicator, duplicated = world.Idup()
        self._wait(lambda peer: requests[self.rank].Test() and duplicated.Test(), "a communicator")
        return communicator

    def _post(self, value: object) -> None:
        assert self._communicator is not None
        payload = _pickled(value)
        for peer in range(self.size):
            if peer != self.rank:
                request = self._communicator.Isend([payload, self._mpi.BYTE], peer, self._VALUE)
                self._sends[peer] = (request, payload)

    def _take(self, peer: int) -> Any:
        assert self._communicator is not None
        if peer not in self._receives:
            message = self._communicator.Improbe(peer, self._VALUE, status := self._mpi.Status())
            if message is None:
                return _NOTHING
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            self._receives[peer] = (message.Irecv([buffer, self._mpi.BYTE]), buffer)
        if not (self._receives[peer][0].Test() and self._sends[peer][0].Test()):
            return _NOTHING
        del self._sends[peer]
        return pickle.loads(self._receives.pop(peer)[1])

    def _find_abort(self) -> str | None:
        if self._communicator is not None:
            status = self._mpi.Status()
            while self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._NOTE, status):
                note = bytearray(status.Get_count(self._mpi.BYTE))
                self._communicator.Recv([note, self._mpi.BYTE], status.source, self._NOTE)
                self._notes[status.source] = note.decode()
        return next(iter(self._notes.values()), None)

    def _leave(self) -> None:
        """Ends the whole job where MPI_Finalize would wait for ever for a rank that is stuck.

        Called at the exit of a process that gave up. If an uncaught exception ends it, the peers,
        which have been told, get a few seconds to end as well.
        """
        failed = getattr(sys, "last_value", None) is not None
        if not failed or not self._home.here or self._mpi.Is_finalized():
            return
        ends = time.monotonic() + _GRACE
        while len(self._notes) < self.size - 1:
            if time.monotonic() > ends:
                stuck = [r for r in range(self.size) if r != self.rank and r not in self._notes]
                print(f"moeos: ending the job, {name_ranks(stuck)} did not end", file=sys.stderr)
                self._mpi.COMM_WORLD.Abort(1)
            self._find_abort()
            time.sleep(_LONGEST_PAUSE)


def _start_mpi() -> None:
    """Imports mpi4py, if nobody has, so that it is this process that ends MPI, and no child.

    mpi4py ends MPI in a child as well, where MPI_Finalize waits for ever.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    home = Home()

    def end() -> None:
        if home.here and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()

    atexit.register(end)


class StoreControl(_PolledControl):
    """The control plane of a process that torchrun (or srun without PMIx) started, over a TCPStore.

    The store is moeos's own or, under torchrun, its agent's: the default process group of
    torch.distributed is neither needed nor touched. With `serve`, this rank holds the store.
    `deadline` is in seconds. Raises `PeerTimeout` if no store answers at `host`:`port` in time, and
    `RuntimeError` if this rank is to serve one there and cannot.
    """

    _made = itertools.count()  # control planes of this process, which use different keys
    # Stores that this process serves, by port, until it ends: a peer may be quick to come back.
    _served: ClassVar[dict[int, TCPStore]] = {}

    def __init__(
        self, rank: int, size: int, deadline: float, *, host: str, port: int, serve: bool
    ) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        super().__init__(rank, size, deadline)
        self._where = f"the store at {host}:{port} (rank 0 or its launcher serves it)"
        self._serve = serve
        self._caller = Caller("moeos-store")
        self._lost: str | None = None  # why the store can be asked no more
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"moeos/{restarts}/{next(self._made)}"

        def connect() -> PrefixStore:
            timeout = timedelta(seconds=deadline)
            store = TCPStore(
                host,
                port,
                is_master=serve,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
            if serve:
                self._served[port] = store
            keep_in_children(store)
            return PrefixStore(prefix, store)

        try:
            self._store = self._caller.result(connect, deadline)
        except (RuntimeError, concurrent.futures.TimeoutError) as error:
            self._caller.close()
            if serve:
                raise RuntimeError(f"rank {rank} cannot serve {self._where}: {error}") from error
            waited = f"rank {rank} of {size} waited {deadline:g} s for {self._where}"
            raise PeerTimeout(f"{waited} {error}".rstrip()) from error

    def abort(self, reason: str) -> None:
        if self._closed or not self._home.here:
            return
        note = self._gave_up(reason)
        with contextlib.suppress(PeerTimeout):  # a store that is gone tells the peers as much
            if self._find_abort() is None:
                self._ask(lambda: self._store.set("abort", note))

    def close(self) -> None:
        if self._closed or not self._home.here:
            return
        self._closed = True
        with contextlib.suppress(PeerTimeout):
            self._ask(lambda: self._store.set(f"closed/{self.rank}", ""))
            if self._serve:  # until the peers need the store no more
                closed = [f"closed/{rank}" for rank in range(self.size)]
                ends = time.monotonic() + min(_GRACE, self._deadline)
                while time.monotonic() < ends and not self._ask(lambda: self._store.check(closed)):
                    time.sleep(_LONGEST_PAUSE)
        self._caller.close()
        del self._store

    def _ask(self, question: Callable[[], Value]) -> Value:
        """The store's answer; `PeerTimeout` if it is gone or gives none within the deadline."""
        if self._lost is None:
            try:
                return self._caller.result(question, self._deadline)
            except concurrent.futures.TimeoutError:
                self._lost = f"had no answer for {self._deadline:g} s from {self._where}"
            except RuntimeError as error:
                self._lost = f"lost {self._where} {error}"
        self._fail(f"rank {self.rank} {self._lost}")

    def _post(self, value: object) -> None:
        payload = cast(str, _pickled(value))  # bytes; the stub of `set` knows no more than str
        self._ask(lambda: self._store.set(f"{self._sequence}/{self.rank}", payload))
        if self._sequence >= 2:  # every peer has read it, see ThreadControl
            self._ask(lambda: self._store.delete_key(f"{self._sequence - 2}/{self.rank}"))

    def _take(self, peer: int) -> Any:
        key = f"{self._sequence}/{peer}"
        if not self._ask(lambda: self._store.check([key])):
            return _NOTHING
        return pickle.loads(self._ask(lambda: self._store.get(key)))

    def _find_abort(self) -> str | None:
        if not self._ask(lambda: self._store.check(["abort"])):
            return None
        return self._ask(lambda: self._store.get("abort")).decode()
