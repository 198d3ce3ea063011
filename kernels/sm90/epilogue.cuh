// From accumulators to the staging memory: bias, activation, conversion.
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

/// Stages 64 rows of 128 columns: value(j, lower, i) is the result whose accumulator is
/// d[4j + 2 lower + i] of the first 64. Called by the 128 threads of a group; waits until the store
/// warp has taken what was staged before.
template <class Value>
inline void stage_results(Shared& shared, u32 group, StagingPosition& position, Value value) {
  const u32 lane = threadIdx.x % 32;
  const u32 row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  u8* to = shared.staging[group] + row * kStagingStride + lane / 16 * 16;
  shared.staging_empty[group].wait(position.parity ^ 1);
#pragma unroll
  for (u32 j = 0; j < kStagingColumns / 8; j += 2) {  // 16 rows of 16 columns a warp
    store_matrices(to + j * 16, Element::pack(value(j, 0U, 0U), value(j, 0U, 1U)),
                   Element::pack(value(j, 1U, 0U), value(j, 1U, 1U)),
                   Element::pack(value(j + 1, 0U, 0U), value(j + 1, 0U, 1U)),
                   Element::pack(value(j + 1, 1U, 0U), value(j + 1, 1U, 1U)));
  }
  // The store warp's TMA reads through the async proxy what was written here.
  fence_proxy_async_shared();
  shared.staging_full[group].arrive();
  position.advance();
}

inline float bias_at(const u8* bias, u64 index, bool exists) {
  if constexpr (kBias) {
    return exists ? element_at<Element>(bias, index) : 0.0F;
  } else {
    return 0.0F;
  }
}

/// First product: activation(d + b1), 128 (gated) or 256 columns.
inline void finish_gemm0(float (&d)[128], const RankArguments& arguments, const Task& task,
                         u32 part, u32 group, Shared& shared, StagingPosition& position) {
  const u32 first = part * kGemm0Columns + 2 * (threadIdx.x % 4);
  const u64 bias_row = u64{task.local_expert} * kShape.w1_rows();
#pragma unroll
  for (u32 half = 0; half < kGemm0Columns / kStagingColumns; ++half) {
    stage_results(shared, group, position, [&](u32 j, u32 lower, u32 i) {
      const u32 unit = first + half * kStagingColumns + 8 * j + i;
      const bool exists = unit < kShape.intermediate;
      const u32 at = 4 * j + 2 * lower + i;
      const float value = d[64 * half + at] + bias_at(arguments.b1, bias_row + unit, exists);
      if constexpr (kShape.gated()) {
        const float up =
            d[64 + at] + bias_at(arguments.b1, bias_row + kShape.intermediate + unit, exists);
        return swiglu < kShape.swiglu_limit<kInfinity>(value, up, kShape.swiglu_limit);
      } else {
        return activate<kShape.activation>(value);
      }
    });
  }
}

/// Second product: d + b2, 256 columns in two halves.
inline void finish_gemm1(float (&d)[128], const RankArguments& arguments, const Task& task,
                         u32 part, u32 group, Shared& shared, StagingPosition& position) {
  const u32 first = part * kTileColumns + 2 * (threadIdx.x % 4);
  const u64 bias_row = u64{task.local_expert} * kShape.hidden;
#pragma unroll
  for (u32 half = 0; half < kTileColumns / kStagingColumns; ++half) {
    stage_results(shared, group, position, [&](u32 j, u32 lower, u32 i) {
      const u32 unit = first + half * kStagingColumns + 8 * j + i;
      return d[64 * half + 4 * j + 2 * lower + i] +
             bias_at(arguments.b2, bias_row + unit, unit < kShape.hidden);
    });
  }
}

}  // namespace moeos::sm90
