# SPDX-License-Identifier: Apache-2.0
"""The two layers of a study, and the clocks by which their steps are measured.

A step begins on all ranks at about the same time; then a rank's delay passes, and its call follows.
Both layers have the same tokens, weights and delays. This file knows nothing of scenarios.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import moeos
from bench.gpu import one_rank
from bench.gpu.all_to_all import AllToAll, AllToAllLayer, fp32_logits
from bench.gpu.delay import Delay
from moeos.cli.shared.meeting import StreamMeeting

LARGEST_ERROR = {
    torch.float32: 1e-5,
    torch.bfloat16: one_rank.LARGEST_ERROR,
    torch.float16: 3e-3,
}
"""Of the difference between the two layers' results."""

Work = Callable[[], object]


class Clock(Protocol):
    """Measures steps. Collective."""

    def measure(self, delay: float, work: Work) -> float:
        """Seconds from the common begin of a step to the end of `work` on this rank, which begins
        after `delay`.
        """

    def stretch(self, work: Work, factor: float) -> object:
        """What `work` returns, taking `factor` times as long as by itself."""


class HostClock:
    """Of layers that compute on the host."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def measure(self, delay: float, work: Work) -> float:
        if self._group is not None:
            dist.barrier(self._group)
        begin = time.perf_counter()
        time.sleep(delay)
        work()
        return time.perf_counter() - begin

    def stretch(self, work: Work, factor: float) -> object:
        begin = time.perf_counter()
        made = work()
        time.sleep((factor - 1) * (time.perf_counter() - begin))
        return made


class DeviceClock:
    """Of layers that compute on this rank's GPU: delays pass there, and events tell the time."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._meeting = StreamMeeting(group)
        self._delay = Delay()

    def measure(self, delay: float, work: Work) -> float:
        self._meeting.meet()
        begin, end = self._events()
        begin.record()
        self._delay.put(delay)
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def stretch(self, work: Work, factor: float) -> object:
        begin, end = self._events()
        begin.record()
        made = work()
        end.record()
        end.synchronize()
        self._delay.put((factor - 1) * begin.elapsed_time(end) * 1e-3)
        return made

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def clock_of(world: moeos.World, group: dist.ProcessGroup | None) -> Clock:
    """The clock of a world's layers. Collective."""
    return DeviceClock(group) if world.backend == "cuda" else HostClock(group)


def tokens_of(world: moeos.World, cfg: moeos.MoEConfig, tokens: int, seed: int) -> Tensor:
    """x [tokens, H] of this rank, where its layers compute: normal, with variance 1."""
    generator = torch.Generator().manual_seed(seed * 4096 + world.rank)
    x = torch.randn(tokens, cfg.hidden, generator=generator).to(cfg.dtype)
    return x.cuda() if world.backend == "cuda" else x


class Baseline(AllToAllLayer):
    """The bulk-synchronous layer, whose experts may be slower.

    Attributes:
        factor: by which they are.
    """

    def __init__(
        self,
        layer: moeos.MoELayer,
        group: dist.ProcessGroup | None,
        clock: Clock,
        all_to_all: AllToAll,
    ) -> None:
        super().__init__(
            layer.cfg,
            layer.gate.weight,
            layer.gate.selection_bias,
            layer.w1,
            layer.w2,
            group,
            fp32_logits if layer.w1.is_cuda else _host_logits,
            all_to_all,
        )
        self._clock = clock
        self.factor = 1.0

    def _compute(self, rows: Tensor, ends: Tensor, counts: Tensor, sent: list[int]) -> Tensor:
        def work() -> Tensor:
            return super(Baseline, self)._compute(rows, ends, counts, sent)

        if self.factor == 1.0:
            return work()
        made = self._clock.stretch(work, self.factor)
        assert isinstance(made, Tensor)
        return made


def compare(world: moeos.World, layer: moeos.MoELayer, baseline: Baseline, x: Tensor) -> float:
    """The relative difference of the two layers' results for x, of the worst rank. Collective.

    Raises `RuntimeError` if it is larger than `LARGEST_ERROR`, and what a call of moeos raises.
    """
    y = layer(x)
    layer.check()
    error, _ = one_rank.compare(layer, x, None, y, baseline(x))
    worst: float = max(world.control.allgather(error, "the layers' difference"))
    if not worst <= LARGEST_ERROR[layer.cfg.dtype]:
        raise RuntimeError(
            f"moeos and the layer that it is compared with differ: relative error {worst:.1e}"
        )
    return worst


def _host_logits(x: Tensor, gate: Tensor) -> Tensor:
    return x.float() @ gate.float().t()
