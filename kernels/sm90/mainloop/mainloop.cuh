// SPDX-License-Identifier: Apache-2.0
// The consumers' loop over the stages of a part: d += rows * weights^T.
//
// It meets the load warp only at the stages' barriers. Must not depend on: which product it
// computes; where results go.
#pragma once

#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// The major order of experts' weights in a stage.
inline constexpr Major kWeightsMajor = kTransposed ? Major::columns : Major::depth;

/// One K-step of 16 elements from a stage, whose rows and columns begin at `rows` and `columns`.
template <Major kOfColumns = Major::depth, u32 kRegisters>
inline void multiply(float (&d)[kRegisters], const u8* rows, const u8* columns, u32 k) {
  constexpr u32 kInstructionBytes = 32;  // 16 elements
  const u64 of_rows = matrix_descriptor(rows + k * kInstructionBytes);
  if constexpr (kOfColumns == Major::columns) {
    multiply_accumulate<MOEOS_FLOAT16, Major::depth, Major::columns>(
        d, of_rows, columns_descriptor(columns + k * kDepthStepBytes));
  } else {
    multiply_accumulate<MOEOS_FLOAT16>(d, of_rows,
                                       matrix_descriptor(columns + k * kInstructionBytes));
  }
}

/// The preparation of operands that land ready to be multiplied.
inline constexpr auto kAsLanded = [](const Stage&, u32) {};

/// One consumer warpgroup: runs over all steps of a part. prepare(stage, step) makes operands of
/// what has landed. issue(stage) adds a step's products to d, and its operands are released a step
/// later, when they have been used. `shared`: has the stages and their barriers.
template <u32 kRegisters, class Stages, class Prepare, class Issue>
inline void for_each_step(float (&d)[kRegisters], u32 steps, Stages& shared,
                          RingPosition<kStages>& stage, Prepare prepare, Issue issue) {
  u32 previous = 0;
  hold(d);
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    prepare(shared.stages[stage.index], step);
    wgmma_fence();
    issue(shared.stages[stage.index]);
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();  // the step before is done with its stage
      release_stage(shared, previous);
    }
    previous = stage.index;
  }
  wgmma_wait<0>();
  hold(d);
  if (steps > 0) {
    release_stage(shared, previous);
  }
}

/// d += the warpgroup's 64 rows of the tile times the part's weights, a whole tile's or half of
/// them.
template <u32 kRegisters, class Prepare>
inline void multiply_tile(float (&d)[kRegisters], u32 steps, u32 group, Shared& shared,
                          RingPosition<kStages>& stage, Prepare prepare) {
  for_each_step(d, steps, shared, stage, prepare, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      multiply<kWeightsMajor>(d, from.rows + group * kConsumerRows * kSwizzleBytes, from.weights,
                              k);
    }
  });
}

/// d += a narrow tile's 64 rows times its weights.
template <class Prepare>
inline void multiply_narrow(float (&d)[kNarrowColumns / 2], u32 steps, Shared& shared,
                            RingPosition<kStages>& stage, Prepare prepare) {
  for_each_step(d, steps, shared, stage, prepare, [&](const Stage& from) {
#pragma unroll
    for (u32 n = 0; n < kNarrowDepth; ++n) {
#pragma unroll
      for (u32 k = 0; k < kTileDepth / 16; ++k) {
        multiply<kWeightsMajor>(d, from.rows + n * kNarrowRows * kSwizzleBytes,
                                from.weights + n * kNarrowColumns * kSwizzleBytes, k);
      }
    }
  });
}

/// A warpgroup whose rows of the tile are empty: it prepares its share, and lets the stages pass.
template <class Prepare>
inline void skip_tile(u32 steps, Shared& shared, RingPosition<kStages>& stage, Prepare prepare) {
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    prepare(shared.stages[stage.index], step);
    release_stage(shared, stage.index);
  }
}

}  // namespace moeos::sm90
