# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: several ranks as threads of one process.

For tests of the protocol, fault injection and sanitizers; results are those of one process a rank.
Must not depend on layers: a world ends its own calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from moeos.system.errors import PeerTimeout, said, tell_rank
from moeos.system.held_signals import HeldSignals
from moeos.system.thread_limits import no_thread
from moeos.world.bootstrap import choose_backend, rates_on, require_gpu
from moeos.world.control import ThreadControl, name_ranks
from moeos.world.faults import FaultPlan, plan_of
from moeos.world.world import (
    MARGIN,
    TwinOptions,
    World,
    check_deadline,
    check_ranks_per_node,
    check_trace_events,
)

MAX_RANKS = 64
"""The most virtual ranks of one process."""

ONE_PROCESSOR = TwinOptions(processors=1)


_LOOK = 0.05  # seconds between two looks at what signals have raised
_PATIENCE = 0.5  # seconds in which ranks leave their calls and exchanges after a signal

Result = TypeVar("Result")


def run(
    fn: Callable[[World], Result],
    ranks: int = 4,
    backend: str = "twin",
    *,
    deadline: float = 30.0,
    twin: TwinOptions = ONE_PROCESSOR,
    ranks_per_node: int | None = None,
    trace_events: int = 0,
    faults: FaultPlan | None = None,
) -> list[Result]:
    """Calls `fn(world)` for each virtual rank, each on a thread; the results in rank order. These
    threads are under `torch.no_grad` and `torch.inference_mode` where the caller is.

    The worlds are closed when all ranks have ended. If a rank raises, the others are made to leave
    their waits and calls, and its error is raised here, with a note that names the rank. If several
    raise, it is the lowest rank's error; an error that only follows from another (`PeerTimeout`)
    counts only where there is no other kind. A signal whose handler raises, as Ctrl-C does, makes
    all ranks leave, and its error is raised here when they have. Ranks that have to leave get the
    deadline and a few seconds to do so; a thread that has not ended by then is left running.

    Args:
        ranks: 1 to 64.
        backend: "twin", "cuda" (all ranks share one GPU and one launch) or "auto".
        deadline, twin, ranks_per_node, trace_events, faults: as for `moeos.init`; no virtual rank
            can be killed.

    Raises:
        ValueError, TypeError: an argument or a fault plan is not allowed.
        OSError: the fault plan cannot be read.
        RuntimeError: the backend is "cuda", and PyTorch sees no GPU.
        Exception: what `fn` raised.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks is {ranks!r}; it must be an integer")
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks is {ranks}; allowed: 1 to {MAX_RANKS}")
    chosen = choose_backend(backend)
    if chosen == "cuda":
        require_gpu()
    check_deadline(deadline)
    check_ranks_per_node(ranks_per_node)
    check_trace_events(trace_events)
    if not isinstance(twin, TwinOptions):
        raise TypeError(f"twin is {twin!r}; it must be a moeos.TwinOptions")
    plan = plan_of(faults)
    if plan is not None:
        plan.check_ranks(ranks, processes=False)
    rates = rates_on(chosen, None)
    with HeldSignals() as signals:
        worlds = [
            World(
                control,
                backend=chosen,
                deadline=deadline,
                twin=twin,
                ranks_per_node=ranks_per_node,
                trace_events=trace_events,
                faults=plan,
                rates=rates,
            )
            for control in ThreadControl.group(ranks, deadline)
        ]
        threads = _RankThreads(fn, worlds, deadline)
        try:
            threads.run(signals)
        finally:
            for world in worlds:
                if world.rank not in threads.stuck:  # what it may still use stays mapped
                    world.close()
    if threads.failures:
        raise _root_cause(threads.failures, ranks, threads.stuck)
    return [threads.results[rank] for rank in range(ranks)]


class _RankThreads(Generic[Result]):
    """The threads that call `fn(world)`, one for each world.

    Attributes:
        results: by rank.
        failures: (rank, error), in the order in which they happened.
        stuck: the ranks whose threads have not ended in time.
    """

    def __init__(self, fn: Callable[[World], Result], worlds: list[World], deadline: float) -> None:
        self.results: dict[int, Result] = {}
        self.failures: list[tuple[int, BaseException]] = []
        self.stuck: list[int] = []
        self._fn = fn
        self._worlds = worlds
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._longest = deadline + MARGIN  # seconds in which ranks end that have to
        self._must_end: float | None = None  # the time by which all threads should have ended
        self._in_fn: set[int] = set()  # ranks
        self._lost: set[int] = set()  # ranks that have been pushed, and have not noticed
        # Thread.is_alive would not do: an exception during it, or during a join with a time limit,
        # leaves a running thread marked as ended.
        self._running: set[int] = set()  # ranks
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks
        self._threads = [
            threading.Thread(
                target=self._live, args=(world,), name=f"moeos-rank-{world.rank}", daemon=True
            )
            for world in worlds
        ]

    def run(self, signals: HeldSignals) -> None:
        """Returns when all threads have ended, or should have.

        A signal whose handler raises makes all ranks leave.
        """
        report = sys.unraisablehook
        try:
            self._start(signals)
            self._wait(lambda: signals.raised)
        except BaseException as error:  # such as the SystemExit that a run around this one sends
            reason = error
            self._wait(lambda: reason)
            raise
        finally:
            sys.unraisablehook = report

    def _start(self, signals: HeldSignals) -> None:
        for rank, thread in enumerate(self._threads):
            if signals.raised is not None or self.failures:
                return
            self._running.add(rank)
            try:
                thread.start()
            except RuntimeError:
                self._running.remove(rank)
                what = f"the thread of virtual rank {rank} of {len(self._threads)}"
                self._fail(rank, no_thread(what, "run fewer virtual ranks"))

    def _wait(self, interrupted: Callable[[], BaseException | None]) -> None:
        told_at: float | None = None
        pushed = False
        while self._running:
            error, now = interrupted(), time.monotonic()
            if error is not None and told_at is None:
                told_at = now
                self._abort(f"interrupted by {type(error).__name__}")
            if told_at is not None and now > told_at + _PATIENCE:
                self._push(self._lost if pushed else self._in_fn)
                pushed = True
            if self._must_end is not None and now > self._must_end:
                break
            with contextlib.suppress(queue.Empty):
                rank = self._ended.get(timeout=_LOOK)
                self._threads[rank].join()
                self._running.remove(rank)
        self.stuck = sorted(self._running)

    def _live(self, world: World) -> None:
        try:
            try:
                self._in_fn.add(world.rank)
                inference, grad = self._modes
                with (
                    torch.inference_mode(inference),  # sets the other two as well
                    torch.set_grad_enabled(grad),
                    # By default one autograd thread runs the backwards of all ranks that share a
                    # GPU in turn, and a rank's backward waits for the other ranks' calls.
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    self.results[world.rank] = self._fn(world)
            finally:
                self._in_fn.discard(world.rank)
        except BaseException as error:
            self._fail(world.rank, error)
        finally:
            self._ended.put(world.rank)

    def _fail(self, rank: int, error: BaseException) -> None:
        """Makes all ranks leave because one has failed."""
        self.failures.append((rank, error))
        self._end_soon()
        self._worlds[rank].abort(said(error))
        for other in self._worlds:
            other.interrupt(f"virtual rank {rank} failed")

    def _abort(self, reason: str) -> None:
        """Makes the ranks leave their exchanges and calls."""
        self._end_soon()
        for world in self._worlds:
            world.abort(reason)

    def _push(self, ranks: set[int]) -> None:
        """Ends what else some ranks do in Python.

        SystemExit does it, because a thread that ends by it prints nothing. A destructor would
        report and drop it: then nothing is reported, and the rank is pushed again.
        """
        sys.unraisablehook = self._report
        for rank in ranks & self._in_fn:
            if _imports(self._threads[rank]):  # it would leave a module's lock held
                self._lost.add(rank)
                continue
            self._lost.discard(rank)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._threads[rank].ident or 0), ctypes.py_object(SystemExit)
            )

    def _report(self, unraisable: sys.UnraisableHookArgs) -> None:
        thread = threading.current_thread()
        if unraisable.exc_type is SystemExit and thread in self._threads:
            self._lost.add(self._threads.index(thread))
        else:
            sys.__unraisablehook__(unraisable)

    def _end_soon(self) -> None:
        if self._must_end is None:
            self._must_end = time.monotonic() + self._longest


def _imports(thread: threading.Thread) -> bool:
    """Whether a thread is importing a module."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _root_cause(
    failures: list[tuple[int, BaseException]], ranks: int, stuck: list[int]
) -> BaseException:
    """The error that explains the others, with a note that says where it was raised."""
    consequences = (PeerTimeout, threading.BrokenBarrierError)
    causes = [failure for failure in failures if not isinstance(failure[1], consequences)]
    rank, error = min(causes, key=lambda failure: failure[0]) if causes else failures[0]
    if ranks > 1:
        tell_rank(error, f"virtual rank {rank} of {ranks}")
    note = f"raised on virtual rank {rank} of {ranks}"
    if stuck:
        note += f"; virtual {name_ranks(stuck)} did not end in time"
    with contextlib.suppress(Exception):  # its class may take no attributes
        # What add_note of Python 3.11 does.
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
    return error
