// SPDX-License-Identifier: Apache-2.0
// Formats in which experts' weights are stored and tokens are sent quantized: codes of 8 or 4 bits,
// with scales.
//
//   format        a code          its scale             one scale for
//   plain         a number of the layer's type, without a scale
//   fp8_block128  e4m3            fp32                  128 rows and 128 columns
//   fp8_channel   e4m3            fp32                  a row
//   fp8_tensor    e4m3            fp32                  a matrix
//   mxfp4         e2m1            e8m0                  32 columns of a row
//   nvfp4         e2m1            e4m3, and an fp32     16 columns of a row, and a matrix
//   int4_group32  n + 8, 4 bits   BF16                  32 columns of a row
//
// A weight is its code times its scale, or scales. The first of two codes in a byte is in the low
// half. A gated w1 is two matrices, gate and up: the scales of all gate rows come first, and each
// matrix begins blocks of its own. Formats and names are those of the checkpoints in use: OCP
// Microscaling Formats 1.0 (e4m3, e2m1, e8m0, MXFP4); DeepSeek-V3, arXiv:2412.19437, section 3.3
// (blocks).
//
// e4m3 represents every value of a 4-bit code, so such weights can be multiplied by e4m3 tokens
// exactly.
//
// Tokens may also be quantized to e4m3 with fp32 scales: fp8_group128, in groups of kTokenGroup.
// Then rows between two products are quantized as well, in groups of kHiddenGroup, and results of
// experts may be, in groups of kResultGroup. Must not depend on: products, where weights lie.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos {

/// The enumerators are the values that the host passes; host/moeos/config/element_formats.py has
/// the names.
enum class WeightFormat : u32 {
  plain = 0,
  fp8_block128 = 1,
  fp8_channel = 2,
  fp8_tensor = 3,
  mxfp4 = 4,
  nvfp4 = 5,
  int4_group32 = 6
};

enum class ActivationFormat : u32 { plain = 0, fp8_group128 = 1 };

/// Rows and columns of a block of fp8_block128.
inline constexpr u32 kScaleBlock = 128;
/// Elements of a token, and of a row between two products, that have one scale. A part of a gated
/// GEMM0 makes at least kHiddenGroup of them, so no group spans two parts.
inline constexpr u32 kTokenGroup = 128;
inline constexpr u32 kHiddenGroup = 64;
/// Elements of an expert's result that have one scale. A part of GEMM1 makes whole groups.
inline constexpr u32 kResultGroup = 128;
/// The largest e4m3 number.
inline constexpr float kE4m3Most = 448.0F;
/// The lower bound of the largest magnitude of a group of a row, 2^-100. So neither scales nor
/// their inverses are subnormal or infinite.
inline constexpr float kLeastDivisor = __builtin_bit_cast(float, (127U - 100U) << 23);

constexpr bool is_fp8(WeightFormat format) {
  return format == WeightFormat::fp8_block128 || format == WeightFormat::fp8_channel ||
         format == WeightFormat::fp8_tensor;
}
/// Bits of a code; plain weights have none.
constexpr u32 code_bits(WeightFormat format) { return is_fp8(format) ? 8 : 4; }
/// Bytes of a scale, not counting the additional fp32 scale of nvfp4.
constexpr u32 scale_bytes(WeightFormat format) {
  return is_fp8(format) ? 4 : format == WeightFormat::int4_group32 ? 2 : 1;
}
/// Columns of a row that have one scale, out of `depth`; the last of them may be fewer.
constexpr u32 scale_columns(WeightFormat format, u32 depth) {
  switch (format) {
    case WeightFormat::fp8_block128:
      return kScaleBlock;
    case WeightFormat::mxfp4:
    case WeightFormat::int4_group32:
      return 32;
    case WeightFormat::nvfp4:
      return 16;
    default:
      return depth;
  }
}
/// Scales of a row.
constexpr u32 scales_of_row(WeightFormat format, u32 depth) {
  return ceil_div(depth, scale_columns(format, depth));
}
/// The row of its matrix's scales that a row of weights has.
constexpr u32 scale_row(WeightFormat format, u32 row) {
  return format == WeightFormat::fp8_tensor     ? 0
         : format == WeightFormat::fp8_block128 ? row / kScaleBlock
                                                : row;
}
/// Rows of scales of a matrix of `rows` rows.
constexpr u32 scale_rows(WeightFormat format, u32 rows) { return scale_row(format, rows - 1) + 1; }

// None of the functions below computes with subnormal fp32 numbers, which kernels may flush to 0.

/// The number of an e4m3 code: a sign, 4 bits of exponent with bias 7, 3 of mantissa; NaN is 0x7F.
constexpr float e4m3(u8 code) {
  const u32 sign = u32{code} >> 7 << 31;
  const u32 rest = code & 0x7FU;
  // As a multiple of the least number, 2^-9: mantissas have a leading one unless the exponent is 0.
  constexpr float kLeast = __builtin_bit_cast(float, (127U - 9U) << 23);
  const u32 exponent = rest >> 3;
  const u32 leading = exponent != 0 ? 1 : 0;
  const u32 multiple = (leading << 3 | (rest & 7U)) << (exponent - leading);
  const float magnitude = static_cast<float>(static_cast<i32>(multiple)) * kLeast;
  const u32 nan = rest == 0x7F ? 0x7FC00000U : 0U;
  return __builtin_bit_cast(float, sign | nan | __builtin_bit_cast(u32, magnitude));
}
/// The e4m3 code nearest to a number, the even one of two; numbers beyond the largest become the
/// largest. 0x7F for a NaN.
constexpr u8 to_e4m3(float value) {
  constexpr u32 kLeastNormal = (127U - 6U) << 23;
  const u32 bits = __builtin_bit_cast(u32, value);
  const u32 rest = bits & 0x7FFFFFFFU;
  if (rest > 0x7F800000U) {
    return 0x7F;
  }
  u32 code = 0;
  if (rest < kLeastNormal) {
    // Such an fp32 number has steps of 2^-9, as these codes have: so the sum rounds.
    constexpr float kSteps = 16384.0F;
    code = __builtin_bit_cast(u32, __builtin_bit_cast(float, rest) + kSteps) -
           __builtin_bit_cast(u32, kSteps);
  } else {
    // 3 bits of mantissa stay, and the exponent has another bias.
    code = minimum(((rest + 0x7FFFFU + (rest >> 20 & 1U)) >> 20) - ((127U - 7U) << 3), 0x7EU);
  }
  return static_cast<u8>(code | bits >> 31 << 7);
}

/// How the numbers of a group are quantized: times `inverse`. A code is dequantized times `scale`.
struct GroupScale {
  float scale;
  float inverse;
};
/// The scale of a group with this largest magnitude.
constexpr GroupScale group_scale(float largest) {
  const float divisor = largest < kLeastDivisor ? kLeastDivisor : largest;  // a NaN stays one
  return {divisor * (1.0F / kE4m3Most), kE4m3Most / divisor};
}
/// Bytes of a row of `values` codes followed by their scales, padded.
constexpr u32 coded_row_bytes(u32 values, u32 group, u32 multiple = 16) {
  return align_up(values + values / group * static_cast<u32>(sizeof(float)), multiple);
}
/// Bytes of a quantized result of `values` elements. The codes of a group are a cache line, because
/// links carry 128 bytes of one row faster than 64 bytes of each of two rows.
constexpr u32 coded_result_bytes(u32 values) {
  static_assert(kResultGroup == kCacheLine);
  return coded_row_bytes(values, kResultGroup, kCacheLine);
}

/// The number of an e2m1 code, its lower 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and these with a sign.
constexpr float e2m1(u32 code) {
  constexpr u32 kDoubled = 0xC8643210U;
  const u32 doubled = kDoubled >> (4 * (code & 7U)) & 15U;
  const float magnitude = static_cast<float>(static_cast<i32>(doubled)) * 0.5F;
  return __builtin_bit_cast(float, (code & 8U) << 28 | __builtin_bit_cast(u32, magnitude));
}
/// The number of an e8m0 code: 2^(code - 127), of which the least is subnormal; NaN is 0xFF.
constexpr float e8m0(u8 code) {
  return code == 0xFF ? __builtin_bit_cast(float, 0x7FC00000U)
         : code == 0  ? __builtin_bit_cast(float, 0x00400000U)
                      : __builtin_bit_cast(float, u32{code} << 23);
}
/// The number of a 4-bit integer that is stored with 8 added.
constexpr float int4(u32 code) { return static_cast<float>(static_cast<i32>(code & 15U) - 8); }
/// The number of a BF16 number's bits.
constexpr float bf16(u16 bits) { return __builtin_bit_cast(float, u32{bits} << 16); }
/// The nearest BF16 number's bits, the even one's of two; keeps NaN a NaN.
constexpr u16 to_bf16(float value) {
  const u32 bits = __builtin_bit_cast(u32, value);
  return static_cast<u16>(value != value ? bits >> 16 | 0x40U
                                         : (bits + 0x7FFF + (bits >> 16 & 1U)) >> 16);
}

}  // namespace moeos
