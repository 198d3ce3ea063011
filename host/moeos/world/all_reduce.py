# SPDX-License-Identifier: Apache-2.0
"""All-reduces after the calls of a workspace, among ranks with slices of the same experts; and
those of hosts elsewhere.

On hosts gloo makes them, over connections of their own. On GPUs a process group of
torch.distributed does. Must not depend on worlds or layers.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moeos.system.caller import Caller
from moeos.system.errors import PeerTimeout
from moeos.system.held_signals import NotedSignals
from moeos.system.process import keep_in_children
from moeos.world import rendezvous
from moeos.world.control import name_ranks

if TYPE_CHECKING:
    from torch.distributed import (  # type: ignore[attr-defined]
        ProcessGroup,
        ProcessGroupGloo,
        Store,
        Work,
    )

_LOOK = 0.1  # seconds from one look at an all-reduce that is under way to the next
_BEYOND = 5.0  # seconds that gloo waits longer, so that the error of here names missing ranks
_ROLL_CALL = 2.0  # seconds in which ranks that wait have said so

Value = TypeVar("Value")


class AllReduce(Protocol):
    """The all-reduces of one workspace: they come in the order of its calls."""

    def begin(self) -> None:
        """A call begins that will be added up. A call that does not come to its end is void: what
        its peers have sent would be taken for a later call's. So no call is added up after it.
        """

    def add_up(self, out: Tensor, look: Callable[[], None]) -> None:
        """Writes the sums over the ranks. Collective; `look` raises where a peer has given up.

        Raises `PeerTimeout` where a rank does not come, or a call before was void.
        """

    def renew(self) -> None:
        """Separates the calls before this from those after it. Alike on all ranks, between two
        barriers.
        """

    def end(self) -> None:
        """Gives connections and threads back. Does not wait for any rank."""


class OfHosts:
    """All-reduces by gloo. See `AllReduce`.

    Each life, from one `renew` to the next, has connections of its own, which its first call makes.
    So what a failed call has left under way reaches no later call.

    gloo does not say which rank has broken an all-reduce. So a rank that waits longer than a look
    notes that in the store, once. A rank that gives up names the ranks without such a note.

    Args:
        store: where the ranks meet; all keys in it are this object's.
        waits: where they say that they wait, likewise. By another connection: a rank that waits in
            a store keeps its connection meanwhile.
        place: which of `ranks` is this one.
        ranks: those that add up, by the numbers that errors have for them.
        deadline: seconds that one all-reduce may take, with its connections.
        what: in errors, whose rank makes which all-reduce.
        remedy: what errors say of going on.
    """

    def __init__(
        self,
        store: Store,
        waits: Store,
        place: int,
        ranks: Sequence[int],
        deadline: float,
        what: str,
        remedy: str,
    ) -> None:
        self._store = store
        self._waits = waits
        self._place = place
        self._ranks = ranks
        self._deadline = deadline
        self._what = what
        self._remedy = remedy
        self._life = 0
        self._gloo: ProcessGroupGloo | None = None
        self._unfinished = 0  # calls of this life that have begun and not ended
        self._number = 0  # the number of this life's last all-reduce
        self._said = 0  # the last one in which this rank has said that it waits

    def begin(self) -> None:
        """See `AllReduce`."""
        self._unfinished += 1

    def add_up(self, out: Tensor, look: Callable[[], None]) -> None:
        """See `AllReduce`. Signals are seen meanwhile."""
        if self._unfinished > 1:
            raise self._failed("a call before was left before its sums were there")
        with torch.inference_mode():  # which lets out be an inference tensor
            out.copy_(self.sums(out, look))
        self._unfinished = 0

    def sums(self, of: Tensor, look: Callable[[], None]) -> Tensor:
        """The sums in a new tensor: gloo may still write to it after this has given it up."""
        mine = of.clone(memory_format=torch.contiguous_format)
        if mine.numel() == 0:
            return mine
        self._number += 1
        ends = time.monotonic() + self._deadline
        try:
            self._connect(ends)
        except futures.TimeoutError as error:
            if time.monotonic() < ends:  # a signal's handler has raised it
                raise
            raise self._failed(f"the ranks did not connect: {self._missing()}") from error
        self._wait(mine, ends, look)
        return mine

    def renew(self) -> None:
        """See `AllReduce`."""
        self._life += 1
        self._unfinished = self._number = self._said = 0
        self.end()

    def end(self) -> None:
        """See `AllReduce`. What is under way ends by gloo's own timeout, in another thread, for
        which the program's end waits a while.
        """
        left, self._gloo = [self._gloo], None
        if left != [None]:
            Caller("moeos-gloo").close(left.clear)

    def _connect(self, ends: float) -> None:
        if self._gloo is not None:
            return
        from torch.distributed import ProcessGroupGloo

        self._say_that_it_waits()
        store = self._of_this_life(self._store)
        place = self._place, len(self._ranks)
        timeout = datetime.timedelta(seconds=self._deadline + _BEYOND)

        def connect() -> ProcessGroupGloo | RuntimeError:
            try:
                made = ProcessGroupGloo(store, *place, timeout)
            except RuntimeError as error:
                return error
            keep_in_children(made)
            return made

        found = rendezvous.within(max(0.0, ends - time.monotonic()), connect)
        if isinstance(found, RuntimeError):
            raise self._failed(f"the ranks did not connect: {self._missing()}") from found
        self._gloo = found

    def _wait(self, mine: Tensor, ends: float, look: Callable[[], None]) -> None:
        """Waits in steps: gloo sees neither signals nor failures of the peers' calls."""
        assert self._gloo is not None  # and no name here, which an error's traceback would keep
        work: Work = self._gloo.allreduce([mine])  # type: ignore[attr-defined]
        with NotedSignals() as signals:  # a handler's error may be of the kind that gloo's are
            while not work.is_completed():
                left = ends - time.monotonic()
                if left <= 0:
                    raise self._failed(self._missing())
                try:
                    # With no milliseconds it would wait to the end.
                    work.wait(datetime.timedelta(seconds=max(min(left, _LOOK), 1e-3)))
                except RuntimeError as error:  # the step's time has passed
                    if error is signals.raised:
                        raise
                if not work.is_completed():
                    self._say_that_it_waits()
                look()
            try:
                work.wait()
            except RuntimeError as error:
                if error is signals.raised:
                    raise
                lost = f"the connection to a rank was lost: {self._missing()}"
                raise self._failed(lost) from error

    def _say_that_it_waits(self) -> None:
        if self._said == self._number:
            return
        self._said = number = self._number
        store = self._of_this_life(self._waits)
        self._ask(lambda: store.set(str(self._place), str(number)), _ROLL_CALL)

    def _missing(self) -> str:
        """Names the ranks that have not said that they wait in this all-reduce, or a later one."""
        self._say_that_it_waits()
        number, store = self._number, self._of_this_life(self._waits)

        def absent() -> list[int]:
            keys = [str(place) for place in range(len(self._ranks))]
            said = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
            return [rank for rank, last in zip(self._ranks, said, strict=True) if last < number]

        ends = time.monotonic() + _ROLL_CALL
        missing: list[int] | None = None
        while (left := ends - time.monotonic()) > 0:
            found = self._ask(absent, left)
            missing = missing if found is None else found  # the last look may have no time left
            if not found:
                break
            time.sleep(_LOOK)
        if missing is None:
            return (
                "the ranks' store does not answer: who serves it, mostly rank 0, is stuck or ended"
            )
        if not missing:
            return "all ranks wait in it"
        who = name_ranks(missing)
        return f"{who} did not come (stuck, in another call, or ended: then start all ranks again)"

    def _ask(self, question: Callable[[], Value], seconds: float) -> Value | None:
        """The store's answer; None if it is gone, or gives none in time."""

        def ask() -> Value | None:
            with contextlib.suppress(RuntimeError):
                return question()
            return None

        ends = time.monotonic() + seconds
        try:
            return rendezvous.within(seconds, ask)
        except futures.TimeoutError:
            if time.monotonic() < ends:  # a signal's handler has raised it
                raise
            return None

    def _of_this_life(self, store: Store) -> Store:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(str(self._life), store)

    def _failed(self, why: str) -> PeerTimeout:
        return PeerTimeout(
            f"{self._what} ended without a result within {self._deadline:g} s: {why}. "
            f"{self._remedy}"
        )


class OfDevices:
    """All-reduces by NCCL, launched after the kernel; nothing waits here. See `AllReduce`.

    NCCL's own timeout ends the wait for a rank that does not come, and for one that left its call
    after the kernel: its peers' next kernels wait for their all-reduce. Graphs may have captured
    the group, so it stays through a reset.
    """

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def begin(self) -> None:
        """See `AllReduce`."""

    def add_up(self, out: Tensor, look: Callable[[], None]) -> None:
        """See `AllReduce`."""
        if out.numel() == 0:
            return
        try:
            dist.all_reduce(out, group=self._group)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise PeerTimeout(
                f"rank {self._rank}: the all-reduce of partial sums (reduce='after') was not "
                "launched: torch.distributed refuses it, or its groups are destroyed. Close the "
                "world on all ranks, and make it and its layers again"
            ) from error

    def renew(self) -> None:
        """See `AllReduce`."""

    def end(self) -> None:
        """See `AllReduce`."""
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # it may be gone
            dist.destroy_process_group(self._group)
