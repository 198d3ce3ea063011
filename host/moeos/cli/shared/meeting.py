# SPDX-License-Identifier: Apache-2.0
"""Where the GPUs of all ranks meet, so that what their streams hold next begins on all together.

GPUs meet in their streams: hosts that wait for each other see at different times that all are
there, and launch what follows as far apart. This file must not depend on what begins or on what
times it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_REST = 2_000_000  # clock cycles, 1 ms


class StreamMeeting:
    """A place where the current streams of a group's ranks meet as often as is wanted.

    Args:
        group: of NCCL, all ranks; None where there is no other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._one = torch.ones(1, device="cuda")

    def meet(self) -> None:
        """Puts a meeting into the stream: what is launched next begins after all ranks are there.

        First the GPU rests, in which time the host gets ahead of it: what is launched next is
        already waiting when the ranks have met. Collective, but only the GPU waits for other ranks;
        in a group's first meeting the host does, too, as NCCL then connects them.
        """
        torch.cuda._sleep(_REST)
        if self._group is not None:
            dist.all_reduce(self._one, group=self._group)
