// SPDX-License-Identifier: Apache-2.0
// Dequantizes codes, two at a time, and quantizes to e4m3; kernels/element_formats.hpp has the
// formats. Source: PTX ISA, "cvt" and "prmt"; OCP Microscaling Formats 1.0.
#pragma once

#include "kernels/sm90/ptx/element.cuh"

namespace moeos::sm90 {

/// Two e4m3 codes, in the lower 16 bits, as numbers. fp16 represents all of them.
inline float2 from_e4m3(u32 codes) {
  u32 pair;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(pair) : "r"(codes));
  return make_float2(Float16::low(pair), Float16::high(pair));
}

/// Four bytes out of the eight of `low` and `high`, each chosen by four bits of `which`: the byte's
/// number, and above it whether the byte's first bit fills the byte.
inline u32 permute_bytes(u32 low, u32 high, u32 which) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(which));
  return bytes;
}

/// Two BF16 numbers times two others, rounded to nearest; subnormal ones, too.
inline u32 multiply_bf16(u32 pair, u32 by) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
  return product;
}
inline u32 subtract_bf16(u32 pair, u32 other) {
  u32 difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(other));
  return difference;
}

/// The e4m3 codes of two numbers: the nearest, and none beyond the largest.
inline u32 to_e4m3(float first, float second) {
  u32 pair;
  asm("{.reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, %2, %1; mov.b32 %0, {p, 0};}"
      : "=r"(pair)
      : "f"(first), "f"(second));
  return pair;
}

/// The e4m3 codes of eight numbers times a factor.
inline uint2 eight_codes(const float (&values)[8], float factor) {
  const auto four = [&](u32 i) {
    return to_e4m3(values[i] * factor, values[i + 1] * factor) |
           to_e4m3(values[i + 2] * factor, values[i + 3] * factor) << 16;
  };
  return make_uint2(four(0), four(4));
}

}  // namespace moeos::sm90
