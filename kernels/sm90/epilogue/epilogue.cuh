// SPDX-License-Identifier: Apache-2.0
// From accumulators to a part's results: bias, activation, conversion.
//
// Must not depend on: the owner of a row; flags.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/block/saved_rows.cuh"
#include "kernels/sm90/epilogue/activation.cuh"
#include "kernels/sm90/epilogue/exchange.cuh"
#include "kernels/sm90/epilogue/sinks.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// Starts a thread's accumulators from the biases of its columns, or zeros. So the epilogue has
/// nothing to load, and no value is live from one part to the next.
template <u32 kRegisters>
inline void start_accumulators(float (&d)[kRegisters], const RankArguments& arguments,
                               const Task& task, u32 part) {
  constexpr u32 kTile = 2 * kRegisters;  // columns
  const bool first_product = product_of(task).activated;
  // Where gates and ups alternate in a part, its biases are in the order of its columns.
  const bool pairs = kColumnsAlternate && first_product;
  const bool gated = first_product && kShape.gated() && !pairs;
  // Where columns have scales of their own, biases are added after them (coded_products.cuh).
  const bool biased =
      kBias && !is_shared(task) && !(is_coded(task) && kFormat == WeightFormat::fp8_channel);
  u32 columns = first_product ? kShape.intermediate : kShape.hidden;
  u32 first = first_column(part, first_product ? product0_columns(kTile) : kTile, columns);
  if (pairs) {
    columns *= 2;
    first *= 2;
  }
  const u64 row = u64{task.local_expert} * (first_product ? kShape.w1_rows() : kShape.hidden);
  const u32 second_half = gated ? kShape.intermediate : kTile / 2;
#pragma unroll
  for (u32 i = 0; i < kRegisters; i += 4) {
    float values[2] = {};
    if constexpr (kBias) {
      const u32 column = first + column_in_part(i % (kRegisters / 2));
      // A gated tile's second half has the up columns of the same hidden units.
      const u32 at = column + (i < kRegisters / 2 ? 0 : second_half);
      const u8* bias = first_product ? arguments.b1 : arguments.b2;
      if (biased && (gated ? column : at) < columns) {
        const auto* words = reinterpret_cast<const u32*>(bias);
        float2 pair;
        if (kGateUp == GateUp::interleaved && gated) {
          pair = alternate_pair(words, row / 2 + column, i >= kRegisters / 2);
        } else {
          pair = pair_of_word(words[(row + at) / 2]);
        }
        values[0] = pair.x;
        values[1] = pair.y;
      }
    }
    d[i] = d[i + 2] = values[0];
    d[i + 1] = d[i + 3] = values[1];
  }
}

/// Eight adjacent columns, from a thread's four words: each has the results of two columns or, with
/// `kOfPairs`, of two hidden units whose gates and ups alternate. By a whole warp.
template <bool kOfPairs>
inline uint4 eight_of(u32 first, u32 second, u32 third, u32 fourth) {
  if constexpr (!kTransposed) {
    return make_uint4(first, second, third, fourth);
  }
  u32 words[] = {first, second, third, fourth};
  return kOfPairs ? eight_of_halves(words) : eight_columns(words);
}
/// As eight_of, from value(i): the two values of each pair of accumulators. By a whole warp.
template <bool kOfPairs, class Value>
inline uint4 eight_from(u32 i, Value value) {
  const auto packed = [&](u32 at) {
    const float2 pair = value(at);
    return Element::pack(pair.x, pair.y);
  };
  return eight_of<kOfPairs>(packed(i), packed(i + 4), packed(i + 8), packed(i + 12));
}

/// Quantizes and stores a scale group of a row between two products, of which four lanes have
/// sixteen values each: those of accumulators from `i` on. `column`: the group's first.
template <class Value>
inline void store_group(bool wanted, u8* row, u32 column, u32 i, Value value) {
  constexpr u32 kEights = kHiddenGroup / kOrderedRows;  // of a lane
  static_assert(kHiddenGroup == 4 * 8 * kEights);
  float values[kEights][8];
  float largest = 0.0F;
#pragma unroll
  for (u32 eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const float2 pair = value(i + eight * kOrderedRows / 2 + 4 * k);
      values[eight][2 * k] = pair.x;
      values[eight][2 * k + 1] = pair.y;
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1U));
  largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2U));
  const GroupScale scale = group_scale(largest);
#pragma unroll
  for (u32 eight = 0; eight < kEights; ++eight) {
    store_vector(wanted, row + column + ordered_column(0) + eight * kOrderedRows,
                 eight_codes(values[eight], scale.inverse));
  }
  store_number(wanted && Machine::lane() % 4 == 0,
               row + kFirst.columns + column / kHiddenGroup * sizeof(float), scale.scale);
}

/// For experts' GEMM0: stores the rows of d that are saved for a gradient call.
template <u32 kRegisters>
inline void save_rows(const float (&d)[kRegisters], const RankArguments& arguments,
                      const Task& task, u32 part) {
  if (!product_of(task).activated || is_shared(task)) {
    return;
  }
  constexpr u32 kGroup = kOrderedRows / 2;  // accumulators with as many columns of two rows
  constexpr u32 kHalf = product0_columns(2 * kRegisters) / 2;  // accumulators of gates, or of ups
  const u32 first = first_column_of(task, part);
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    u8* const row = saved_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
#pragma unroll
    for (u32 i = 2 * lower; i < kRegisters; i += kGroup) {
      const u32 column = first + ordered_column(i % kHalf);
      u32 words[4];
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        if constexpr (kColumnsAlternate) {
          const u32 at = pair_at(i % kHalf + 4 * k) + i / kHalf;
          words[k] = Element::pack(d[at], d[at + 4]);
        } else {
          words[k] = Element::pack(d[i + 4 * k], d[i + 4 * k + 1]);
        }
      }
      store_vector(row != nullptr && (kWholeParts || column < kShape.intermediate),
                   row + u64{i / kHalf * kShape.intermediate + column} * 2,
                   eight_of<kColumnsAlternate>(words[0], words[1], words[2], words[3]));
    }
  }
}

/// Quantizes and stores a row's part of a result: one scale group, of which four lanes have 32
/// values each.
template <u32 kRegisters>
inline void store_coded_result(const float (&d)[kRegisters], const ResultRows& rows,
                               const Slot& slot, u32 column, u32 lower) {
  constexpr u32 kEights = kResultGroup / kOrderedRows;  // of a lane
  static_assert(2 * kRegisters == kResultGroup);
  float values[kEights][8];
  float largest = 0.0F;
#pragma unroll
  for (u32 eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (u32 k = 0; k < 8; ++k) {
      values[eight][k] = d[eight * kOrderedRows / 2 + 2 * lower + k / 2 * 4 + k % 2];
      largest = fmaxf(largest, fabsf(values[eight][k]));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1U));
  largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2U));
  const GroupScale scale = group_scale(largest);
  uint2 codes[kEights];
#pragma unroll
  for (u32 eight = 0; eight < kEights; ++eight) {
    codes[eight] = eight_codes(values[eight], scale.inverse);
  }
  rows.store_codes(slot, column, codes);
  rows.store_scale(slot, column, scale.scale);
}

/// Stores d, or activation(d) for GEMM0. Called by all consumer warps that have products of the
/// tile. For a tile of no rows it runs the same code and stores nothing.
template <u32 kRegisters>
inline void finish_tile(const float (&d)[kRegisters], const Task& task, const Slot& slot,
                        u32 part) {
  constexpr u32 kTile = 2 * kRegisters;     // columns
  constexpr u32 kGroup = kOrderedRows / 2;  // accumulators with as many columns of two rows
  const auto pair_of = [&](u32 i) { return make_float2(d[i], d[i + 1]); };
  if (!product_of(task).activated) {
    if constexpr (kCodedResults) {
      if (is_coded(task)) {
#pragma unroll
        for (u32 lower = 0; lower < 2; ++lower) {
          store_coded_result(d, ResultRows(task, lower), slot,
                             first_column(part, kTile, kShape.hidden), lower);
        }
        return;
      }
    }
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const ResultRows rows(task, lower);
#pragma unroll
      for (u32 i = 2 * lower; i < kTile / 2; i += 2 * kGroup) {
        rows.store(slot, first_column(part, kTile, kShape.hidden) + i / kGroup * kOrderedRows,
                   eight_from<false>(i, pair_of), eight_from<false>(i + kGroup, pair_of));
      }
    }
    return;
  }
  if (weighs_tokens(task, part)) {
    store_weights(d, task, slot);
    return;
  }
  constexpr u32 kColumns = product0_columns(kTile);
  const Product first_product = is_shared(task) ? kSharedFirst : kFirst;
  const u32 first = first_column_of(task, part);
  const auto activated = [&](u32 at) {
    if constexpr (kColumnsAlternate) {
      const u32 i = pair_at(at);
      return gated<Element, kActivation>(make_float2(d[i], d[i + 4]),
                                         make_float2(d[i + 1], d[i + 5]));
    } else if constexpr (kShape.gated()) {
      return gated<Element, kActivation>(pair_of(at), pair_of(kRegisters / 2 + at));
    } else {
      return curve_of<Element, kActivation>(pair_of(at));
    }
  };
  if (is_coded(task)) {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const u32 row = result_place(task, tile_row(lower) + Machine::lane() / 4);
      u8* const to = result_row(slot, row, kGeometry.hidden_bytes);
#pragma unroll
      for (u32 i = 2 * lower; i < kColumns / 2; i += kHiddenGroup / 2) {
        const u32 column = first + i / kGroup * kOrderedRows;
        store_group(row != kNowhere && (kWholeParts || column < kFirst.columns), to, column, i,
                    activated);
      }
    }
    return;
  }
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const u32 row_bytes = is_shared(task) ? kGeometry.shared_bytes : kGeometry.hidden_bytes;
    const RowBetween row =
        row_between(task, slot, tile_row(lower) + Machine::lane() / 4, row_bytes);
    u8* const to = row.to + u64{mlp_of(task, part)} * first_product.columns * 2;
#pragma unroll
    for (u32 i = 2 * lower; i < kColumns / 2; i += kGroup) {
      const u32 column = first + ordered_column(i);
      store_vector(row.stored && (kWholeParts || column < first_product.columns),
                   to + u64{column} * 2, eight_from<kColumnsAlternate>(i, activated));
    }
  }
}

}  // namespace moeos::sm90
