# SPDX-License-Identifier: Apache-2.0
"""The index lists of a routing, built by MoEBlaze's three steps without atomics, and by a sort.

The lists and the steps are those of MoEBlaze, section 4: which tokens an expert has, where each
expert's begin, and where each pair of a token is among them. On a GPU the steps are kernels of
their own: a block has an expert, as there. The map has the experts' rows one after the other, so
that a block reads it in order. This file must not depend on how anything is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_VECTOR = 16
"""Bytes of the map that a thread loads at once."""
_THREADS = 1024
_SOURCE = """
extern "C" __global__ void fill_map(const long long* __restrict__ ids, int pairs, int slots,
                                    int pitch, unsigned char* __restrict__ map) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pairs; i += gridDim.x * blockDim.x)
    map[ids[i] * pitch + i / slots] = 1 + i % slots;
}

__device__ int marks_in(unsigned int word) { return __popc(__vcmpgtu4(word, 0) & 0x01010101u); }

__device__ int marks_in(uint4 found) {
  return marks_in(found.x) + marks_in(found.y) + marks_in(found.z) + marks_in(found.w);
}

// The sum of all threads' values, and in `before` that of the threads before this one.
__device__ int sums_of(int value, int& before) {
  __shared__ int of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int all = of_warps[lane];
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, all, step);
    if (lane >= step) all += other;
  }
  const int of_earlier = __shfl_sync(0xffffffffu, all, warp > 0 ? warp - 1 : 0);
  before = sum - value + (warp > 0 ? of_earlier : 0);
  __syncthreads();
  return __shfl_sync(0xffffffffu, all, 31);
}

extern "C" __global__ void count(const uint4* __restrict__ map, int vectors, int* lengths) {
  const uint4* row = map + (long long)blockIdx.x * vectors;
  int marks = 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) marks += marks_in(row[i]);
  int before;
  const int all = sums_of(marks, before);
  if (threadIdx.x == 0) lengths[blockIdx.x] = all;
}

extern "C" __global__ void place(const uint4* __restrict__ map, int vectors, int slots,
                                 const int* __restrict__ offsets, int* __restrict__ tokens,
                                 int* __restrict__ places) {
  const uint4* row = map + (long long)blockIdx.x * vectors;
  int first = offsets[blockIdx.x];
  for (int begin = 0; begin < vectors; begin += blockDim.x) {
    const int i = begin + threadIdx.x;
    const uint4 found = i < vectors ? row[i] : make_uint4(0, 0, 0, 0);
    int before;
    const int all = sums_of(marks_in(found), before);
    int at = first + before;
    const unsigned int words[4] = {found.x, found.y, found.z, found.w};
    for (int byte = 0; byte < 16; ++byte) {
      const int mark = words[byte / 4] >> 8 * (byte % 4) & 0xff;
      if (mark == 0) continue;
      const int token = 16 * i + byte;
      tokens[at] = token;
      places[token * slots + mark - 1] = at++;
    }
    first += all;
  }
}
"""


class IndexLists(NamedTuple):
    """The lists of a routing of S tokens with k experts each.

    Attributes:
        tokens: int32 [S k], the tokens of each expert, in order, expert by expert.
        offsets: int32 [E + 1], where each expert's begin there, and the end.
        places: int32 [S, k], where in `tokens` each pair is.
    """

    tokens: Tensor
    offsets: Tensor
    places: Tensor


def by_sort(ids: Tensor, experts: int) -> IndexLists:
    """The lists by a stable sort of ids [S, k] by keys of as few bits as do, on any device."""
    pairs, slots = ids.numel(), ids.shape[1]
    key = torch.uint8 if experts <= 256 else torch.int16
    ordered, order = ids.flatten().to(key).sort(stable=True)
    numbers = torch.arange(experts, dtype=key, device=ids.device)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    torch.searchsorted(ordered, numbers, right=True, out_int32=True, out=offsets[1:])
    places = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    places[order] = torch.arange(pairs, dtype=torch.int32, device=ids.device)
    return IndexLists((order // slots).int(), offsets, places.view_as(ids))


def by_steps(ids: Tensor, experts: int) -> IndexLists:
    """The lists by the three steps in PyTorch, on any device."""
    count, slots = ids.shape
    there = torch.zeros(experts, count, dtype=torch.bool, device=ids.device)
    there.scatter_(0, ids.t(), True)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = there.sum(1).cumsum(0)
    locations = there.cumsum(1, dtype=torch.int32) - 1 + offsets[:-1, None]
    places = locations.gather(0, ids.t()).t().contiguous()
    tokens = torch.empty(count * slots, dtype=torch.int32, device=ids.device)
    every = torch.arange(count, dtype=torch.int32, device=ids.device)
    tokens[places.flatten().long()] = every.repeat_interleave(slots)
    return IndexLists(tokens, offsets, places)


class Steps:
    """The three steps as kernels on the current GPU, with memory that calls share.

    Args:
        tokens: S of its calls.
        slots: k, at most 255.
        experts: E.
    """

    def __init__(self, tokens: int, slots: int, experts: int) -> None:
        if slots > 255:
            raise ValueError(f"a token has {slots} experts; a byte of the map numbers at most 255")
        self._slots, self._experts = slots, experts
        self._vectors = -(-tokens // _VECTOR)
        self._map = torch.empty(experts, self._vectors * _VECTOR, dtype=torch.uint8, device="cuda")
        self._lengths = torch.empty(experts, dtype=torch.int32, device="cuda")
        self._made = IndexLists(
            torch.empty(tokens * slots, dtype=torch.int32, device="cuda"),
            torch.zeros(experts + 1, dtype=torch.int32, device="cuda"),
            torch.empty(tokens, slots, dtype=torch.int32, device="cuda"),
        )
        self._fill, self._count, self._place = (
            torch.cuda._compile_kernel(_SOURCE, name) for name in ("fill_map", "count", "place")
        )
        self._blocks = 4 * torch.cuda.get_device_properties().multi_processor_count

    def __call__(self, ids: Tensor) -> IndexLists:
        """The lists of ids, int64 [S, k]; the next call overwrites them."""
        made, pairs, pitch = self._made, ids.numel(), self._vectors * _VECTOR
        self._map.zero_()
        grid, block = (self._blocks, 1, 1), (_THREADS, 1, 1)
        self._fill(grid, block, [ids, pairs, self._slots, pitch, self._map])
        grid = (self._experts, 1, 1)
        self._count(grid, block, [self._map, self._vectors, self._lengths])
        torch.cumsum(self._lengths, 0, dtype=torch.int32, out=made.offsets[1:])
        rest = [made.offsets, made.tokens, made.places]
        self._place(grid, block, [self._map, self._vectors, self._slots, *rest])
        return made
