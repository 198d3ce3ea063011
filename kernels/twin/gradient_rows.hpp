// SPDX-License-Identifier: Apache-2.0
// Where the parts of a row lie in a gradient call: as it is sent, as it comes back, and as it is
// kept here from the products of its tile to those of the weights.
//
// Must not depend on: the runtime, tasks, the readers and writers of rows.
#pragma once

#include <vector>

#include "kernels/sizes.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/operands.hpp"

namespace moeos::twin {

/// What a row says of each choice of its token: its expert, or kNone, and that expert's weight.
struct SentChoice {
  u32 expert;
  float weight;
};

/// Offsets in bytes. A row is sent as [x][gradient of the output][choices], comes back as [gradient
/// of x][gradient of the weight], and is kept as [x][gradient of the output][activated
/// values][gradients before the activation][a product for each part][weight]. A token's sums are
/// [gradient of x][gradient of each choice's weight][gradient of the shared experts' weight], in
/// fp32: a row of sums over slices has all of them.
struct GradientRows {
  u32 hidden;
  u32 intermediate;
  u32 w1_rows;
  u32 top_k;
  u32 choices;  // of a token, which may be fewer than its pairs
  u32 parts;    // of GEMM0
  u32 size;     // of an element

  GradientRows(const Geometry& geometry, const LayerShape& shape, Element element)
      : hidden(shape.hidden),
        intermediate(shape.intermediate),
        w1_rows(shape.w1_rows()),
        top_k(geometry.top_k),
        choices(geometry.choices()),
        parts(geometry.product0_parts),
        size(static_cast<u32>(size_of(element))) {}

  u32 d_out_at() const { return hidden * size; }
  u32 choices_at() const { return 2 * hidden * size; }
  u32 sent_bytes() const { return align_up(choices_at() + top_k * u32{sizeof(SentChoice)}, 16U); }

  u32 d_weight_at() const { return hidden * size; }

  u32 sums() const { return hidden + choices + 1; }
  u32 sums_bytes() const { return sums() * u32{sizeof(float)}; }

  u32 values_at() const { return 2 * hidden * size; }
  u32 d_hidden_at() const { return values_at() + intermediate * size; }
  u32 products_at() const { return d_hidden_at() + w1_rows * size; }
  u32 weight_at() const { return products_at() + parts * u32{sizeof(float)}; }
  u32 kept_bytes() const { return align_up(weight_at() + u32{sizeof(float)}, 16U); }
};

/// Memory of one processor in a gradient call.
struct GradientScratch {
  static constexpr u32 kDepth = 256;  // rows whose products are added up on their own
  static constexpr u32 kLeft = 128;   // columns of the left factor; kRight: of the right one
  static constexpr u32 kRight = kPlainColumns;

  GradientScratch(const Geometry& geometry, const LayerShape& shape)
      : panels(Scratch::allocate(panel_floats(maximum(shape.hidden, shape.w1_rows())) *
                                 ceil_div(geometry.tile_rows, kPanelRows))),
        results(Scratch::allocate(std::size_t{geometry.tile_rows} *
                                  maximum(3 * kGatedColumns, 2 * kPlainColumns))),
        left(Scratch::allocate(std::size_t{kLeft} * kDepth)),
        right(Scratch::allocate(std::size_t{kDepth} * kRight)),
        products(Scratch::allocate(std::size_t{kLeft} * kRight)),
        sums(Scratch::allocate(std::size_t{kLeft} * kRight)),
        token(Scratch::allocate(GradientRows(geometry, shape, Element::kFloat32).sums())) {}

  Scratch::Floats panels;    // packed rows of a tile
  Scratch::Floats results;   // of a part: gate, up, gradient of the activated value
  Scratch::Floats left;      // packed columns of the left factor of a weight's gradient
  Scratch::Floats right;     // rows of the right factor
  Scratch::Floats products;  // products of a block of rows
  Scratch::Floats sums;      // sums over an expert's rows so far
  Scratch::Floats token;     // sums of a token
  std::vector<u32> rows;     // of one expert, in the order in which they are added up
};

}  // namespace moeos::twin
