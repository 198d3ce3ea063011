# SPDX-License-Identifier: Apache-2.0
"""Delays that pass on a GPU, in the current stream: how a rank is late there.

It knows nothing of what comes behind them.
"""

from __future__ import annotations

import torch

_CALIBRATION = 50_000_000  # clock cycles, some 30 ms


class Delay:
    """Makes a stream wait. Synchronises when it is made, to measure the GPU's clock."""

    def __init__(self) -> None:
        torch.cuda._sleep(_CALIBRATION)  # the clock is up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(_CALIBRATION)
        end.record()
        torch.cuda.synchronize()
        self._cycles_a_second = _CALIBRATION / (begin.elapsed_time(end) * 1e-3)

    def put(self, seconds: float) -> None:
        """Puts a delay into the current stream; none, if it is 0."""
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_a_second))
