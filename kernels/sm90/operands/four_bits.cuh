// SPDX-License-Identifier: Apache-2.0
// Weights of 4 bits, dequantized to the layer's type, two in a register.
//
// Integer instructions run at half rate, so there are as few as possible: one multiplication moves
// a code's bits, and arithmetic on BF16 pairs applies scales. Must not depend on: where codes lie;
// element types of rows.
#pragma once

#include "kernels/element_formats.hpp"
#include "kernels/sm90/block/config.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// Whether arithmetic on BF16 pairs makes weights. If BF16 can represent the code and its one
/// scale, a product in BF16 is rounded once, like a product in fp32 that is then rounded to BF16.
inline constexpr bool kWeightsInPairs =
    Element::kDigits == Bfloat16::kDigits && kFormat != WeightFormat::nvfp4;
inline constexpr bool kIntegerCodes = kFormat == WeightFormat::int4_group32;

/// The values of eight codes, without their scale, in BF16, which represents all of them: pairs[i]
/// has codes 2i and 2i + 1. For e2m1 they are 2^126 times too small.
inline void begin_numbers(u32 (&pairs)[4], u32 codes) {
  const u32 low = codes & 0x0F0F0F0FU;  // of each byte
  const u32 high = codes >> 4 & 0x0F0F0F0FU;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    // One code of each word at the beginning of each two bytes. 8: the sign bit of a byte, which is
    // 0, replicated.
    const u32 both = permute_bytes(low, high, 0x8480U + 0x0101U * i);
    if constexpr (kIntegerCodes) {
      // As the last bits of the number 128 they are added to it, together with the 8 that was added
      // when the code was stored.
      pairs[i] = subtract_bf16(both | 0x43004300U, 0x43084308U);
    } else {
      // The code's first bit becomes the sign, and the others the last two of the exponent and the
      // first of the mantissa, subnormal where the code is.
      pairs[i] = both * 0x1040U & 0x81C081C0U;
    }
  }
}

/// The value of a scale. `stored`: as element_formats.hpp has it; `of_matrix`: the matrix's scale,
/// where the format has one.
inline float scale_of(u32 stored, float of_matrix) {
  switch (kFormat) {
    case WeightFormat::mxfp4:
      return e8m0(static_cast<u8>(stored));
    case WeightFormat::nvfp4:
      return from_e4m3(stored).x * of_matrix;
    default:
      return bf16(static_cast<u16>(stored));
  }
}

/// Whether mxfp4 scales can be applied in one step: all four in a word are below 2.
inline bool are_small(u32 scales) { return (scales & 0x80808080U) == 0; }

/// The factor for the values of a scale group's codes. `kSmall`: for mxfp4, a scale below 2. Then
/// BF16 represents it times 2^126, and one multiplication makes a weight.
template <bool kSmall>
class CodeScale {
 public:
  CodeScale(u32 stored, float of_matrix) {
    if constexpr (!kWeightsInPairs) {
      in_fp32_ = scale_of(stored, of_matrix);
    } else if constexpr (kFormat != WeightFormat::mxfp4) {
      in_pairs_ = stored * 0x10001U;
    } else if constexpr (kSmall) {
      in_pairs_ = stored * 0x800080U + 0x3F003F00U;
    } else {
      in_pairs_ = (stored == 0xFF ? 0x7FC0U : stored == 0 ? 0x40U : stored << 7) * 0x10001U;
    }
  }

  /// Two weights of the layer's type.
  u32 operator()(u32 begun) const {
    constexpr bool kAtOnce = kWeightsInPairs && kFormat == WeightFormat::mxfp4 && kSmall;
    const u32 pair = kIntegerCodes || kAtOnce ? begun : multiply_bf16(begun, 0x7E807E80U);
    if constexpr (kWeightsInPairs) {
      return multiply_bf16(pair, in_pairs_);
    } else {
      return Element::pack(Bfloat16::low(pair) * in_fp32_, Bfloat16::high(pair) * in_fp32_);
    }
  }

 private:
  u32 in_pairs_ = 0;
  float in_fp32_ = 0;
};

}  // namespace moeos::sm90
