"""Virtual ranks: several ranks as threads of one process.

For tests of the protocol, fault injection and sanitizers; results are those of one process a rank.
This file knows nothing of layers: an engine ends its calls through `World.on_abort`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moeos.bootstrap import choose_backend
from moeos.control import ThreadControl, name_ranks
from moeos.errors import PeerTimeout
from moeos.faults import FaultPlan, plan_of
from moeos.world import TwinOptions, World, check_deadline, check_ranks_per_node, check_trace_events

MAX_RANKS = 64
"""The most virtual ranks of one process."""

ONE_PROCESSOR = TwinOptions(processors=1)

_MARGIN = 5.0  # seconds beyond the deadline in which ranks must end once one has failed

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
    """Calls `fn(world)` for each virtual rank, each on a thread; the results in rank order.

    The worlds are closed when all ranks have ended. If a rank raises, the others are made to leave
    their waits and calls, and its error is raised here, with a note that names the rank: of several
    the lowest rank's, but one that only follows from another (`PeerTimeout`) only where there is no
    other kind.

    Args:
        ranks: 1 to 64.
        backend: "twin", "cuda" (all ranks share one GPU and one launch) or "auto".
        deadline, twin, ranks_per_node, trace_events, faults: as for `moeos.init`; no virtual rank
            can be killed.

    Raises:
        ValueError, TypeError: an argument or a fault plan is not allowed.
        OSError: the fault plan cannot be read.
        Exception: what `fn` raised.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks is {ranks!r}; it must be an integer")
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks is {ranks}; allowed: 1 to {MAX_RANKS}")
    chosen = choose_backend(backend)
    check_deadline(deadline)
    check_ranks_per_node(ranks_per_node)
    check_trace_events(trace_events)
    if not isinstance(twin, TwinOptions):
        raise TypeError(f"twin is {twin!r}; it must be a moeos.TwinOptions")
    plan = plan_of(faults)
    if plan is not None:
        plan.check_ranks(ranks, processes=False)
    worlds = [
        World(
            control,
            backend=chosen,
            deadline=deadline,
            twin=twin,
            ranks_per_node=ranks_per_node,
            trace_events=trace_events,
            faults=plan,
        )
        for control in ThreadControl.group(ranks, deadline)
    ]
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
    failed_at: list[float] = []

    def live(world: World) -> None:
        try:
            results[world.rank] = fn(world)
        except BaseException as error:
            failures.append((world.rank, error))
            failed_at.append(time.monotonic())
            world.abort(f"{type(error).__name__}: {error}")
            for other in worlds:
                other.interrupt(f"virtual rank {world.rank} failed")

    threads = [
        threading.Thread(target=live, args=(world,), name=f"moeos-rank-{world.rank}", daemon=True)
        for world in worlds
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            if failed_at and time.monotonic() > failed_at[0] + deadline + _MARGIN:
                break
            next(thread for thread in threads if thread.is_alive()).join(0.05)
    except BaseException:  # such as KeyboardInterrupt, which comes to this thread alone
        for world in worlds:
            world.abort("interrupted")
        raise
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for world in worlds:
        if world.rank not in stuck:  # what a stuck thread may still use stays mapped
            world.close()
    if failures:
        raise _root_cause(failures, ranks, stuck)
    return [results[rank] for rank in range(ranks)]


def _root_cause(
    failures: list[tuple[int, BaseException]], ranks: int, stuck: list[int]
) -> BaseException:
    """The error that explains the others, with a note that says where it was raised."""
    consequences = (PeerTimeout, threading.BrokenBarrierError)
    causes = [failure for failure in failures if not isinstance(failure[1], consequences)]
    rank, error = min(causes, key=lambda failure: failure[0]) if causes else failures[0]
    note = f"raised on virtual rank {rank} of {ranks}"
    if stuck:
        note += f"; virtual {name_ranks(stuck)} did not end in time"
    # What add_note of Python 3.11 does.
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
    return error
