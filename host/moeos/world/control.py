# SPDX-License-Identifier: Apache-2.0
"""The host control plane: how the ranks of a world exchange small Python objects.

It is used when a world, a heap or a layer is made and when it is closed, never in a forward call.
Every wait has a deadline, and its error names the ranks that did not arrive. There is one way
between processes, a store of torch.distributed. Virtual ranks have their own: they hand each other
objects, such as memory and events, and a store holds bytes. Must not depend on heaps, layers,
launchers, or where a store comes from.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeVar, cast

from moeos.system.caller import Caller
from moeos.system.errors import ConfigMismatch, PeerTimeout, in_job, said
from moeos.system.process import Home, keep_in_children

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

Value = TypeVar("Value")

MAX_PAYLOAD_BYTES = 1 << 20
"""The most bytes, pickled, that one rank may contribute to one exchange between processes."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds between two looks at what has arrived
_GRACE = 5.0  # seconds that a rank which leaves waits for peers that should be leaving as well
_MAX_REASON = 2000  # characters of an abort's reason that the peers get
_ASIDE_REMEDY = "All ranks may call world.reset() and go on"
REMEDY = (
    "Ranks of this world agree on nothing any more: close it on all of them, and make it and its "
    "layers again"
)


class _Post(NamedTuple):
    """A rank's offer in one exchange: the exchange's name, and the rank's value."""

    what: str
    value: object


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

    def allgather(
        self, value: Value, what: str = "an exchange", *, beyond: float = 0.0
    ) -> list[Value]:
        """Every rank's value, in rank order; `what` names the exchange, alike on all ranks.

        It waits until the deadline, and `beyond` seconds more. Raises `PeerTimeout` naming the
        ranks that did not take part before that or the rank that aborted, and `ValueError` if
        `value` takes more than `MAX_PAYLOAD_BYTES`. Where ranks are in exchanges of different names
        it raises `ConfigMismatch`, the same on all of them.
        """

    def barrier(self, what: str = "a barrier", *, beyond: float = 0.0) -> None:
        """Returns when all ranks have called it; waits and raises as `allgather` does."""

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks with a `PeerTimeout` that names the reason."""

    def look(self, what: str) -> None:
        """Raises `PeerTimeout` if a rank has given up; for code that waits by other means."""

    def aside(self, name: str) -> ControlPlane:
        """A plane of these ranks whose failure does not end this one. It ends with this one, and
        making it waits for no rank. `name`: equal on all ranks, and not used before.
        """

    def store(self, name: str) -> Store:
        """A store of these ranks' processes, for torch's own rendezvous. Not where
        `shares_memory`.
        """

    def close(self) -> None:
        """Frees what this rank holds. Idempotent; waits for other ranks a few seconds at most."""


def raise_together(
    control: ControlPlane, error: Exception | None, what: str, *, beyond: float = 0.0
) -> None:
    """Raises on all ranks if any rank has an error: the error of the lowest rank that has one.

    Collective. `what` names in a `PeerTimeout` what the ranks were about to agree on; `beyond`: see
    `ControlPlane.allgather`.
    """
    errors = control.allgather(error, what, beyond=beyond)
    for rank, first in enumerate(errors):
        if first is not None:
            raise first if rank == control.rank else copy.copy(first)


def agree(control: ControlPlane, do: Callable[[], Value], what: str) -> Value:
    """What `do()` returns here, if it returns on all ranks; else a `RuntimeError` on all ranks.

    Collective. For errors of libraries that have types of their own: it names the rank and `what`.
    """
    error: Exception | None = None
    value: Value | None = None
    try:
        value = do()
    except Exception as raised:
        error = RuntimeError(f"rank {control.rank}, {what}: {raised}")
    raise_together(control, error, what)
    return value  # type: ignore[return-value]


def require_equal(control: ControlPlane, value: object, what: str) -> None:
    """Raises `ConfigMismatch`, the same on all ranks, unless all of them hold an equal value.

    Collective. Values are compared by their `repr`; `what` names them in the message.
    """
    require_same(what, control.allgather(repr(value), what))


def require_same(what: str, texts: Sequence[str]) -> None:
    """Raises `ConfigMismatch` unless the texts, one of each rank, are equal."""
    if len(set(texts)) > 1:
        held = "; ".join(
            f"{name_ranks(rank for rank, other in enumerate(texts) if other == text)}: {text}"
            for text in dict.fromkeys(texts)
        )
        raise ConfigMismatch(f"{what} must be the same on all ranks, but they differ: {held}")


def _require_one_name(names: Sequence[str]) -> None:
    """Raises `ConfigMismatch` unless all ranks have begun exchanges of one name: a rank must not
    take another's value in a different exchange for an answer.
    """
    for rank, name in enumerate(names):
        if name != names[0]:
            raise ConfigMismatch(
                f"all ranks must do the same at the same time: rank 0 came to {names[0]}, and rank "
                f"{rank} to {name}. Make layers and workspaces, reset and close them in the same "
                "order on all ranks"
            )


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

    def allgather(
        self, value: Value, what: str = "an exchange", *, beyond: float = 0.0
    ) -> list[Value]:
        self._home.require(f"the control plane of rank {self.rank}")
        return [value]

    def barrier(self, what: str = "a barrier", *, beyond: float = 0.0) -> None:
        self.allgather(None, what)

    def abort(self, reason: str) -> None:
        return

    def look(self, what: str) -> None:
        return

    def aside(self, name: str) -> SoloControl:
        return self

    def store(self, name: str) -> Store:
        raise NotImplementedError

    def close(self) -> None:
        return


class _PolledControl:
    """A control plane over a transport that is asked again and again until all posts are there.

    A transport offers `_post`, `_take` and `_find_abort`; none of them waits for another rank.
    """

    shares_memory = False

    def __init__(
        self,
        rank: int,
        size: int,
        deadline: float,
        job: Sequence[int] = (),
        remedy: str = REMEDY,
    ) -> None:
        self.rank = rank
        self.size = size
        self._deadline = deadline
        self._job = job
        self._remedy = remedy
        self._home = Home()
        self._sequence = -1  # the number of the exchange that began last
        self._failure: str | None = None
        self._closed = False

    def allgather(
        self, value: Value, what: str = "an exchange", *, beyond: float = 0.0
    ) -> list[Value]:
        return self._exchange(value, what, self._deadline + beyond)

    def barrier(self, what: str = "a barrier", *, beyond: float = 0.0) -> None:
        self.allgather(None, what, beyond=beyond)

    def abort(self, reason: str) -> None:
        """See `ControlPlane.abort`."""
        raise NotImplementedError

    def look(self, what: str) -> None:
        """See `ControlPlane.look`."""
        aborted = self._failure or self._find_abort()
        if aborted is not None:
            self._fail(f"rank {self.rank} stopped waiting for {what}: {aborted}. {self._remedy}")

    def aside(self, name: str) -> ControlPlane:
        """See `ControlPlane.aside`."""
        raise NotImplementedError

    def store(self, name: str) -> Store:
        """See `ControlPlane.store`."""
        raise NotImplementedError

    def _exchange(self, value: Value, what: str, seconds: float) -> list[Value]:
        self._home.require(f"the control plane of rank {self.rank}")
        if self._closed:
            raise RuntimeError(f"rank {self.rank} cannot begin {what}: its world is closed")
        if self._failure is not None:
            raise PeerTimeout(
                f"rank {self.rank} cannot begin {what}: {self._failure}. {self._remedy}"
            )
        self._sequence += 1
        values = [value] * self.size
        names = [what] * self.size

        def arrived(peer: int) -> bool:
            taken = self._take(peer)
            if taken is None:
                return False
            names[peer], values[peer] = taken.what, cast(Value, taken.value)
            return True

        try:
            self._post(_Post(what, value))
            peers = [peer for peer in range(self.size) if peer != self.rank]
            self._wait(arrived, what, peers, seconds)
        except PeerTimeout as error:
            text = str(error)  # a peer's may have the remedy
            told = text if self._remedy in text else f"{text}. {self._remedy}"
            raise PeerTimeout(told) from error.__cause__
        except BaseException as error:
            # A signal's handler, for example. Peers may be in the next exchange already, so this
            # one cannot be repeated: it must not meet a later exchange of theirs.
            self.abort(f"{type(error).__name__} in {what}")
            raise
        _require_one_name(names)
        return values

    def _wait(
        self, arrived: Callable[[int], bool], what: str, peers: Iterable[int], seconds: float
    ) -> None:
        """Polls, for `seconds` at most, until `arrived(peer)` has been true for each peer."""
        ends = time.monotonic() + seconds
        missing = list(peers)
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
                    f"rank {self.rank} of {self.size} waited {seconds:g} s for {what}: "
                    f"{name_ranks(missing)} did not arrive (ended, stuck, or never made this call)"
                    f"{in_job([self.rank, *missing], self._job)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _fail(self, message: str) -> NoReturn:
        self._failure = message
        raise PeerTimeout(message)

    def _gave_up(self, reason: str) -> str:
        """Marks this rank as aborted; returns the sentence for its peers.

        It is ASCII: a reason may hold characters that no encoding has, such as a file's name.
        """
        told = reason[:_MAX_REASON].encode("ascii", "backslashreplace").decode()
        note = f"rank {self.rank} gave up: {told}{in_job([self.rank], self._job)}"
        if self._failure is None:
            self._failure = note
        return note

    def _post(self, post: _Post) -> None:
        """Offers this rank's post of the current exchange to all peers."""
        raise NotImplementedError

    def _take(self, peer: int) -> _Post | None:
        """The peer's post of the current exchange, or None if it has not arrived."""
        raise NotImplementedError

    def _find_abort(self) -> str | None:
        """The sentence of a peer that gave up, if there is one."""
        raise NotImplementedError


class _Board:
    """What the virtual ranks of one process share: posts by (exchange, rank), and the sentence of a
    rank that gave up. `asides`: the boards of `ControlPlane.aside` planes, by name.
    """

    def __init__(self) -> None:
        self.posts: dict[tuple[int, int], _Post] = {}
        self.aborted: str | None = None
        self.asides: dict[str, _Board] = {}


class ThreadControl(_PolledControl):
    """The control plane of one of several virtual ranks, which are threads of this process.

    Made by `ThreadControl.group`. Values are passed by reference, so no rank may change them
    afterwards.
    """

    shares_memory = True

    def __init__(
        self,
        rank: int,
        size: int,
        deadline: float,
        board: _Board,
        above: ThreadControl | None = None,
    ) -> None:
        super().__init__(rank, size, deadline, remedy=REMEDY if above is None else _ASIDE_REMEDY)
        self._board = board
        self._above = above

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

    def aside(self, name: str) -> ThreadControl:
        board = self._board.asides.setdefault(name, _Board())  # one step of the interpreter
        return ThreadControl(self.rank, self.size, self._deadline, board, self)

    def close(self) -> None:
        self._closed = True

    def _post(self, post: _Post) -> None:
        self._board.posts[self._sequence, self.rank] = post
        # This rank saw every peer in the exchange before, so all had read the one before that.
        self._board.posts.pop((self._sequence - 2, self.rank), None)

    def _take(self, peer: int) -> _Post | None:
        return self._board.posts.get((self._sequence, peer))

    def _find_abort(self) -> str | None:
        return self._board.aborted or (None if self._above is None else self._above._find_abort())


class _StoredControl(_PolledControl):
    """A control plane whose posts lie in a store."""

    _store: PrefixStore

    def abort(self, reason: str) -> None:
        if self._closed or not self._home.here:
            return
        note = self._gave_up(reason)
        with contextlib.suppress(PeerTimeout):  # if the store is gone, the peers see that
            if self._find_abort() is None:
                self._ask(lambda: self._store.set("abort", note))

    def _ask(self, question: Callable[[], Value]) -> Value:
        """The store's answer; `PeerTimeout` if it is gone or gives none within the deadline."""
        raise NotImplementedError

    def _delete_posts(self) -> None:
        """Deletes what is left of its exchanges, when no rank begins one any more."""
        exchanges = range(max(0, self._sequence - 1), self._sequence + 2)
        for exchange in exchanges:
            for rank in range(self.size):
                self._delete(f"{exchange}/{rank}")
        self._delete("abort")

    def _delete(self, key: str) -> None:
        def delete() -> None:
            try:
                self._store.delete_key(key)
            except (RuntimeError, NotImplementedError) as error:  # not every store can
                if _is_lost(
                    error
                ):  # or each key would be asked for, and PyTorch print each failure
                    raise

        self._ask(delete)

    def _post(self, post: _Post) -> None:
        payload = cast(str, pickle.dumps(post._replace(value=_pickled(post.value))))
        # Bytes; the stub of `set` knows no more than str.
        self._ask(lambda: self._store.set(f"{self._sequence}/{self.rank}", payload))
        if self._sequence >= 2:  # every peer has read it, see ThreadControl
            self._delete(f"{self._sequence - 2}/{self.rank}")

    def _take(self, peer: int) -> _Post | None:
        key = f"{self._sequence}/{peer}"
        if not self._ask(lambda: self._store.check([key])):
            return None
        post: _Post = pickle.loads(self._ask(lambda: self._store.get(key)))
        return post._replace(value=pickle.loads(cast(bytes, post.value)))

    def _find_abort(self) -> str | None:
        if not self._ask(lambda: self._store.check(["abort"])):
            return None
        return self._ask(lambda: self._store.get("abort")).decode()


class StoreControl(_StoredControl):
    """The control plane of a process, over a store of torch.distributed that all ranks reach.

    Args:
        deadline: seconds.
        store: any `torch.distributed.Store`. Its keys that begin with "moeos/" are used, and those
            of a world are deleted when its last rank closes it.
        where: what an error calls the store.
        serves: whether the store ends with this process. Then `close` waits for the peers.
        job: the ranks' numbers in the job, for errors, as in `moeos.system.errors.in_job`.
        remedy: what errors say of going on.
        begins: what errors call this start, where it is not a world's.

    The n-th control plane of a rank on a store meets the n-th of every other rank.

    Raises:
        ConfigMismatch: the ranks differ in `size`.
        PeerTimeout: the store does not answer, or a rank does not come.
        OSError: the thread that asks the store cannot be started.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        deadline: float,
        store: Store,
        *,
        where: str,
        serves: bool = False,
        job: Sequence[int] = (),
        remedy: str = REMEDY,
        begins: str | None = None,
    ) -> None:
        super().__init__(rank, size, deadline, job, remedy)
        self._where = where
        self._begins = begins
        self._asides: list[_StoreAside] = []
        self._given = store  # which may be the one that is served
        self._serves = serves
        self._caller = Caller("moeos-store", f"rank {rank} of {size}")
        self._lost: str | None = None  # why the store can be asked no more
        self._closers = size  # how many ranks close this world: where sizes differ, the largest
        self._counted = True  # whether any rank waits for this one's end

        def begin() -> PrefixStore:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            mine = _connection_of_its_own(store)
            keep_in_children(mine)
            # Counted in the store, because processes may have made different numbers of worlds.
            self._number = mine.add(f"moeos/worlds/{rank}", 1)
            self._of_job = mine
            ours = PrefixStore(f"moeos/{self._number}", mine)
            if serves:
                ours.set("served", "1")  # before any rank can have closed this world
            return ours

        try:
            self._store = self._ask(begin)
            self._require_one_size()
        except BaseException as error:
            if hasattr(self, "_store"):
                self.abort(said(error))
                self.close()
            else:
                self._caller.close()
            raise

    def aside(self, name: str) -> _StoreAside:
        self._asides.append(_StoreAside(self, name))
        return self._asides[-1]

    def store(self, name: str) -> Store:
        def connect() -> Store:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            mine = _connection_of_its_own(self._given)
            keep_in_children(mine)
            return PrefixStore(f"moeos/{self._number}/{name}", mine)

        return self._ask(connect)

    def close(self) -> None:
        if self._closed or not self._home.here:
            return
        self._closed = True
        for aside in self._asides:
            aside.close()
        if self._counted:
            with contextlib.suppress(PeerTimeout):
                self._close_counted()
        self._caller.close()
        self._asides.clear()
        del self._store, self._given, self._of_job

    def _close_counted(self) -> None:
        closed = self._ask(lambda: self._store.add("closed", 1))
        if closed == self._closers:
            self._delete_keys()
        elif self._serves:  # until the peers need the store no more: the last one counts twice
            ends = time.monotonic() + min(_GRACE, self._deadline)
            while closed <= self._closers and time.monotonic() < ends:
                time.sleep(_LONGEST_PAUSE)
                closed = self._ask(lambda: self._store.add("closed", 0))
            self._delete_last_keys()

    def _require_one_size(self) -> None:
        """Raises `ConfigMismatch`, with one message, on all ranks that some rank counts."""
        sizes: dict[int, int] = {}

        def arrived(peer: int) -> bool:
            if not self._ask(lambda: self._store.check([f"size/{peer}"])):
                return False
            sizes[peer] = int(self._ask(lambda: self._store.get(f"size/{peer}")))
            return True

        self._ask(lambda: self._store.set(f"size/{self.rank}", str(self.size)))
        known = self.size
        while len(sizes) < known:
            missing = [rank for rank in range(known) if rank not in sizes]
            try:
                what = self._begins or "the start of a world"
                self._wait(arrived, what, missing, self._deadline)
            except PeerTimeout as error:
                if self._begins is not None:
                    self._fail(f"{error}. {self._remedy}")
                self._fail(f"{error}{self._of_other_numbers(missing)}")
            known = max(sizes.values())
        self._closers = known
        others = (sizes[peer] for peer in range(known) if peer != self.rank)
        self._counted = self.rank == 0 or any(self.rank < size for size in others)
        require_same("size", [str(sizes[rank]) for rank in range(known)])

    def _of_other_numbers(self, missing: Iterable[int]) -> str:
        """What an error adds where ranks that did not come have begun another number of worlds: a
        start that failed on some ranks alone counts there.
        """
        numbers: dict[int, int] = {}
        with contextlib.suppress(PeerTimeout):  # the store may be what is gone
            for peer in missing:
                numbers[peer] = self._ask(partial(_count_of, self._of_job, f"moeos/worlds/{peer}"))
        others = [peer for peer in numbers if numbers[peer] not in (0, self._number)]
        if not others:
            return ""
        said = ", ".join(f"world {numbers[peer]} of rank {peer}" for peer in others)
        return (
            f"; over this store this is world {self._number} of rank {self.rank}, and {said}: "
            "where a start failed on some ranks, begin the next one on all over another store, "
            "such as a torch.distributed.PrefixStore of another prefix; a process that a rank has "
            "started with its own environment begins worlds as that rank"
        )

    def _delete_keys(self) -> None:
        """Deletes what is left of this world; every rank has closed it.

        Where another rank serves the store, it waits for the end of this, and deletes the last.
        """
        for each in (self, *self._asides):
            each._delete_posts()
        for rank in range(self._closers):
            self._delete(f"size/{rank}")
        if self._serves or not self._ask(lambda: self._store.check(["served"])):
            self._delete_last_keys()
        else:
            self._ask(lambda: self._store.add("closed", 1))

    def _delete_last_keys(self) -> None:
        for key in ("closed", "served"):
            self._delete(key)

    def _ask(self, question: Callable[[], Value]) -> Value:
        found: list[Value] = []

        def ask() -> Exception | None:
            try:
                found.append(question())
            except Exception as error:  # a store may be the caller's own class
                return error
            return None

        if self._lost is None:
            ends = time.monotonic() + self._deadline
            try:  # what else comes out of this is a signal's handler's, and no store's
                error = self._caller.result(ask, self._deadline)
            except concurrent.futures.TimeoutError:
                if time.monotonic() < ends:
                    raise
                self._lost = f"had no answer for {self._deadline:g} s from {self._where}"
            else:
                if error is None:
                    return found[0]
                self._lost = f"lost {self._where} {error}"
        where = in_job([self.rank], self._job)
        self._fail(f"rank {self.rank} of {self.size} {self._lost}{where}")


class _StoreAside(_StoredControl):
    """See `ControlPlane.aside`: its keys have a prefix in `above`'s store, which `above` asks."""

    def __init__(self, above: StoreControl, name: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        super().__init__(above.rank, above.size, above._deadline, above._job, _ASIDE_REMEDY)
        self._above = above
        self._store = PrefixStore(name, above._store)

    def close(self) -> None:
        self._closed = True

    def _ask(self, question: Callable[[], Value]) -> Value:
        return self._above._ask(question)

    def _find_abort(self) -> str | None:
        return super()._find_abort() or self._above._failure or self._above._find_abort()


def _count_of(store: Store, key: str) -> int:
    """A store's counter; 0 if no rank has begun it."""
    return store.add(key, 0) if store.check([key]) else 0


def _is_lost(error: Exception) -> bool:
    """Whether a store's error says that no process serves it any more."""
    from torch.distributed import DistNetworkError

    return isinstance(error, DistNetworkError)


def _connection_of_its_own(store: Store) -> Store:
    """`store` by another connection, if it can have one: a thread that waits in a store, as NCCL's
    does, keeps the connection meanwhile.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, TCPStore) and hasattr(store, "clone"):  # torch 2.8 and newer
        return cast("Store", store.clone())
    return store
