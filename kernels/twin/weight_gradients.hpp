// SPDX-License-Identifier: Apache-2.0
// The gradients of an expert's weights, from all rows that a gradient call kept: one processor's
// share, after the call.
//
// dW1 = sum of w dH^T x, dW2 = sum of w dY^T A, and the corresponding sums of w dH and w dY for the
// biases. No rank waits for another one here, so this is no task of the device OS.
//
// One processor computes a gradient's tile and adds rows up in the order of sources, and for each
// source in the order of its cell. So bits depend neither on how rows were packed into tiles nor on
// the number of processors. Must not depend on: queues, flags, tiles of the call.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/shape.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/gemm.hpp"
#include "kernels/twin/gradient_rows.hpp"
#include "kernels/twin/matrices.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/platform/twin/platform.hpp"

namespace moeos::twin {

class WeightGradients {
 public:
  /// kept, places: as for GradientKernels, whose call has ended well.
  WeightGradients(const Rank<Machine>& rank, const LayerShape& shape, const Operands& operands,
                  const u8* kept, const u32* places, GradientScratch& scratch)
      : rank_(rank),
        shape_(shape),
        element_(operands.element),
        gradients_(*operands.gradients),
        rows_(rank.geometry(), shape, operands.element),
        kept_(kept),
        places_(places),
        scratch_(scratch) {}

  /// Does every tile whose number is `worker` modulo `workers`.
  void add(u32 worker, u32 workers) {
    const Geometry& geometry = rank_.geometry();
    const u32 experts = geometry.first_expert(rank_.rank + 1) - geometry.first_expert(rank_.rank);
    float* const ups = shape_.gate_up == GateUp::separate ? gradients_.d_w3 : gradients_.d_w1;
    const WeightProduct first{rows_.d_hidden_at(),
                              rows_.w1_rows,
                              0,
                              rows_.hidden,
                              {w1_layout(shape_), gradients_.d_w1, ups},
                              {b1_layout(shape_), gradients_.d_b1, gradients_.d_b1}};
    const WeightProduct second{rows_.d_out_at(),
                               rows_.hidden,
                               rows_.values_at(),
                               rows_.intermediate,
                               {w2_layout(shape_), gradients_.d_w2, nullptr},
                               {{rows_.hidden, 1, 1}, gradients_.d_b2, nullptr}};
    u32 number = 0;
    for (u32 expert = 0; expert < experts; ++expert) {
      find_rows(expert);
      add_product(first, expert, worker, workers, number);
      add_product(second, expert, worker, workers, number);
    }
  }

 private:
  /// Two parts of a kept row: where they begin, how many columns they have, and where their product
  /// and the sum of the left part are added.
  struct WeightProduct {
    u32 left_at;
    u32 left;
    u32 right_at;
    u32 right;
    Sums gradient;
    Sums bias;
  };

  void find_rows(u32 expert) {
    scratch_.rows.clear();
    for (u32 source = 0; source < rank_.geometry().world; ++source) {
      const u32* starts = rank_.memory.receive_starts(source);
      for (u32 slot = 0; slot < starts[expert + 1] - starts[expert]; ++slot) {
        const u32 row = rank_.layout.row(expert, slot, starts[expert]);
        scratch_.rows.push_back(places_[rank_.layout.row_index(source, row)]);
      }
    }
  }

  void add_product(const WeightProduct& product, u32 expert, u32 worker, u32 workers, u32& number) {
    constexpr u32 kLeft = GradientScratch::kLeft;
    constexpr u32 kRight = GradientScratch::kRight;
    for (u32 left = 0; left < product.left; left += kLeft) {
      for (u32 right = 0; right < product.right; right += kRight) {
        if (number++ % workers == worker) {
          add_tile(product, expert, left, right);
        }
      }
    }
  }

  void add_tile(const WeightProduct& product, u32 expert, u32 left, u32 right) {
    const u32 left_columns = minimum(GradientScratch::kLeft, product.left - left);
    const u32 right_columns = minimum(GradientScratch::kRight, product.right - right);
    constexpr u32 kStride = GradientScratch::kRight;
    const u32 all = static_cast<u32>(scratch_.rows.size());
    for (u32 first = 0; first < all; first += GradientScratch::kDepth) {
      const u32 count = minimum(GradientScratch::kDepth, all - first);
      const u32 depth = align_up(count, kGemmGranule);
      const u32* rows = &scratch_.rows[first];
      pack_left(rows, count, depth, product.left_at + left * rows_.size, left_columns);
      if (right == 0 && product.bias.asked()) {
        add_bias(product.bias, expert, left, left_columns, depth);
      }
      if (!product.gradient.asked()) {
        continue;
      }
      pack_right(rows, count, depth, product.right_at + right * rows_.size, right_columns);
      multiply(scratch_.left.get(), left_columns / kPanelRows, depth,
               {.element = Element::kFloat32,
                .data = scratch_.right.get(),
                .stride = 1,
                .step = kStride},
               0, right_columns, scratch_.products.get(), kStride);
      for (u32 m = 0; m < left_columns; ++m) {
        float* sums = &scratch_.sums[std::size_t{m} * kStride];
        const float* products = &scratch_.products[std::size_t{m} * kStride];
        for (u32 n = 0; n < right_columns; ++n) {
          sums[n] = products[n] + (first == 0 ? 0.0F : sums[n]);
        }
      }
    }
    for (u32 m = 0; all > 0 && m < left_columns; ++m) {
      if (float* const row = product.gradient.row(expert, left + m); row != nullptr) {
        const u64 step = product.gradient.layout.column_step();
        for (u32 n = 0; n < right_columns; ++n) {
          row[(right + n) * step] += scratch_.sums[std::size_t{m} * kStride + n];
        }
      }
    }
  }

  const u8* kept_row(u32 row) const { return kept_ + u64{row} * rows_.kept_bytes(); }

  /// Packs panels of columns of the left factor, one row times its weight at a time; zeros up to
  /// `depth`.
  void pack_left(const u32* rows, u32 count, u32 depth, u32 from, u32 columns) {
    std::fill_n(scratch_.left.get(), std::size_t{columns} * depth, 0.0F);
    for (u32 k = 0; k < count; ++k) {
      const u8* row = kept_row(rows[k]);
      const ConstElements values(element_, row + from);
      float weight;
      std::memcpy(&weight, row + rows_.weight_at(), sizeof(weight));
      for (u32 m = 0; m < columns; ++m) {
        scratch_.left[m / kPanelRows * panel_floats(depth) + k * kPanelRows + m % kPanelRows] =
            weight * values[m];
      }
    }
  }

  void pack_right(const u32* rows, u32 count, u32 depth, u32 from, u32 columns) {
    for (u32 k = 0; k < depth; ++k) {
      float* to = &scratch_.right[std::size_t{k} * GradientScratch::kRight];
      const ConstElements values(element_, kept_row(rows[k < count ? k : 0]) + from);
      for (u32 n = 0; n < columns; ++n) {
        to[n] = k < count ? values[n] : 0.0F;
      }
    }
  }

  void add_bias(const Sums& bias, u32 expert, u32 left, u32 columns, u32 depth) {
    for (u32 m = 0; m < columns; ++m) {
      const float* column = &scratch_.left[m / kPanelRows * panel_floats(depth) + m % kPanelRows];
      float sum = 0.0F;
      for (u32 k = 0; k < depth; ++k) {
        sum += column[std::size_t{k} * kPanelRows];
      }
      *bias.row(expert, left + m) += sum;
    }
  }

  const Rank<Machine>& rank_;
  const LayerShape& shape_;
  Element element_;
  const GradientOperands& gradients_;
  GradientRows rows_;
  const u8* kept_;
  const u32* places_;
  GradientScratch& scratch_;
};

}  // namespace moeos::twin
