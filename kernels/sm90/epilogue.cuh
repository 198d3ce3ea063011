// Between accumulators and the staging memory: bias, activation, conversion.
//
// A wgmma accumulator d of a thread holds, for j in [0, 32): columns 8j + 2(lane % 4) + {0, 1} of
// row lane / 4 (d[4j], d[4j+1]) and of row lane / 4 + 8 (d[4j+2], d[4j+3]) of its warp's 16 rows.
// The store warp takes the staged rows to memory (stores.cuh), while the consumers are at the next
// part. May not know: whose row it is.
#pragma once

#include "kernels/sm90/activation.cuh"
#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/matrix.cuh"

namespace moeos::sm90 {

/// A consumer warpgroup's place in the hand-over of its staging memory.
using StagingPosition = RingPosition<1>;

/// Stages 64 rows of up to 128 columns: value(j, lower, i) is the result whose accumulator is
/// d[4j + 2 lower + i] of the first ones. Called by the 128 threads of a group; waits until the
/// store warp has taken what was staged before.
template <u32 kColumns, class Value>
inline void stage_results(Shared& shared, u32 group, StagingPosition& position, Value value) {
  static_assert(kColumns <= kStagingColumns && kColumns % 16 == 0);
  const u32 lane = threadIdx.x % 32;
  const u32 row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  u8* to = shared.staging[group] + row * kStagingStride;
  shared.staging_empty[group].wait(position.parity ^ 1);
#pragma unroll
  for (u32 j = 0; j < kColumns / 8; j += 2) {  // 16 rows of 16 columns a warp
    store_matrices(to + staging_place(row, j + lane / 16),
                   Element::pack(value(j, 0U, 0U), value(j, 0U, 1U)),
                   Element::pack(value(j, 1U, 0U), value(j, 1U, 1U)),
                   Element::pack(value(j + 1, 0U, 0U), value(j + 1, 0U, 1U)),
                   Element::pack(value(j + 1, 1U, 0U), value(j + 1, 1U, 1U)));
  }
  shared.staging_full[group].arrive();
  position.advance();
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

/// Stages d, or activation(d) of a first product, in runs of columns that the staging memory holds.
template <u32 kRegisters>
inline void finish_tile(const float (&d)[kRegisters], TaskKind kind, u32 group, Shared& shared,
                        StagingPosition& position) {
  constexpr u32 kTile = 2 * kRegisters;  // columns
  const auto stage_all = [&]<u32 kColumns>(auto value) {
    constexpr u32 kRun = minimum(kColumns, kStagingColumns);
#pragma unroll
    for (u32 first = 0; first < kColumns; first += kRun) {
      stage_results<kRun>(shared, group, position, [&](u32 j, u32 lower, u32 i) {
        return value(first / 2 + 4 * j + 2 * lower + i);
      });
    }
  };
  if (kind == TaskKind::gemm1) {
    stage_all.template operator()<kTile>([&](u32 i) { return d[i]; });
  } else {
    stage_all.template operator()<gemm0_columns(kTile)>([&](u32 i) {
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
