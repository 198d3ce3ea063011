// SPDX-License-Identifier: Apache-2.0
// Rows of e4m3 codes followed by their fp32 scales (kernels/element_formats.hpp): quantized from
// fp32, dequantized and packed for a product, and added up.
//
// Must not depend on: where rows lie; the products that use them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/element_formats.hpp"
#include "kernels/twin/gemm.hpp"

namespace moeos::twin {

/// Quantizes `count` numbers: codes, and a scale for each `group` of them, of which `count` is a
/// multiple. `weight`: a factor of all numbers, and so of the scales.
inline void code_numbers(const float* numbers, u32 count, u32 group, float weight, u8* codes,
                         u8* scales) {
  for (u32 first = 0; first < count; first += group) {
    float largest = 0.0F;
    for (u32 i = first; i < first + group; ++i) {
      largest = std::fmax(largest, std::fabs(numbers[i]));
    }
    const GroupScale scale = group_scale(largest);
    for (u32 i = first; i < first + group; ++i) {
      codes[i] = to_e4m3(numbers[i] * scale.inverse);
    }
    const float weighted = weight * scale.scale;
    std::memcpy(scales + first / group * sizeof(float), &weighted, sizeof(float));
  }
}

/// pack_rows for codes: `rows` rows (1 to 8) of `depth` codes each become a panel, float
/// [depth][8], where missing rows are zero.
inline void pack_codes(const u8* first_row, std::size_t row_stride_bytes, u32 rows, u32 depth,
                       u32 group, float* panel) {
  for (u32 r = 0; r < kPanelRows; ++r) {
    const u8* codes = first_row + (r < rows ? r * row_stride_bytes : 0);
    for (u32 first = 0; first < depth; first += group) {
      float scale = 0.0F;
      std::memcpy(&scale, codes + depth + first / group * sizeof(float), sizeof(float));
      for (u32 k = first; k < first + group; ++k) {
        panel[std::size_t{k} * kPanelRows + r] = r < rows ? e4m3(codes[k]) * scale : 0.0F;
      }
    }
  }
}

/// sum += weight times a row of `count` codes.
inline void add_codes(const u8* codes, u32 count, u32 group, float weight, float* sum) {
  for (u32 first = 0; first < count; first += group) {
    float scale = 0.0F;
    std::memcpy(&scale, codes + count + first / group * sizeof(float), sizeof(float));
    for (u32 n = first; n < first + group; ++n) {
      sum[n] += weight * (e4m3(codes[n]) * scale);
    }
  }
}

}  // namespace moeos::twin
