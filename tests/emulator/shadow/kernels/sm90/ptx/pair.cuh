// SPDX-License-Identifier: Apache-2.0
// The emulator's pairs of blocks, in place of kernels/sm90/ptx/pair.cuh.
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "kernels/sm90/ptx/tma.cuh"

#define MOEOS_PAIRS

namespace moeos::sm90 {

inline constexpr u32 kPair = 2;

inline u32 block_of_pair() { return blockIdx.x % kPair; }
inline void pair_barrier() { emulator::pair_barrier(); }
inline void arrive_in_pair(Barrier& barrier, u32 block) {
  static_cast<Barrier*>(emulator::in_pair(&barrier, block))->arrive();
}
inline void load_box_for_pair(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                              u32 column) {
  for (u32 block = 0; block < kPair; ++block) {
    load_box(map, emulator::in_pair(destination, block),
             *static_cast<Barrier*>(emulator::in_pair(&barrier, block)), row, column);
  }
}

}  // namespace moeos::sm90
