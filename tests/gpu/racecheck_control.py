# SPDX-License-Identifier: Apache-2.0
"""What racecheck says of an order that is right, `python -m tests.gpu.racecheck_control lanes`.

One warp writes shared memory, and arrives at an mbarrier by its first lane behind a __syncwarp, as
the kernel's warps do, or by every lane; another warp waits there and reads. Both are right: the
first lane's release is cumulative over what __syncwarp has ordered before it (PTX ISA, memory
consistency model, "causality order"). `test_sanitizer.py` looks which of them the tool follows.
"""

from __future__ import annotations

import sys

import cupy

_SOURCE = r"""
extern "C" __global__ void hand_over(unsigned* out, unsigned arrivals) {
  __shared__ unsigned words[32];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    words[lane] = lane + 1;
    __syncwarp();
    if (lane < arrivals) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    }
  } else {
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done) : "r"(at) : "memory");
    }
    out[lane] = words[(lane + 7) % 32];
  }
}
"""


def main(arrivals: int) -> None:
    """Runs it once; `arrivals`: 1 for the first lane's, 32 for all."""
    kernel = cupy.RawKernel(_SOURCE, "hand_over", options=("--std=c++17",))
    out = cupy.zeros(32, dtype=cupy.uint32)
    kernel((1,), (64,), (out, cupy.uint32(arrivals)))
    assert out.get().tolist() == [(lane + 7) % 32 + 1 for lane in range(32)]
    print("is right", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
