// SPDX-License-Identifier: Apache-2.0
// The twin's matrix product on one thread: out = rows * weight^T, accumulated in fp32.
//
// Knows packed rows, weights as they are stored (kernels/element_formats.hpp) and one thread. Must
// not depend on: tasks, experts, activations, other ranks.
//
// Use: pack every 8 rows (of any origin) into a panel with pack_rows, lay panels end to end, then
// call multiply for the columns wanted. Neither function allocates, locks, throws or keeps state;
// multiply takes 16 KiB of stack.
//
// Determinism: each element is summed over k in one fixed order, which depends only on `depth`. So
// its bits do not depend on the row's place in its panel, on the other rows, on the number of
// panels or on how the columns are divided among calls. They may differ between instruction sets:
// the portable build of x86-64 has no fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element_formats.hpp"

namespace moeos::twin {

/// Storage type of rows and weights. kBfloat16 is the upper half of a binary32, as uint16_t.
enum class Element : std::uint8_t { kFloat32, kBfloat16 };

/// Rows in a panel; row segments are padded to a multiple of it.
inline constexpr unsigned kPanelRows = 8;

/// `depth` and `columns` are multiples of this.
inline constexpr unsigned kGemmGranule = 8;

/// Floats in a panel of `depth` columns.
constexpr std::size_t panel_floats(unsigned depth) { return std::size_t{kPanelRows} * depth; }

/// Converts `rows` rows (1 to 8) of `depth` elements to one panel: float [depth][8], where missing
/// rows are zero. Row i starts at first_row + i * row_stride_bytes; only the given rows are read.
void pack_rows(Element element, const void* first_row, std::size_t row_stride_bytes, unsigned rows,
               unsigned depth, float* panel);

/// A matrix of weights, as it is stored: element k of row n is element n * stride + k * step of
/// `data`. If there is a `rest`, it has the elements from `rest_from` on: element k of row n is
/// element n * stride + (k - rest_from) * step of `rest`.
///
/// Quantized rows are contiguous. Their weight is code * scale * scale_2 in fp32, multiplied in
/// this order, and then rounded to `element`.
struct Weights {
  Element element;
  const void* data;
  std::size_t stride;
  WeightFormat format = WeightFormat::plain;
  const void* scales = nullptr;  // of the first row; [scale_rows][scales_of_row] for all
  float scale_2 = 1.0F;          // where the format has it
  unsigned apart = 1;            // for codes: `stride` in lengths of a row; scales are as far apart
  std::size_t step = 1;          // for plain weights, as `rest` and `rest_from`
  const void* rest = nullptr;
  unsigned rest_from = 0;  // a multiple of 8
};

/// out[r][n] = sum over k < depth of rows[r][k] * weights[first_row + n][k].
///
/// panels:     panel_count panels from pack_rows, end to end: 8 * panel_count rows.
/// weights:    rows of `depth` elements, of which `columns` are used. Nothing outside of these, and
///             of their scales, is read.
/// out:        float [8 * panel_count][columns]; row r starts at out + r * out_stride. Overwritten.
///
/// depth and columns are positive multiples of 8. Buffers may have any alignment that their
/// elements allow; panels on 64-byte boundaries are fastest.
void multiply(const float* panels, unsigned panel_count, unsigned depth, const Weights& weights,
              unsigned first_row, unsigned columns, float* out, std::size_t out_stride);

/// Both functions as built for one instruction set.
struct GemmKernels {
  const char* instruction_set;
  decltype(&moeos::twin::pack_rows) pack_rows;
  decltype(&moeos::twin::multiply) multiply;
};

/// Every build that this processor runs, the fastest (which the functions above use) first.
std::span<const GemmKernels* const> supported_gemm_kernels();

}  // namespace moeos::twin
