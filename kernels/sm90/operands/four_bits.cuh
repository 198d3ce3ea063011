// SPDX-License-Identifier: Apache-2.0
// Weights of 4 bits as numbers of the layer's type, two in a register.
//
// Integer instructions run at half rate, so there are as few as possible: a code's bits are moved
// by one multiplication, and scales are applied by arithmetic of BF16 pairs. May not know: where
// codes lie; what is multiplied.
#pragma once

#include "kernels/element_formats.hpp"
#include "kernels/sm90/block/config.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// Whether a weight is made by arithmetic of BF16 pairs. Of a code and one scale, which BF16 has, a
/// product in BF16 is rounded once, as one in fp32 is that is rounded to BF16.
inline constexpr bool kWeightsInPairs =
    Element::kDigits == Bfloat16::kDigits && kFormat != WeightFormat::nvfp4;
inline constexpr bool kIntegerCodes = kFormat == WeightFormat::int4_group32;

/// The numbers of eight codes, without their scale, in BF16, which has all of them: pairs[i] are
/// those of codes 2i and 2i + 1. Of e2m1 they are 2^126 times too small.
inline void begin_numbers(u32 (&pairs)[4], u32 codes) {
  const u32 low = codes & 0x0F0F0F0FU;  // of each byte
  const u32 high = codes >> 4 & 0x0F0F0F0FU;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    // A code of each at the begin of two bytes. 8: the first bit of a byte, which is 0, throughout.
    const u32 both = permute_bytes(low, high, 0x8480U + 0x0101U * i);
    if constexpr (kIntegerCodes) {
      // As the last bits of the number 128 they are added to it, and so is 8 when it is stored.
      pairs[i] = subtract_bf16(both | 0x43004300U, 0x43084308U);
    } else {
      // Its first bit becomes the sign, and the others the last two of the exponent and the first
      // one of the digits, subnormal as in the code.
      pairs[i] = both * 0x1040U & 0x81C081C0U;
    }
  }
}

/// What a scale means. `stored`: as formats.hpp has it; `of_matrix`: that of its matrix, where the
/// format has one.
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

/// Whether scales of mxfp4 are applied at once: all of four are below 2, in one word.
inline bool are_small(u32 scales) { return (scales & 0x80808080U) == 0; }

/// What begun numbers of a scale group are multiplied by. `kSmall`: of mxfp4, a scale below 2. Then
/// BF16 has it times 2^126, and one multiplication makes a weight.
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
