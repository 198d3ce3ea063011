# SPDX-License-Identifier: Apache-2.0
"""What the GPUs of a world can do at most: the rates that bound a layer, measured in the run that
times it.

    F: a dense bfloat16 product of 8192³ by torch.mm, in FLOP/s.
    W: a kernel reads 4 GiB of device memory once, 16 bytes a load, in bytes/s.
    N: a kernel stores 256 MiB of its own values into the next rank's memory, 16 bytes a store,
       while all ranks do, in bytes/s.
Each is the median of some runs, timed by CUDA events. Needs a GPU; knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import moeos
from moeos.cli.shared import device_rates
from moeos.cli.shared.device_reader import THREADS, VECTOR_BYTES, Reader, grid
from moeos.engines.cuda.device_heap import DeviceHeap

STORED_BYTES = 1 << 28

METHOD = {
    **device_rates.METHOD,
    "N": f"a kernel stores {STORED_BYTES >> 20} MiB into the next rank's memory, 16 bytes a store, "
    "while all ranks do",
}
"""How each rate is measured, in words."""

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
    meet = world.control.barrier
    return {
        "F": device_rates.bf16_flops(meet),
        "W": device_rates.memory_bytes(reader, meet),
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

    def store() -> None:
        kernel(grid(1), (THREADS, 1, 1), [target, count])

    seconds = device_rates.median_seconds(store, world.control.barrier)
    heap.close()
    return STORED_BYTES / seconds
