// SPDX-License-Identifier: Apache-2.0
// The emulator's products of one warp, in place of kernels/sm90/ptx/mma.cuh.
#pragma once

#include "kernels/sm90/ptx/element.cuh"
#include "tests/emulator/cuda.hpp"

namespace moeos::sm90 {

inline void load_matrices(u32 (&to)[4], const void* row) {
  const u32 lane = threadIdx.x % 32;
  const auto* rows = emulator::exchange("ldmatrix", reinterpret_cast<u64>(row));
  for (u32 i = 0; i < 4; ++i) {
    const u64 from = rows[8 * i + lane / 4];
    if (from % 16 != 0) {
      emulator::stop("ldmatrix of a row that is not at a multiple of 16 bytes");
    }
    to[i] = reinterpret_cast<const u32*>(from)[lane % 4];
  }
}

template <bool kFloat16>
inline void multiply_in_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  using Type = std::conditional_t<kFloat16, Float16, Bfloat16>;
  const u32 lane = threadIdx.x % 32;
  // A row's 16 numbers, of the four lanes that have them: two pairs of each.
  const auto row_of = [](const unsigned long long* words, u32 first, float (&row)[16]) {
    for (u32 other = 0; other < 4; ++other) {
      for (u32 half = 0; half < 2; ++half) {
        const auto pair = static_cast<u32>(words[first + other] >> 32 * half);
        row[8 * half + 2 * other] = Type::low(pair);
        row[8 * half + 2 * other + 1] = Type::high(pair);
      }
    }
  };
  float rows[2][16];
  for (u32 lower = 0; lower < 2; ++lower) {
    row_of(emulator::exchange("a product", a[lower] | u64{a[2 + lower]} << 32), lane / 4 * 4,
           rows[lower]);
  }
  const auto* columns = emulator::exchange("a product", b0 | u64{b1} << 32);
  for (u32 i = 0; i < 2; ++i) {
    float column[16];
    row_of(columns, (lane % 4 * 2 + i) * 4, column);
    for (u32 lower = 0; lower < 2; ++lower) {
      float sum = d[2 * lower + i];
      for (u32 k = 0; k < 16; ++k) {
        sum += rows[lower][k] * column[k];
      }
      d[2 * lower + i] = sum;
    }
  }
}

}  // namespace moeos::sm90
