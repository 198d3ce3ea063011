// SPDX-License-Identifier: Apache-2.0
// Which elements of a part's result a thread's accumulators hold.
//
// A wgmma accumulator d of a thread holds, for j in [0, 32): columns 8j + 2(lane % 4) + {0, 1} of
// row lane / 4 (d[4j], d[4j+1]) and of row lane / 4 + 8 (d[4j+2], d[4j+3]) of its warp's 16 rows.
// Columns are rows of weights, and these lie in a stage in such an order (load_weights) that a
// thread's accumulators of four j make eight adjacent columns, which are one store. No data moves
// between threads or through shared memory, which products keep busy; that alone made the product
// 1.6 to 4.6 % faster. Transposed weights' columns keep their order: lanes exchange their results
// (exchange.cuh). Must not depend on: the use of accumulators.
#pragma once

#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace moeos::sm90 {

/// Rows of a tile that a consumer warp multiplies.
inline constexpr u32 kWarpRows = kConsumerRows / (kConsumerWarps / kConsumers);

/// The column, counted from its part's first one, of this thread's accumulator `i`, which is even.
inline u32 ordered_column(u32 i) {
  const u32 j = i / 4;
  return j / 4 * kOrderedRows + Machine::lane() % 4 * 8 + j % 4 * 2;
}

/// The column of accumulator `i` where weights are transposed.
inline u32 natural_column(u32 i) { return i / 4 * 8 + Machine::lane() % 4 * 2; }
/// The column of accumulator `i` in this kernel.
inline u32 column_in_part(u32 i) { return kTransposed ? natural_column(i) : ordered_column(i); }

/// The first of the accumulators of a hidden unit's gate and up value, where gates and ups
/// alternate in a part: its column counts units as accumulator `i`'s column would count gates.
constexpr u32 pair_at(u32 i) { return 2 * i - i % 4; }

/// The row, in a box of weights, that lies at index `place`: load_weights in tma.cuh.
inline u32 ordered_row(u32 place) {
  const u32 within = place % kOrderedRows;
  return place - within + within / 2 % 4 * 8 + within / 8 * 2 + within % 2;
}

/// The two numbers of a word.
inline float2 pair_of_word(u32 word) {
  return make_float2(Element::low(word), Element::high(word));
}
/// Two neighbouring gates, or two neighbouring ups, from words that each hold a gate and an up.
inline float2 alternate_pair(const u32* words, u64 at, bool of_ups) {
  const float2 first = pair_of_word(words[at]);
  const float2 next = pair_of_word(words[at + 1]);
  return of_ups ? make_float2(first.y, next.y) : make_float2(first.x, next.x);
}

/// The first of the 8 rows of a tile that a warp's accumulators 2 lower + {0, 1, 4, 5, ...} hold.
inline u32 tile_row(u32 lower) {
  return (threadIdx.x / 32 - kFirstConsumerWarp) * kWarpRows + 8 * lower;
}

}  // namespace moeos::sm90
