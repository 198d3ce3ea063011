# SPDX-License-Identifier: Apache-2.0
"""Measures what this process's current GPU does at most, each rate by itself, timed by CUDA events.

This file must not depend on layers, on links between GPUs, or on what the rates are used for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from moeos.cli.shared.device_reader import Reader

MATRIX = 8192
READ_BYTES = 1 << 32

METHOD = {
    "F": f"torch.mm of two random bfloat16 matrices of {MATRIX} x {MATRIX}",
    "W": f"a kernel reads {READ_BYTES >> 30} GiB of device memory once, 16 bytes a load",
}
"""How the dense BF16 rate and the memory's are measured, in words."""

_RUNS = 15
_WARM_UP = 5
_SETTLED = 2_000_000  # clock cycles of rest in which the host gets ahead of the GPU


def bf16_flops(meet: Callable[[], None] = lambda: None) -> float:
    """FLOP/s of a dense BF16 GEMM. `meet`: see `median_seconds`."""
    a, b, c = _matrices(3)
    return 2 * MATRIX**3 / median_seconds(lambda: torch.mm(a, b, out=c), meet)


def fp8_flops() -> float:
    """FLOP/s of a dense GEMM of E4M3 by E4M3, with one scale for each matrix."""
    a, b = (one.to(torch.float8_e4m3fn) for one in _matrices(2))
    one = torch.ones((), device="cuda")

    def run() -> object:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * MATRIX**3 / median_seconds(run)


def memory_bytes(reader: Reader, meet: Callable[[], None] = lambda: None) -> float:
    """Bytes/s that a kernel reads from the GPU's memory. `meet`: see `median_seconds`."""
    memory = torch.ones(READ_BYTES, dtype=torch.uint8, device="cuda")
    return READ_BYTES / median_seconds(lambda: reader.read(memory), meet)


def measure() -> dict[str, float]:
    """What one GPU can measure of `moeos.partition.rates.MEASURABLE`: all but the link."""
    return {
        "blocks": torch.cuda.get_device_properties().multi_processor_count,
        "bf16_flops": bf16_flops(),
        "fp8_flops": fp8_flops(),
        "memory_bytes": memory_bytes(Reader()),
    }


def median_seconds(run: Callable[[], object], meet: Callable[[], None] = lambda: None) -> float:
    """The median time of some runs; `meet` lets them begin on all ranks at about the same time."""
    for _ in range(_WARM_UP):
        run()
    torch.cuda.synchronize()
    meet()
    torch.cuda._sleep(_SETTLED)
    events = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) * 1e-3 for begin, end in events]
    return statistics.median(times)


def _matrices(count: int) -> list[torch.Tensor]:
    return [torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(count)]
