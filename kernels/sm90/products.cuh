// Loads and products of one tile: load_tile() brings K-steps into the stages, multiply_tile()
// consumes them.
//
// The two run in different warps and meet only at the stages' barriers. May not know: where results
// go.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// Stages that a task's products take: the row length of its inputs.
inline u32 steps_of(TaskKind kind) {
  if (kind == TaskKind::route) {
    return ceil_div(kShape.hidden, kRouteDepth * kTileDepth);
  }
  return ceil_div(kind == TaskKind::gemm1 ? kShape.intermediate : kShape.hidden, kTileDepth);
}

inline bool multiplies(TaskKind kind) {
  return kind == TaskKind::gemm0 || kind == TaskKind::gemm1 || kind == TaskKind::route;
}

/// Loads `rows` rows (a multiple of 8) from row `first` on, in as few boxes as possible.
inline void load_rows(const TensorMap (&maps)[kBoxes], u8* destination, Barrier& full, u32 first,
                      u32 rows, u32 column) {
  for (u32 box = 0; box < kBoxes; ++box) {
    while (rows >= kBoxRows[box]) {
      load_box(maps[box], destination, full, first, column);
      first += kBoxRows[box];
      rows -= kBoxRows[box];
      destination += kBoxRows[box] * kSwizzleBytes;
    }
  }
}

/// The load warp: fills the stages with a part's operands, step by step. One lane does it; all keep
/// the position.
inline void load_tile(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 part, Shared& shared, RingPosition<kStages>& stage) {
  const u32 steps = steps_of(task.kind);
  constexpr u32 kHalf = kTileColumns / 2;
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    if (Machine::lane() != 0) {
      continue;
    }
    shared.stage_empty[stage.index].wait(stage.parity ^ 1);
    Barrier& full = shared.stage_full[stage.index];
    Stage& to = shared.stages[stage.index];
    const u32 column = step * kTileDepth;
    if (task.kind == TaskKind::route) {
      full.arrive_expecting(kRouteDepth * (kRouteTokens + kRouteColumns) * kSwizzleBytes);
      for (u32 n = 0; n < kRouteDepth; ++n) {
        const u32 at = (step * kRouteDepth + n) * kTileDepth;
        load_box(arguments.x, to.rows + n * kRouteTokens * kSwizzleBytes, full, part * kRouteTokens,
                 at);
        load_box(arguments.gate, to.weights + n * kRouteColumns * kSwizzleBytes, full, 0, at);
      }
      continue;
    }
    full.arrive_expecting(task.padded_rows * kSwizzleBytes + kStageColumnsBytes);
    if (task.kind == TaskKind::gemm0) {
      u8* rows = to.rows;
      for (u32 s = 0; s < task.segment_count; ++s) {
        const Segment segment = task.segments[s];
        const u32 padded = align_up(u32{segment.rows}, Geometry::kSegmentAlign);
        load_rows(arguments.cells, rows, full,
                  layout.cell_index(segment.source, Round::dispatch, Buffer::arrival) *
                          layout.geometry().cell_rows() +
                      segment.first_row,
                  padded, column);
        rows += padded * kSwizzleBytes;
      }
      const u32 weight = task.local_expert * kShape.w1_rows() + part * kGemm0Columns;
      load_box(arguments.w1, to.weights, full, weight, column);
      load_box(arguments.w1, to.weights + kHalf * kSwizzleBytes, full,
               weight + (kShape.gated() ? kShape.intermediate : kHalf), column);
    } else {
      load_rows(arguments.intermediate, to.rows, full, task.first_result, task.padded_rows, column);
      const u32 weight = task.local_expert * kShape.hidden + part * kTileColumns;
      load_box(arguments.w2, to.weights, full, weight, column);
      load_box(arguments.w2, to.weights + kHalf * kSwizzleBytes, full, weight + kHalf, column);
    }
  }
}

/// One K-step of 16 elements out of a stage, whose rows and columns begin at `rows` and `columns`.
template <u32 kRegisters>
inline void multiply(float (&d)[kRegisters], const u8* rows, const u8* columns, u32 k) {
  constexpr u32 kInstructionBytes = 32;  // 16 elements
  multiply_accumulate<MOEOS_FLOAT16>(d, matrix_descriptor(rows + k * kInstructionBytes),
                                     matrix_descriptor(columns + k * kInstructionBytes));
}

/// One consumer warpgroup: runs over all steps of a part; issue(stage) adds a step's products
/// to d, and its operands are released a step later, when they have been used.
template <u32 kRegisters, class Issue>
inline void for_each_step(float (&d)[kRegisters], u32 steps, Shared& shared,
                          RingPosition<kStages>& stage, Issue issue) {
  const bool elected = threadIdx.x % 128 == 0;
  u32 previous = 0;
  hold(d);
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    wgmma_fence();
    issue(shared.stages[stage.index]);
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();  // the step before is done with its stage
      if (elected) {
        shared.stage_empty[previous].arrive();
      }
    }
    previous = stage.index;
  }
  wgmma_wait<0>();
  hold(d);
  if (elected) {
    shared.stage_empty[previous].arrive();
  }
}

/// d += the warpgroup's 64 rows of the tile times the tile's weights.
inline void multiply_tile(float (&d)[128], u32 steps, u32 group, Shared& shared,
                          RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      multiply(d, from.rows + group * kConsumerRows * kSwizzleBytes, from.weights, k);
    }
  });
}

/// A warpgroup whose 64 rows of the tile are empty: it only lets the stages pass.
inline void skip_tile(u32 steps, Shared& shared, RingPosition<kStages>& stage) {
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    if (threadIdx.x % 128 == 0) {
      shared.stage_empty[stage.index].arrive();
    }
  }
}

/// d += a block's 64 tokens times the router's weights, over this warpgroup's half of the depth.
inline void multiply_logits(float (&d)[kRouteColumns / 2], u32 steps, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  constexpr u32 kInstructions = kTileDepth / 16;
  constexpr u32 kShare = kRouteDepth * kInstructions / kConsumers;
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kShare; ++k) {
      const u32 n = (group * kShare + k) / kInstructions;
      multiply(d, from.rows + n * kRouteTokens * kSwizzleBytes,
               from.weights + n * kRouteColumns * kSwizzleBytes,
               (group * kShare + k) % kInstructions);
    }
  });
}

}  // namespace moeos::sm90
