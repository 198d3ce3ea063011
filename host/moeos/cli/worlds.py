# SPDX-License-Identifier: Apache-2.0
"""Where a command's ranks come from: this process's launcher, or threads of this process.

This file must not depend on what commands do in a world.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import moeos
from moeos.cli.shared import failures
from moeos.system import launchers


def run(
    command: Callable[[moeos.World], int],
    backend: str,
    *,
    deadline: float,
    virtual_ranks: int | None,
    trace_events: int = 0,
) -> int:
    """The exit code of a command that all ranks run.

    Args:
        command: what each rank does in its world.
        backend: of `moeos.init`.
        deadline: of `moeos.init`, in seconds.
        virtual_ranks: how many ranks this process makes, the option --ranks; with None the ranks
            are those that a launcher has started.
        trace_events: of `moeos.init`.

    Raises what `moeos.init` and the command raise, and `ValueError` for virtual ranks where a
    launcher has started several ranks.
    """

    def rank_main(world: moeos.World) -> int:
        return failures.together(world, lambda: command(world))

    if virtual_ranks is None:
        with moeos.init(backend, deadline=deadline, trace_events=trace_events) as world:
            return rank_main(world)
    if launchers.detect(os.environ).size != 1:
        raise ValueError("--ranks is given, but a launcher has started several ranks")
    return moeos.virtual.run(
        rank_main, virtual_ranks, backend, deadline=deadline, trace_events=trace_events
    )[0]
