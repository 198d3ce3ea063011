// SPDX-License-Identifier: Apache-2.0
// The emulator's codes, in place of kernels/sm90/ptx/decode.cuh.
#pragma once

#include "kernels/element_formats.hpp"
#include "kernels/sm90/ptx/element.cuh"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

inline float2 from_e4m3(u32 codes) {
  return make_float2(e4m3(static_cast<u8>(codes)), e4m3(static_cast<u8>(codes >> 8)));
}
inline u32 permute_bytes(u32 low, u32 high, u32 which) {
  u32 bytes = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 place = which >> 4 * i & 15U;
    const auto byte = static_cast<u8>((place & 4U ? high : low) >> 8 * (place & 3U));
    bytes |= u32{static_cast<u8>((place & 8U) == 0 ? byte : byte >> 7 != 0 ? 0xFF : 0)} << 8 * i;
  }
  return bytes;
}

// Products and differences of two BF16 numbers are exact in fp32, or far from where it ends.
inline u32 multiply_bf16(u32 pair, u32 by) {
  return Bfloat16::pack(Bfloat16::low(pair) * Bfloat16::low(by),
                        Bfloat16::high(pair) * Bfloat16::high(by));
}
inline u32 subtract_bf16(u32 pair, u32 other) {
  return Bfloat16::pack(Bfloat16::low(pair) - Bfloat16::low(other),
                        Bfloat16::high(pair) - Bfloat16::high(other));
}

inline uint2 eight_codes(const float (&values)[8], float factor) {
  const auto four = [&](u32 i) {
    u32 codes = 0;
    for (u32 k = 0; k < 4; ++k) {
      codes |= u32{to_e4m3(values[i + k] * factor)} << 8 * k;
    }
    return codes;
  };
  return {four(0), four(4)};
}

}  // namespace moeos::sm90
