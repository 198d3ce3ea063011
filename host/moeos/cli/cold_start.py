# SPDX-License-Identifier: Apache-2.0
"""How a call begins in `moeos trace --cold`: with nothing in the L2 cache, on all ranks together.

Each process flushes its GPU's cache; without a meeting after that, as in the benchmark, ranks would
begin as far apart as their flushes end, which a trace of few tokens would show above all.
"""

from __future__ import annotations

import torch.distributed as dist

from moeos.cli.shared.device_reader import Reader
from moeos.cli.shared.meeting import StreamMeeting


class ColdStart:
    """Prepares this rank's GPU for calls that begin cold. Collective.

    Ranks meet through `group`. Ranks of one process have none, for one launch begins them all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._reader = Reader()
        self._meeting = StreamMeeting(group)
        # The first meeting takes the host longer than the GPU rests, so it cannot be the call's.
        self._meeting.meet()

    def prepare(self) -> None:
        """Readies the current stream for a call, which must be launched next. Collective."""
        self._reader.flush()
        self._meeting.meet()
