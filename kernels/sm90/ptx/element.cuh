// SPDX-License-Identifier: Apache-2.0
// Two-byte storage types, their binary digits, and their conversion to and from fp32, two at a
// time.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

struct Bfloat16 {
  static constexpr u32 kDigits = 8;
  static u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static float low(u32 pair) { return __uint_as_float(pair << 16); }
  static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000U); }
};

struct Float16 {
  static constexpr u32 kDigits = 11;
  static u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static float low(u32 pair) {
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(pair));
    return value;
  }
  static float high(u32 pair) {
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(pair));
    return value;
  }
};

}  // namespace moeos::sm90
