// SPDX-License-Identifier: Apache-2.0
// The emulator's codes, in place of kernels/sm90/ptx/decode.cuh.
#pragma once

#include "kernels/formats.hpp"
#include "runtime/base.hpp"

namespace moeos::sm90 {

inline float2 from_e4m3(u32 codes) {
  return make_float2(e4m3(static_cast<u8>(codes)), e4m3(static_cast<u8>(codes >> 8)));
}
inline float2 from_e2m1(u32 codes) { return make_float2(e2m1(codes), e2m1(codes >> 16)); }
inline float2 from_int4(u32 codes) { return make_float2(int4(codes), int4(codes >> 16)); }

inline u32 permute_bytes(u32 low, u32 high, u32 which) {
  u32 bytes = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 place = which >> 4 * i & 15U;
    const auto byte = static_cast<u8>((place & 4U ? high : low) >> 8 * (place & 3U));
    bytes |= u32{static_cast<u8>((place & 8U) == 0 ? byte : byte >> 7 != 0 ? 0xFF : 0)} << 8 * i;
  }
  return bytes;
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
