# SPDX-License-Identifier: Apache-2.0
"""How a call begins in `moeos trace --cold`: with nothing in the L2 cache, on all ranks together.

Each process flushes its GPU's cache; without a meeting after that, as in the benchmark, ranks would
begin as far apart as their flushes end, which a trace of few tokens would show above all.
"""

from __future__ import annotations

import torch.distributed as dist

import moeos
from moeos.commands import process_group
from moeos.commands.device_reader import Reader
from moeos.commands.meeting import Meeting


class ColdStart:
    """Prepares this rank's GPU for calls that begin so. Collective."""

    def __init__(self, world: moeos.World) -> None:
        # Ranks of one process have nobody to meet: one launch begins them all. Processes have a
        # control plane, whichever launcher started them, and that is all that their group needs.
        self._group = None if world.control.shares_memory else process_group.start(world)
        self._reader = Reader()
        self._meeting = Meeting(self._group)
        # The first meeting takes the host longer than the GPU rests, so it cannot be the call's.
        self._meeting.meet()

    def prepare(self) -> None:
        """Readies the current stream for a call, which must be launched next. Collective."""
        self._reader.flush()
        self._meeting.meet()

    def close(self) -> None:
        """Ends what ranks met by, when the calls are over. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
