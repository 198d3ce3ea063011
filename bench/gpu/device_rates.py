# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do at most: the rates that bound a layer, measured in the run that times it.

    F: a dense bfloat16 product of 8192³ by torch.mm, in FLOP/s.
    W: a kernel reads 4 GiB of device memory once, 16 bytes a load, in bytes/s.
    N: a kernel stores 256 MiB of its own values into the next rank's memory, 16 bytes a store,
       while all ranks do, in bytes/s.
Each is the median of some runs, timed by CUDA events. Needs a GPU; knows nothing of layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

import moeos
from moeos.cli.shared.device_reader import THREADS, VECTOR_BYTES, Reader, grid
from moeos.engines.cuda.device_heap import DeviceHeap

MATRIX = 8192
READ_BYTES = 1 << 32
STORED_BYTES = 1 << 28

METHOD = {
    "F": f"torch.mm of two random bfloat16 matrices of {MATRIX} x {MATRIX}",
    "W": f"a kernel reads {READ_BYTES >> 30} GiB of device memory once, 16 bytes a load",
    "N": f"a kernel stores {STORED_BYTES >> 20} MiB into the next rank's memory, 16 bytes a store, "
    "while all ranks do",
}
"""How each rate is measured, in words."""

_RUNS = 15
_WARM_UP = 5
_SETTLED = 2_000_000  # clock cycles of rest in which the host gets ahead of the GPU

_SOURCE = """
struct alignas(16) Vector { unsigned int x, y, z, w; };

extern "C" __global__ void store_all(Vector* target, int count) {
  const unsigned int value = threadIdx.x;
  for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
    target[at] = Vector{value, value, value, value};
}
"""


def measure(world: moeos.World, reader: Reader) -> dict[str, float | None]:
    """F, W and N of this rank; N is None without other ranks. Collective."""
    a, b, c = (torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(3))
    dense = _seconds(world, lambda: torch.mm(a, b, out=c))
    memory = torch.ones(READ_BYTES, dtype=torch.uint8, device="cuda")
    read = _seconds(world, lambda: reader.read(memory))
    return {
        "F": 2 * MATRIX**3 / dense,
        "W": READ_BYTES / read,
        "N": _store_rate(world) if world.size > 1 else None,
    }


def slowest(told: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The rates of all ranks, which wait for the slowest one."""
    known = {name: [rate for one in told if (rate := one[name]) is not None] for name in told[0]}
    return {name: min(rates) if rates else None for name, rates in known.items()}


def _store_rate(world: moeos.World) -> float:
    kernel = torch.cuda._compile_kernel(_SOURCE, "store_all")
    device = world.device or torch.device("cuda", torch.cuda.current_device())
    heap = DeviceHeap(world.control, STORED_BYTES, device)
    target = heap.of((world.rank + 1) % world.size)
    count = STORED_BYTES // VECTOR_BYTES
    seconds = _seconds(world, lambda: kernel(grid(1), (THREADS, 1, 1), [target, count]))
    heap.close()
    return STORED_BYTES / seconds


def _seconds(world: moeos.World, run: Callable[[], object]) -> float:
    """The median time of some runs, which begin on all ranks at about the same time."""
    for _ in range(_WARM_UP):
        run()
    torch.cuda.synchronize()
    world.control.barrier()
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
