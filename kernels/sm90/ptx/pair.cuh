// SPDX-License-Identifier: Apache-2.0
// Two blocks side by side, which share what one of them loads. Source: PTX ISA, "cluster",
// "cp.async.bulk.tensor", "mbarrier.arrive" and "mapa".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "kernels/sm90/ptx/tma.cuh"

#define MOEOS_PAIRS __cluster_dims__(2, 1, 1)

namespace moeos::sm90 {

inline constexpr u32 kPair = 2;  // blocks

/// Which of its pair a block is.
inline u32 block_of_pair() { return blockIdx.x % kPair; }

/// A barrier of all threads of a pair.
inline void pair_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

/// Arrives at the barrier that lies in some block of the pair where `barrier` lies here. Releases
/// what this thread has read or written to whoever waits for the phase, also in the other block.
inline void arrive_in_pair(Barrier& barrier, u32 block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(block)
      : "memory");
}

/// As load_box, to the same place of both blocks; each counts the bytes on its own barrier.
inline void load_box_for_pair(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                              u32 column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(destination)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)),
      "h"(static_cast<u16>((1U << kPair) - 1))
      : "memory");
}

}  // namespace moeos::sm90
