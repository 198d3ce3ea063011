// SPDX-License-Identifier: Apache-2.0
// Where the matrices of MLPs lie in the caller's tensors: the only place of the twin that knows
// LayerShape's `transposed` and `gate_up`.
//
// Must not depend on: products and sums, tasks, ranks.
#pragma once

#include "kernels/shape.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/gemm.hpp"

namespace moeos::twin {

/// A tensor of the matrices of MLPs, end to end, each of which has `halves` halves of `rows` rows:
/// gate rows and up rows, or one half. Element k of row n of a half is element first(mlp, half) + n
/// * row_step() + k * column_step(). Where up rows are a tensor of their own, each tensor has one
/// half, whichever is asked for. A bias has rows of one element.
struct MatrixLayout {
  u32 rows;  // of a half
  u32 depth;
  u32 halves;
  bool interleaved = false;  // row n of each half, then row n + 1 of each
  bool transposed = false;   // an MLP's matrix is stored by columns

  constexpr u64 first(u32 mlp, u32 half) const {
    const u64 row = half % halves * (interleaved ? 1 : rows);
    return u64{mlp} * halves * rows * depth + row * (transposed ? 1 : depth);
  }
  constexpr u32 row_step() const { return (interleaved ? halves : 1) * (transposed ? 1 : depth); }
  constexpr u32 column_step() const { return transposed ? halves * rows : 1; }
};

/// The layout of the experts' w1 and, where up rows are a tensor of their own, of w3.
constexpr MatrixLayout w1_layout(const LayerShape& shape) {
  const bool two = shape.gated() && shape.gate_up != GateUp::separate;
  return {shape.intermediate, shape.hidden, two ? 2U : 1U, shape.gate_up == GateUp::interleaved,
          shape.transposed};
}
constexpr MatrixLayout b1_layout(const LayerShape& shape) {
  return {shape.intermediate, 1, shape.gated() ? 2U : 1U, shape.gate_up == GateUp::interleaved};
}
constexpr MatrixLayout w2_layout(const LayerShape& shape) {
  return {shape.hidden, shape.intermediate, 1, false, shape.transposed};
}

/// Adds some elements of a half of an MLP's bias, if there is one, to `rows` rows of results.
inline void add_bias(const ConstElements& bias, const MatrixLayout& layout, u32 mlp, u32 half,
                     u32 first, u32 columns, u32 rows, float* results, u32 stride) {
  const u64 at = layout.first(mlp, half) + u64{first} * layout.row_step();
  for (u32 row = 0; bias && row < rows; ++row) {
    for (u32 n = 0; n < columns; ++n) {
      results[std::size_t{row} * stride + n] += bias[at + u64{n} * layout.row_step()];
    }
  }
}

/// Matrices that are multiplied.
struct Matrices {
  Element element;  // of plain weights; dequantized weights are rounded to it
  MatrixLayout layout;
  const void* data;
  const void* ups = nullptr;  // a separate tensor of up rows, or null
  WeightFormat format = WeightFormat::plain;
  const void* scales = nullptr;
  const float* scales_2 = nullptr;

  /// The rows of a half of an MLP's matrix, each of which is multiplied by all inputs.
  Weights rows(u32 mlp, u32 half) const {
    if (format == WeightFormat::plain) {
      return {.element = element,
              .data = of_half(mlp, half),
              .stride = layout.row_step(),
              .step = layout.column_step()};
    }
    const MatrixLayout of_scales{scale_rows(format, layout.rows),
                                 scales_of_row(format, layout.depth), layout.halves,
                                 layout.interleaved};
    return {
        .element = element,
        .data = static_cast<const u8*>(data) + layout.first(mlp, half) * code_bits(format) / 8,
        .stride = layout.row_step(),
        .format = format,
        .scales = static_cast<const u8*>(scales) + of_scales.first(mlp, half) * scale_bytes(format),
        .scale_2 = scales_2 == nullptr ? 1.0F : scales_2[mlp * layout.halves + half],
        .apart = layout.row_step() / layout.depth};
  }
  /// The columns of an MLP's matrix, each with all rows of `halves` halves. Not for quantized
  /// weights.
  Weights columns(u32 mlp, u32 halves) const {
    return {.element = element,
            .data = of_half(mlp, 0),
            .stride = layout.column_step(),
            .step = layout.row_step(),
            .rest = halves > 1 ? of_half(mlp, 1) : nullptr,
            .rest_from = layout.rows};
  }

 private:
  const void* of_half(u32 mlp, u32 half) const {
    const void* tensor = half > 0 && ups != nullptr ? ups : data;
    return ConstElements(element, tensor).at(layout.first(mlp, half));
  }
};

/// Matrices, or biases, that are added to.
struct Sums {
  MatrixLayout layout;
  float* data;  // null: not wanted
  float* ups;   // the tensor that has up rows; null: not wanted

  bool asked() const { return data != nullptr || ups != nullptr; }
  /// A row of an MLP's matrix, counted through all gate rows, then all up rows; null if not wanted.
  float* row(u32 mlp, u32 n) const {
    const u32 half = n / layout.rows;
    float* const tensor = half > 0 ? ups : data;
    return tensor == nullptr
               ? nullptr
               : tensor + layout.first(mlp, half) + u64{n % layout.rows} * layout.row_step();
  }
};

}  // namespace moeos::twin
