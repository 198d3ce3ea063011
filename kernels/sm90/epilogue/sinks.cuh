// SPDX-License-Identifier: Apache-2.0
// Where a part's results go, and how: rows between two products, the owners' results, this rank's
// own results, and the weights of shared results.
//
// Must not depend on: how results are computed; the owner of a row; flags.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/operands/gathered_rows.cuh"
#include "kernels/sm90/ptx/store.cuh"
#include "runtime/rows/packet.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

/// The fetch warp: finds where the rows of each of a tile's segments go, in the buffer between the
/// products or among their owners' results.
inline void find_results(const RankArguments& arguments, const Rank<Machine>& rank,
                         const Task& task, Slot& slot) {
  const u32 lane = Machine::lane();
  if (task.kind == kSecondProduct.kind && lane < task.segment_count) {
    slot.results[lane] =
        outgoing_results(rank_of_results(arguments, rank), task, task.segments[lane]);
  } else if (task.kind == kFirstProduct.kind && lane == 0) {
    slot.results[0] = arguments.intermediate_rows;
    if constexpr (kPairsBetween) {
      const u32* pairs = is_shared(task) ? nullptr : pairs_of_tile(rank_of_look(arguments), task);
      slot.results[1] = reinterpret_cast<u8*>(const_cast<u32*>(pairs));
    } else {
      slot.results[0] += u64{task.first_result} * kGeometry.hidden_bytes;
    }
    if (product_of(task).line.sink == Sink::tokens_between) {
      slot.results[0] = arguments.intermediate_rows + kGeometry.shared_between_at() +
                        u64{task.first_result} * kGeometry.shared_bytes;
      slot.results[1] = reinterpret_cast<u8*>(&rank.memory.shared_weight[task.first_result]);
    }
  }
}

/// Where a row of a tile's result goes, as a number: its segment, and its row there; kNowhere: it
/// is padding. For GEMM0 all rows are one segment, and padding is stored, too: GEMM1 reads it, and
/// must not read uninitialised memory.
inline constexpr u32 kNowhere = 0xFFFF;
static_assert(Geometry::kMaxSegments * kTileRows < kNowhere);
inline u32 result_place(const Task& task, u32 row) {
  const Sink sink = product_of(task).line.sink;
  if (sink == Sink::between || sink == Sink::tokens_between) {
    const u32 rows =
        sink == Sink::tokens_between ? align_up(task.padded_rows, kTokenBoxRows) : task.padded_rows;
    return row < rows ? row : kNowhere;
  }
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    if (row >= first && row < first + task.segments[s].rows) {
      return s * kTileRows + (row - first);
    }
    first += MOEOS_PLANTED(segments_results_lie_apart) ? align_up(u32{task.segments[s].rows}, 8U)
                                                       : laid_out_rows(kGeometry, task, s, first);
  }
  return kNowhere;
}
/// The row as an address; for kNowhere an address that is never stored to.
inline u8* result_row(const Slot& slot, u32 place, u32 row_bytes) {
  return slot.results[place / kTileRows % Geometry::kMaxSegments] +
         u64{place % kTileRows} * row_bytes;
}

/// A row of GEMM0 between the products: where it lies, and whether it is stored.
struct RowBetween {
  u8* to;
  bool stored;
};
inline RowBetween row_between(const Task& task, const Slot& slot, u32 row, u32 row_bytes) {
  if constexpr (kPairsBetween) {
    if (!is_shared(task)) {
      const bool there = row < task.rows;
      const u32 pair = there ? reinterpret_cast<const u32*>(slot.results[1])[row] : 0;
      return {slot.results[0] + u64{place_between(pair)} * kGeometry.hidden_bytes, there};
    }
  }
  const u32 place = result_place(task, row);
  return {result_row(slot, place, row_bytes), place != kNowhere};
}

/// Rows of GEMM1's results that a thread stores for one half of its accumulators. In a world of one
/// rank: the accumulators' own row. Where results go over links: this row and its neighbour's, in
/// the lane with the next or the previous row. Two such lanes exchange halves, so that eight lanes
/// together store 128 bytes of one row, a cache line: links carry that faster than 64 bytes of each
/// of two rows.
class ResultRows {
 public:
  ResultRows(const Task& task, u32 lower) {
    const u32 own = tile_row(lower) + Machine::lane() / 4;
    first_ = result_place(task, kWholeLines ? own & ~1U : own);
    second_ = kWholeLines ? result_place(task, own | 1U) : first_;
    if constexpr (kWholeLines) {
      __syncwarp();  // lanes that have diverged above would be slow to exchange
    }
  }

  /// Stores this thread's results: eight columns from `column`, a multiple of 2 kOrderedRows, plus
  /// ordered_column(0) on, and eight kOrderedRows further; or what it gets in exchange. By a whole
  /// warp.
  void store(const Slot& slot, u32 column, uint4 first, uint4 second) const {
    store_halves<kOrderedRows, 2, kGeometry.row_bytes>(slot, column + ordered_column(0), first,
                                                       second);
  }

  /// Stores the codes of a group, of which a thread has eight columns in each 32, next to those of
  /// three lanes. Two lanes first exchange halves, so that each has 16 adjacent columns.
  void store_codes(const Slot& slot, u32 column, const uint2 (&codes)[4]) const {
    const u32 odd = Machine::lane() % 2;
    uint4 both[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const uint2 even = codes[2 * half];
      const uint2 next = codes[2 * half + 1];
      const uint2 got = make_uint2(__shfl_xor_sync(~0U, odd != 0 ? even.x : next.x, 1U),
                                   __shfl_xor_sync(~0U, odd != 0 ? even.y : next.y, 1U));
      both[half] = odd != 0 ? make_uint4(got.x, got.y, next.x, next.y)
                            : make_uint4(even.x, even.y, got.x, got.y);
    }
    store_halves<2 * kOrderedRows, 1, kGeometry.returned_bytes>(
        slot, column + kOrderedRows * odd + Machine::lane() % 4 / 2 * 16, both[0], both[1]);
  }

  /// Stores the scale of those codes.
  void store_scale(const Slot& slot, u32 column, float scale) const {
    const u32 place = kWholeLines && has_odd_row() ? second_ : first_;
    store_number(place != kNowhere && Machine::lane() % 4 == 0,
                 result_row(slot, place, kGeometry.returned_bytes) + kShape.hidden +
                     column / kResultGroup * sizeof(float),
                 scale);
  }

 private:
  static constexpr bool kWholeLines = kGeometry.world > 1;
  static constexpr u32 kNeighbour = 4;  // lanes further

  static bool has_odd_row() { return (Machine::lane() & kNeighbour) != 0; }

  /// Stores 16 bytes from `first_column` on, and 16 that lie kApart columns further, or what is
  /// exchanged for them. kSize: bytes of a column.
  template <u32 kApart, u32 kSize, u32 kRowBytes>
  void store_halves(const Slot& slot, u32 first_column, uint4 first, uint4 second) const {
    u32 second_column = first_column + kApart;
    if constexpr (kWholeLines) {
      const bool odd = has_odd_row();
      const auto exchanged = [](u32 value) { return __shfl_xor_sync(~0U, value, kNeighbour); };
      const uint4 sent = odd != MOEOS_PLANTED(neighbours_keep_their_halves) ? first : second;
      const uint4 got =
          make_uint4(exchanged(sent.x), exchanged(sent.y), exchanged(sent.z), exchanged(sent.w));
      first = odd ? got : first;
      second = odd ? second : got;
      first_column = second_column = odd ? second_column : first_column;
    }
    const auto store_at = [&](u32 place, u32 at, uint4 value) {
      store_vector(place != kNowhere && (kWholeParts || at < kShape.hidden),
                   result_row(slot, place, kRowBytes) + u64{at} * kSize, value);
    };
    store_at(first_, first_column, first);
    store_at(second_, second_column, second);
  }

  u32 first_;  // result_place()
  u32 second_;
};

/// Stores a sigmoid of the first column of d, by which each token's shared result is weighted. The
/// gate's rows lie in their own order in a stage, and its first row is d's first column, too.
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

}  // namespace moeos::sm90
