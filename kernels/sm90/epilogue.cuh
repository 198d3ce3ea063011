// SPDX-License-Identifier: Apache-2.0
// From accumulators to rows in memory: bias, activation, conversion, and the results' way out.
//
// A wgmma accumulator d of a thread holds, for j in [0, 32): columns 8j + 2(lane % 4) + {0, 1} of
// row lane / 4 (d[4j], d[4j+1]) and of row lane / 4 + 8 (d[4j+2], d[4j+3]) of its warp's 16 rows.
// Columns are rows of weights, and these lie in a stage in such an order (load_weights) that a
// thread's accumulators of four j make eight columns next to each other, which are one store. No
// other thread is asked, and shared memory, which products keep busy, is not touched
// (docs/performance.md, "Weights in another order"). May not know: who owns a row; flags.
#pragma once

#include "kernels/sm90/activation.cuh"
#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/ptx/store.cuh"
#include "runtime/packet.hpp"

namespace moeos::sm90 {

/// Rows of a tile that a consumer warp multiplies.
inline constexpr u32 kWarpRows = kConsumerRows / (kConsumerWarps / kConsumers);

/// The column, from its part's first on, of this thread's accumulator `i`, an even one.
inline u32 ordered_column(u32 i) {
  const u32 j = i / 4;
  return j / 4 * kOrderedRows + Machine::lane() % 4 * 8 + j % 4 * 2;
}

/// The fetch warp: where the rows of each of a tile's segments go, in the intermediate buffer or
/// among their owners' results.
inline void find_results(const RankArguments& arguments, const Rank<Machine>& rank,
                         const Task& task, Slot& slot) {
  const u32 lane = Machine::lane();
  if (task.kind == TaskKind::gemm1 && lane < task.segment_count) {
    slot.results[lane] = outgoing_results(rank, task, task.segments[lane]);
  } else if (task.kind == TaskKind::gemm0 && lane == 0) {
    slot.results[0] = arguments.intermediate_rows + u64{task.first_result} * kGeometry.hidden_bytes;
    if (is_shared(task)) {
      slot.results[0] = arguments.intermediate_rows + kGeometry.shared_between_at() +
                        u64{task.first_result} * kGeometry.shared_bytes;
      slot.results[1] = reinterpret_cast<u8*>(&rank.memory.shared_weight[task.first_result]);
    }
  }
}

/// Where a row of a tile's result goes, as a number: its segment, and its row there; kNowhere: it
/// is padding. Of a first product all rows are one segment, and padding is stored, too: the second
/// one reads it, and must not read uninitialised memory.
inline constexpr u32 kNowhere = 0xFFFF;
static_assert(Geometry::kMaxSegments * kTileRows < kNowhere);
inline u32 result_place(const Task& task, u32 row) {
  if (task.kind == TaskKind::gemm0) {
    const u32 rows = is_shared(task) ? align_up(task.padded_rows, kTokenBoxRows) : task.padded_rows;
    return row < rows ? row : kNowhere;
  }
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    if (row >= first && row < first + task.segments[s].rows) {
      return s * kTileRows + (row - first);
    }
    first += laid_out_rows(kGeometry, task, s, first);
  }
  return kNowhere;
}
/// And as an address; of kNowhere one that nobody stores to.
inline u8* result_row(const Slot& slot, u32 place, u32 row_bytes) {
  return slot.results[place / kTileRows % Geometry::kMaxSegments] +
         u64{place % kTileRows} * row_bytes;
}

/// What a thread's accumulators start from: the biases of its columns, or zeros. So the epilogue
/// has nothing to load, and no value is live from one part to the next.
template <u32 kRegisters>
inline void start_accumulators(float (&d)[kRegisters], const RankArguments& arguments,
                               const Task& task, u32 part) {
  constexpr u32 kTile = 2 * kRegisters;  // columns
  const bool first_product = task.kind == TaskKind::gemm0;
  const bool gated = first_product && kShape.gated();
  const bool biased = kBias && !is_shared(task);
  const u32 columns = first_product ? kShape.intermediate : kShape.hidden;
  const u32 first = first_column(part, first_product ? gemm0_columns(kTile) : kTile, columns);
  const u64 row = u64{task.local_expert} * (first_product ? kShape.w1_rows() : kShape.hidden);
  const u32 second_half = gated ? kShape.intermediate : kTile / 2;
#pragma unroll
  for (u32 i = 0; i < kRegisters; i += 4) {
    float values[2] = {};
    if constexpr (kBias) {
      const u32 column = first + ordered_column(i % (kRegisters / 2));
      // A gated tile's second half has the up columns of the same hidden units.
      const u32 at = column + (i < kRegisters / 2 ? 0 : second_half);
      const u8* bias = first_product ? arguments.b1 : arguments.b2;
      if (biased && (gated ? column : at) < columns) {
        const u32 pair = reinterpret_cast<const u32*>(bias)[(row + at) / 2];
        values[0] = Element::low(pair);
        values[1] = Element::high(pair);
      }
    }
    d[i] = d[i + 2] = values[0];
    d[i + 1] = d[i + 3] = values[1];
  }
}

/// The first of the 8 rows of a tile that a warp's accumulators 2 lower + {0, 1, 4, 5, ...} are of.
inline u32 tile_row(u32 lower) {
  return (threadIdx.x / 32 - kFirstConsumerWarp) * kWarpRows + 8 * lower;
}

/// Rows of the second product's results that a thread stores for one half of its accumulators. Of a
/// world of one rank: the accumulators' own. Where results go over links: that and its neighbour's,
/// the lane with the next or the last row. Such two exchange halves, so that eight lanes together
/// store 128 bytes of one row, a cache line: links carry that faster than 64 bytes of each of two
/// (docs/performance.md, "Whole lines for links").
class ResultRows {
 public:
  ResultRows(const Task& task, u32 lower) {
    const u32 own = tile_row(lower) + Machine::lane() / 4;
    first_ = result_place(task, kWholeLines ? own & ~1U : own);
    second_ = kWholeLines ? result_place(task, own | 1U) : first_;
    if constexpr (kWholeLines) {
      __syncwarp();  // lanes that have come apart above would be slow to exchange
    }
  }

  /// Stores this thread's results: eight columns from `column`, a multiple of 2 kOrderedRows, plus
  /// ordered_column(0) on, and eight kOrderedRows further; or what it has for them in exchange. By
  /// a whole warp.
  void store(const Slot& slot, u32 column, uint4 first, uint4 second) const {
    u32 first_column = column + ordered_column(0);
    u32 second_column = first_column + kOrderedRows;
    if constexpr (kWholeLines) {
      const bool odd = (Machine::lane() & kNeighbour) != 0;
      const auto exchanged = [](u32 value) { return __shfl_xor_sync(~0U, value, kNeighbour); };
      const uint4 sent = odd ? first : second;
      const uint4 got =
          make_uint4(exchanged(sent.x), exchanged(sent.y), exchanged(sent.z), exchanged(sent.w));
      first = odd ? got : first;
      second = odd ? second : got;
      first_column = second_column = odd ? second_column : first_column;
    }
    const auto store_at = [&](u32 place, u32 at, uint4 value) {
      store_vector(place != kNowhere && (kWholeParts || at < kShape.hidden),
                   result_row(slot, place, kGeometry.row_bytes) + u64{at} * 2, value);
    };
    store_at(first_, first_column, first);
    store_at(second_, second_column, second);
  }

 private:
  static constexpr bool kWholeLines = kGeometry.world > 1;
  static constexpr u32 kNeighbour = 4;  // lanes further

  u32 first_;  // result_place()
  u32 second_;
};

/// A sigmoid of the first column of d, by which each token's shared result is weighted. Its
/// weights' rows lie in their own order in a stage, so this is d's first column, too.
template <u32 kRegisters>
inline void store_weights(const float (&d)[kRegisters], const Task& task, const Slot& slot) {
  float* weights = reinterpret_cast<float*>(slot.results[1]);
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const u32 row = tile_row(lower) + Machine::lane() / 4;
    if (Machine::lane() % 4 == 0 && row < task.rows) {
      weights[row] = 1.0F / (1.0F + expf(-d[2 * lower]));
    }
  }
}

/// Takes d, or activation(d) of a first product, to memory. Called by all consumer warps that have
/// products of the tile. Of a tile of no rows: does the same, and stores nothing.
template <u32 kRegisters>
inline void finish_tile(const float (&d)[kRegisters], const Task& task, const Slot& slot,
                        u32 part) {
  constexpr u32 kTile = 2 * kRegisters;     // columns
  constexpr u32 kGroup = kOrderedRows / 2;  // accumulators that are as many columns of two rows
  // Eight columns next to each other, of the values value(i) of pairs of accumulators.
  const auto eight_from = [](u32 i, auto value) {
    const auto packed = [&](u32 at) {
      const float2 pair = value(at);
      return Element::pack(pair.x, pair.y);
    };
    return make_uint4(packed(i), packed(i + 4), packed(i + 8), packed(i + 12));
  };
  const auto pair_of = [&](u32 i) { return make_float2(d[i], d[i + 1]); };
  if (task.kind == TaskKind::gemm1) {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const ResultRows rows(task, lower);
#pragma unroll
      for (u32 i = 2 * lower; i < kTile / 2; i += 2 * kGroup) {
        rows.store(slot, first_column(part, kTile, kShape.hidden) + i / kGroup * kOrderedRows,
                   eight_from(i, pair_of), eight_from(i + kGroup, pair_of));
      }
    }
    return;
  }
  if (weighs_tokens(task, part)) {
    store_weights(d, task, slot);
    return;
  }
  constexpr u32 kColumns = gemm0_columns(kTile);
  const u32 values = mlps_of(task).values;
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const u32 row = result_place(task, tile_row(lower) + Machine::lane() / 4);
    u8* to =
        result_row(slot, row, is_shared(task) ? kGeometry.shared_bytes : kGeometry.hidden_bytes);
    to += u64{mlp_of(task, part)} * values * 2;
#pragma unroll
    for (u32 i = 2 * lower; i < kColumns / 2; i += kGroup) {
      const u32 column = first_column_of(task, part) + ordered_column(i);
      store_vector(row != kNowhere && (kWholeParts || column < values), to + u64{column} * 2,
                   eight_from(i, [&](u32 at) {
                     if constexpr (kShape.gated()) {
                       return gated<Element, kActivation>(pair_of(at),
                                                          pair_of(kRegisters / 2 + at));
                     } else {
                       return curve_of<Element, kActivation>(pair_of(at));
                     }
                   }));
    }
  }
}

}  // namespace moeos::sm90
