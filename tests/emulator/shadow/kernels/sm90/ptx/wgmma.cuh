// SPDX-License-Identifier: Apache-2.0
// The emulator's matrix products, in place of kernels/sm90/ptx/wgmma.cuh: each lane computes its
// own accumulators, when it issues the product.
#pragma once

#include "kernels/sm90/ptx/element.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "tests/emulator/products.hpp"

namespace moeos::sm90 {

inline u64 matrix_descriptor(const void* shared) { return reinterpret_cast<u64>(shared); }
enum class Major : u32 { depth = 0, columns = 1 };
inline constexpr u32 kColumnsBoxBytes = emulator::kColumnsBoxBytes;
inline constexpr u32 kDepthStepBytes = 16 * 128;
inline u64 columns_descriptor(const void* shared) {
  if (reinterpret_cast<u64>(shared) % 1024 != 0) {
    emulator::stop("an operand of columns that does not begin with eight rows");
  }
  return reinterpret_cast<u64>(shared);
}
// By all lanes of a warp together. That hardware also keeps the warps of a group together is not
// promised, and not so here.
inline void wgmma_fence() { emulator::exchange("wgmma.fence", 0); }
inline void wgmma_commit() {}
template <u32 kPending>
inline void wgmma_wait() {
  emulator::exchange("wgmma.wait_group", 0);
}
template <u32 kRegisters>
inline void hold(float (&)[kRegisters]) {}
inline void hold(u32 (&)[4]) {}

/// Of the running thread's accumulators: its place in its warpgroup.
inline u32 group_thread() { return threadIdx.x % 128; }
template <bool kFloat16>
inline constexpr emulator::Numbers kNumbers =
    kFloat16 ? emulator::Numbers::float16 : emulator::Numbers::bfloat16;
template <Major kMajor = Major::depth>
emulator::Operand operand(u64 matrix) {
  return {reinterpret_cast<const u8*>(matrix), kMajor == Major::columns};
}

template <bool kFloat16, Major kOfA = Major::depth, Major kOfB = Major::depth, u32 kRegisters>
inline void multiply_accumulate(float (&d)[kRegisters], u64 a, u64 b) {
  emulator::multiply(d, kRegisters, group_thread(), kNumbers<kFloat16>, operand<kOfA>(a),
                     operand<kOfB>(b));
}

/// Of e4m3 codes. Products of two are exact in fp32.
template <bool kAdds>
inline void multiply_codes(float (&d)[64], u64 a, u64 b) {
  emulator::multiply_codes(d, 64, group_thread(), kAdds, operand(a).at, operand(b).at);
}

/// The same with the rows in registers, of which each lane has a quarter of two.
template <bool kAdds, u32 kRegisters>
inline void multiply_codes(float (&d)[kRegisters], const u32 (&a)[4], u64 b) {
  const u32 lane = threadIdx.x % 32;
  float rows[2][32];
  for (u32 half = 0; half < 2; ++half) {
    const auto* words = emulator::exchange("a product", a[2 * half] | u64{a[2 * half + 1]} << 32);
    for (u32 other = 0; other < 4; ++other) {
      for (u32 byte = 0; byte < 8; ++byte) {
        rows[byte / 4][half * 16 + other * 4 + byte % 4] =
            e4m3(static_cast<u8>(words[lane / 4 * 4 + other] >> 8 * byte));
      }
    }
  }
  for (u32 j = 0; j < kRegisters / 4; ++j) {
    for (u32 i = 0; i < 2; ++i) {
      u8* const column = reinterpret_cast<u8*>(b) + (8 * j + lane % 4 * 2 + i) * 128;
      for (u32 lower = 0; lower < 2; ++lower) {
        float sum = kAdds ? d[4 * j + 2 * lower + i] : 0.0F;
        for (u32 k = 0; k < 32; ++k) {
          sum += rows[lower][k] * e4m3(*swizzled(column + k));
        }
        d[4 * j + 2 * lower + i] = sum;
      }
    }
  }
}

/// The same of numbers.
template <bool kFloat16>
inline void multiply_accumulate(float (&d)[32], const u32 (&a)[4], u64 b) {
  using Type = std::conditional_t<kFloat16, Float16, Bfloat16>;
  const u32 lane = threadIdx.x % 32;
  float rows[2][16];
  for (u32 half = 0; half < 2; ++half) {  // of the columns: both rows' pairs at a time
    const auto* pairs = emulator::exchange("a product", a[2 * half] | u64{a[2 * half + 1]} << 32);
    u64 both[4];  // of the lanes that have the same rows; the next exchange takes their place
    for (u32 other = 0; other < 4; ++other) {
      both[other] = pairs[lane / 4 * 4 + other];
    }
    for (u32 other = 0; other < 4; ++other) {
      for (u32 row = 0; row < 2; ++row) {
        const auto pair = static_cast<u32>(both[other] >> 32 * row);
        rows[row][half * 8 + other * 2] = Type::low(pair);
        rows[row][half * 8 + other * 2 + 1] = Type::high(pair);
      }
    }
  }
  emulator::multiply_rows(d, 32, group_thread(), kNumbers<kFloat16>, rows, operand(b));
}

}  // namespace moeos::sm90
