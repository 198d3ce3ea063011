// SPDX-License-Identifier: Apache-2.0
// Where the parts of a row lie in a gradient call: as it is sent, as it comes back, and as it is
// kept here from the products of its tile to those of the weights.
//
//   sent     [x][gradient of the output][each choice of its token: expert, weight]
//   result   [gradient of x, times the row's weight][gradient of the weight]
//   sums     [gradient of x][gradient of each choice's weight][of the shared experts' weight]
//   kept     [activated values, times the weight][gradients before the activation, likewise]
//            [<dA, A> of each part][weight][x][gradient of the output]
//
// A row of sums, of ranks that have slices of the same experts, is fp32
// (runtime/memory/slices.hpp). The index of a kept row follows from its source, expert and slot,
// whatever tile it came in. So what is added up over an expert's rows has the same bits however
// they were packed. Kept values, and each half of the gradients before a gated activation, have
// their columns in groups of 32, in the order in which accumulators have them (kept_column). Where
// gates and ups alternate in w1's columns, they alternate in the gradients, too. Must not depend
// on: the readers and writers of rows.
#pragma once

#include "kernels/sm90/block/config.cuh"

namespace moeos::sm90 {

/// What a sent row says of a choice of its token: the expert's place, or kNone, and its weight.
struct SentChoice {
  u32 expert;
  float weight;
};

/// Sent and kept rows are whole cache lines: otherwise boxes of 128 bytes of a row would touch two.
inline constexpr u32 kLineBytes = 128;
inline constexpr u32 kHiddenBytes = kShape.hidden * 2;
inline constexpr u32 kDOutAt = kHiddenBytes;
inline constexpr u32 kChoicesAt = 2 * kHiddenBytes;
inline constexpr u32 kSentBytes =
    align_up(kChoicesAt + kGeometry.top_k * u32{sizeof(SentChoice)}, kLineBytes);
inline constexpr u32 kDWeightAt = kHiddenBytes;

/// Numbers of a row of sums after the gradient of x; and in all.
inline constexpr u32 kSumsOfWeights = kGeometry.choices() + 1;
inline constexpr u32 kSums = kShape.hidden + kSumsOfWeights;
static_assert(!kSumsGradients ||
              (kSums * sizeof(float) <= kGeometry.row_bytes && kGeometry.sums_everywhere != 0));

/// Columns of kept values, and of each half of the gradients before a gated activation: those
/// beyond I are zeros, or unused.
inline constexpr u32 kKeptColumns = align_up(kShape.intermediate, kTileDepth);
inline constexpr u32 kHalves = kShape.gated() ? 2 : 1;
inline constexpr u32 kDHiddenAt = kKeptColumns * 2;
inline constexpr u32 kProductsAt = kDHiddenAt + kHalves * kKeptColumns * 2;
inline constexpr u32 kWeightAt = kProductsAt + kGeometry.product0_parts * u32{sizeof(float)};
inline constexpr u32 kCopiesAt = align_up(kWeightAt + u32{sizeof(float)}, kLineBytes);
/// Whether x and the gradient of the output are kept, too: a peer may send the next call's rows as
/// soon as this call's are back. A rank alone sends none before all of this call is over.
inline constexpr bool kCopies = kGeometry.world > 1;
inline constexpr u32 kKeptRowBytes =
    kCopiesAt + (kCopies ? align_up(2 * kHiddenBytes, kLineBytes) : 0);
static_assert(!kGradients ||
              (kGeometry.sent_bytes == kSentBytes && kGeometry.row_bytes == kSentBytes &&
               kGeometry.hidden_bytes == kKeptRowBytes));

/// Where a group of 32 columns has column 8b + 2a + i: at 8a + 2b + i. Its own inverse. Kept
/// columns are the depth of a product, w1's rows, or transposed its columns: these lie in their own
/// order, and then so do kept ones.
constexpr u32 kept_column(u32 column) {
  if (kTransposed) {
    return column;
  }
  const u32 within = column % 32;
  return column - within + within / 2 % 4 * 8 + within / 8 * 2 + within % 2;
}

/// Where the gradient of h has a column of a half.
constexpr u32 kept_gradient(u32 half, u32 column) {
  return kColumnsAlternate ? 2 * column + half : half * kKeptColumns + kept_column(column);
}

/// Rows that a source may send, each of which has an index among the kept rows; and the rows of all
/// sources.
inline constexpr u32 kKeptOfSource = kGeometry.cell_rows_used();
inline constexpr u32 kKeptRows = kGeometry.world * kKeptOfSource;

}  // namespace moeos::sm90
