// From accumulators to rows in memory: bias, activation, conversion, and the results' way out.
//
// A wgmma accumulator d of a thread holds, for j in [0, 32): columns 8j + 2(lane % 4) + {0, 1} of
// row lane / 4 (d[4j], d[4j+1]) and of row lane / 4 + 8 (d[4j+2], d[4j+3]) of its warp's 16 rows.
// Each warp turns its 16 rows the right way round in shared memory of its own, and stores them from
// there in runs of 16 bytes a lane: such stores are done as soon as they are issued, and no other
// warp is waited for. May not know: who owns a row; flags.
#pragma once

#include "kernels/sm90/activation.cuh"
#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/ptx/matrix.cuh"
#include "runtime/packet.hpp"

namespace moeos::sm90 {

/// The fetch warp: where the rows of each of a tile's segments go, in the intermediate buffer or in
/// their owners' combine cells.
inline void find_results(const RankArguments& arguments, const Rank<Machine>& rank,
                         const Task& task, Slot& slot) {
  const u32 lane = Machine::lane();
  if (task.kind == TaskKind::gemm1 && lane < task.segment_count) {
    const Segment segment = task.segments[lane];
    slot.results[lane] = outgoing_row(rank, segment.source, Round::combine, segment.first_row);
  } else if (task.kind == TaskKind::gemm0 && lane == 0) {
    slot.results[0] = arguments.intermediate_rows + u64{task.first_result} * kGeometry.hidden_bytes;
  }
}

/// Where a row of the tile's result goes; null: nowhere, it is padding.
inline u8* result_row(const Task& task, const Slot& slot, u32 row) {
  if (task.kind == TaskKind::gemm0) {
    // Padding rows too: the second product reads them, and must not read uninitialised memory.
    return row < task.padded_rows ? slot.results[0] + u64{row} * kGeometry.hidden_bytes : nullptr;
  }
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    if (row >= first && row < first + task.segments[s].rows) {
      return slot.results[s] + u64{row - first} * kGeometry.row_bytes;
    }
    first += laid_out_rows(kGeometry, task, s, first);
  }
  return nullptr;
}

/// Turns 16 rows of `kColumns` columns round: value(j, lower, i) is the result whose accumulator is
/// d[4j + 2 lower + i] of the first ones. One warp, in its own staging memory.
template <u32 kColumns, class Value>
inline void stage_rows(u8* staging, Value value) {
  static_assert(kColumns <= kStagingColumns && kColumns % 16 == 0);
  const u32 lane = threadIdx.x % 32;
  const u32 row = lane % 16;
  u8* to = staging + row * kStagingStride;
#pragma unroll
  for (u32 j = 0; j < kColumns / 8; j += 2) {  // 16 rows of 16 columns
    store_matrices(to + staging_place(row, j + lane / 16),
                   Element::pack(value(j, 0U, 0U), value(j, 0U, 1U)),
                   Element::pack(value(j, 1U, 0U), value(j, 1U, 1U)),
                   Element::pack(value(j + 1, 0U, 0U), value(j + 1, 0U, 1U)),
                   Element::pack(value(j + 1, 1U, 0U), value(j + 1, 1U, 1U)));
  }
}

/// Copies `columns` of the `kColumns` staged columns to column `first` of the rows whose addresses
/// the first 16 lanes hold.
template <u32 kColumns>
inline void copy_rows(const u8* staging, u8* row, u32 first, u32 columns) {
  constexpr u32 kVectors = kColumns * 2 / kStagingPiece;
  constexpr u32 kRowsAtOnce = Machine::kLanes / kVectors;
  const u32 turn = Machine::lane() / kVectors;
  const u32 vector = Machine::lane() % kVectors;
  const bool exists = vector * (kStagingPiece / 2) < columns;
#pragma unroll
  for (u32 i = 0; i < kStagingRows; i += kRowsAtOnce) {
    const u64 to = Machine::broadcast(reinterpret_cast<u64>(row), i + turn);
    if (to != 0 && exists) {
      *reinterpret_cast<uint4*>(to + u64{first} * 2 + vector * kStagingPiece) =
          *reinterpret_cast<const uint4*>(staging + (i + turn) * kStagingStride +
                                          staging_place(i + turn, vector));
    }
  }
}

/// What a thread's accumulators start from: the biases of its columns, or zeros. So the epilogue
/// has nothing to load, and no value is live from one part to the next.
template <u32 kRegisters>
inline void start_accumulators(float (&d)[kRegisters], const RankArguments& arguments,
                               const Task& task, u32 part) {
  constexpr u32 kTile = 2 * kRegisters;  // columns
  const bool first_product = task.kind == TaskKind::gemm0;
  const bool gated = first_product && kShape.gated();
  const u32 columns = first_product ? kShape.intermediate : kShape.hidden;
  const u32 first = part * (first_product ? gemm0_columns(kTile) : kTile) + 2 * (threadIdx.x % 4);
  const u64 row = u64{task.local_expert} * (first_product ? kShape.w1_rows() : kShape.hidden);
  const u32 second_half = gated ? kShape.intermediate : kTile / 2;
#pragma unroll
  for (u32 i = 0; i < kRegisters; i += 4) {
    float values[2] = {};
    if constexpr (kBias) {
      const u32 column = first + 2 * (i % (kRegisters / 2));  // 8 further for every 4 registers
      // A gated tile's second half has the up columns of the same hidden units.
      const u32 at = column + (i < kRegisters / 2 ? 0 : second_half);
      const u8* bias = first_product ? arguments.b1 : arguments.b2;
      if ((gated ? column : at) < columns) {
        const u32 pair = reinterpret_cast<const u32*>(bias)[(row + at) / 2];
        values[0] = Element::low(pair);
        values[1] = Element::high(pair);
      }
    }
    d[i] = d[i + 2] = values[0];
    d[i + 1] = d[i + 3] = values[1];
  }
}

/// Takes d, or activation(d) of a first product, to memory, in runs of columns that the staging
/// memory holds. Called by all consumer warps that have products of the tile. Of a tile of no rows:
/// does the same, and stores nothing.
template <u32 kRegisters>
inline void finish_tile(const float (&d)[kRegisters], const Task& task, const Slot& slot, u32 part,
                        Shared& shared) {
  constexpr u32 kTile = 2 * kRegisters;  // columns
  const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
  u8* staging = shared.staging[warp];
  u8* row = result_row(task, slot, warp * kStagingRows + Machine::lane() % kStagingRows);
  if (task.padded_rows != 0 && Machine::ballot(row != nullptr) == 0) {
    return;
  }
  const auto finish_all = [&]<u32 kColumns>(u32 columns, auto value) {
    constexpr u32 kRun = minimum(kColumns, kStagingColumns);
#pragma unroll
    for (u32 first = 0; first < kColumns; first += kRun) {
      stage_rows<kRun>(staging, [&](u32 j, u32 lower, u32 i) {
        return value(first / 2 + 4 * j + 2 * lower + i);
      });
      __syncwarp();
      const u32 column = part * kColumns + first;
      copy_rows<kRun>(staging, row, column, column < columns ? columns - column : 0);
      __syncwarp();  // all lanes have read what the next run overwrites
    }
  };
  if (task.kind == TaskKind::gemm1) {
    finish_all.template operator()<kTile>(kShape.hidden, [&](u32 i) { return d[i]; });
  } else {
    finish_all.template operator()<gemm0_columns(kTile)>(kShape.intermediate, [&](u32 i) {
      if constexpr (kShape.gated()) {
        constexpr bool kLimited = kShape.swiglu_limit < kInfinity;
        return swiglu<kLimited>(d[i], d[kRegisters / 2 + i], kShape.swiglu_limit);
      } else {
        return activate<kShape.activation>(d[i]);
      }
    });
  }
}

}  // namespace moeos::sm90
