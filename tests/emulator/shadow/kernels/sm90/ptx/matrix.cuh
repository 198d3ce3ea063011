// The emulator's matrix stores, in place of kernels/sm90/ptx/matrix.cuh.
#pragma once

#include <cstring>

#include "kernels/sm90/ptx/barrier.cuh"

namespace moeos::sm90 {

inline void store_matrices(void* row, u32 first, u32 second, u32 third, u32 fourth) {
  const u64* rows = emulator::exchange("stmatrix", reinterpret_cast<u64>(row));
  const u32 lane = threadIdx.x % 32;
  const u32 values[4] = {first, second, third, fourth};
  for (u32 m = 0; m < 4; ++m) {
    std::memcpy(reinterpret_cast<u8*>(rows[8 * m + lane / 4]) + lane % 4 * 4, &values[m], 4);
  }
}

}  // namespace moeos::sm90
