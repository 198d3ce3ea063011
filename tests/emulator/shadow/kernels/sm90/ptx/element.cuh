// SPDX-License-Identifier: Apache-2.0
// The emulator's conversions, in place of kernels/sm90/ptx/element.cuh.
#pragma once

#include <cmath>
#include <cstring>

#include "runtime/words/base.hpp"
#include "tests/emulator/cuda.hpp"

namespace moeos::sm90 {

struct Bfloat16 {
  static constexpr u32 kDigits = 8;
  static u32 pack(float low, float high) { return round(high) << 16 | round(low); }
  static float low(u32 pair) { return __uint_as_float(pair << 16); }
  static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000U); }

 private:
  static u32 round(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7FFFU : (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
  }
};

struct Float16 {
  static constexpr u32 kDigits = 11;
  static u32 pack(float low, float high) { return bits_of(high) << 16 | bits_of(low); }
  static float low(u32 pair) { return value_of(static_cast<u16>(pair)); }
  static float high(u32 pair) { return value_of(static_cast<u16>(pair >> 16)); }

 private:
  static u32 bits_of(float value) {
    const auto half = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  static float value_of(u16 bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
};

}  // namespace moeos::sm90
