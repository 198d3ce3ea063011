# SPDX-License-Identifier: Apache-2.0
"""Times contestants on GPUs in turn, so that a clock that drifts meets all of them.

Before each contestant the L2 cache is flushed where that is asked for; then the ranks meet on their
GPUs (moeos.cli.shared.meeting), so that they begin together. Only then does the timed region begin.
It knows nothing of what contestants do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import moeos
from bench.gpu.delay import Delay
from bench.gpu.results import timing
from moeos.cli.shared import process_group
from moeos.cli.shared.device_reader import Reader
from moeos.cli.shared.meeting import StreamMeeting

FLUSHED_TOKENS = 512
"""Up to this many tokens per rank the L2 cache is flushed."""


class InTurn:
    """A clock for contestants on this rank's GPU; begins a process group. Collective.

    Attributes:
        group: of all ranks; None where there is one.
        reader: flushes the cache.
    """

    def __init__(self, world: moeos.World) -> None:
        self._control = world.control
        self.group = process_group.start(world)
        self.reader = Reader()
        self._meeting = StreamMeeting(self.group)
        self._delay = Delay()

    def time(
        self,
        contestants: Mapping[str, Callable[[], object]],
        *,
        flushed: bool,
        warm_up_rounds: int,
        rounds: int,
        late: float = 0.0,
    ) -> dict[str, dict[str, Any]]:
        """Each contestant's times, of the slowest rank in each round. Collective.

        `late`: seconds after the others in which this rank begins; its time has them, too.
        """
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [] for name in contestants
        }
        names = list(contestants)
        for turn in range(warm_up_rounds + rounds):
            first = turn % len(names)  # nobody always follows the same one
            for name in names[first:] + names[:first]:
                if flushed:
                    self.reader.flush()
                self._meeting.meet()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._delay.put(late)
                contestants[name]()
                end.record()
                if turn >= warm_up_rounds:
                    events[name].append((begin, end))
            torch.cuda.synchronize()
        mine = {
            name: [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
            for name, pairs in events.items()
        }
        found = self._control.allgather(mine)
        return {
            name: timing(
                [max(of_round) for of_round in zip(*(of[name] for of in found), strict=True)]
            )
            for name in names
        }
