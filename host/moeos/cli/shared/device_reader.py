# SPDX-License-Identifier: Apache-2.0
"""Reads a GPU's memory at full rate, by which it also flushes the L2 cache.

A benchmark measures by it what memory gives, and calls that begin cold are prepared by it. This
file must not depend on layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLUSH_BYTES = 1 << 28
"""Read to put everything else out of an L2 cache of at most a quarter of it."""

THREADS = 1024
"""The threads of a block."""
VECTOR_BYTES = 16
"""The bytes of a load."""

_SOURCE = """
struct alignas(16) Vector { unsigned int x, y, z, w; };

extern "C" __global__ void read_all(const Vector* __restrict__ source, int count, Vector* sink) {
  constexpr int kAtOnce = 8;
  const int stride = gridDim.x * blockDim.x;
  unsigned int seen = 0;
  for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < count;
       first += kAtOnce * stride) {
    Vector found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * stride;
      found[i] = at < count ? source[at] : Vector{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      seen ^= found[i].x ^ found[i].y ^ found[i].z ^ found[i].w;
  }
  if (seen == 0x9e3779b9u) sink->x = seen;  // so that no load can be left out
}
"""


class Reader:
    """Reads device memory at full rate; so it also flushes the L2 cache, and leaves clean lines.

    Lines that a flush by writes leaves in the cache must be written back before they make room,
    which would slow down the next kernel.
    """

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(_SOURCE, "read_all")
        self._sink = torch.zeros(VECTOR_BYTES, dtype=torch.uint8, device="cuda")
        self._other = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def read(self, memory: Tensor) -> None:
        """Launches a kernel that reads a contiguous tensor once."""
        count = memory.nbytes // VECTOR_BYTES
        self._kernel(grid(2), (THREADS, 1, 1), [memory, count, self._sink])

    def flush(self) -> None:
        """Launches a kernel after which the L2 cache holds only clean, unneeded lines."""
        self.read(self._other)


def grid(blocks_each: int) -> tuple[int, int, int]:
    """A grid with `blocks_each` blocks for each multiprocessor."""
    return torch.cuda.get_device_properties().multi_processor_count * blocks_each, 1, 1
