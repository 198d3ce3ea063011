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

/// Depth of a task's products: the row length of its inputs.
inline u32 steps_of(TaskKind kind) {
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

/// One lane: fills the stages with a part's operands, step by step.
inline void load_tile(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 part, Shared& shared, RingPosition<kStages>& stage) {
  const u32 steps = steps_of(task.kind);
  constexpr u32 kHalf = kTileColumns / 2;
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_empty[stage.index].wait(stage.parity ^ 1);
    Barrier& full = shared.stage_full[stage.index];
    Stage& to = shared.stages[stage.index];
    const u32 column = step * kTileDepth;
    if (task.kind == TaskKind::route) {
      full.arrive_expecting(kTileRows * kSwizzleBytes + kStageColumnsBytes);
      load_box(arguments.x, to.rows, full, part * kTileRows, column);
      load_box(arguments.gate, to.weights, full, 0, column);
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

inline void multiply(float (&d)[128], u64 a, u64 b, bool first) {
  if constexpr (MOEOS_FLOAT16) {
    wgmma_float16(d, a, b, first);
  } else {
    wgmma_bfloat16(d, a, b, first);
  }
}

/// One consumer warpgroup: d = its 64 rows times the tile's weights, over all steps.
inline void multiply_tile(float (&d)[128], u32 steps, u32 group, Shared& shared,
                          RingPosition<kStages>& stage) {
  constexpr u32 kInstructionBytes = 32;  // 16 elements along K
  const bool elected = threadIdx.x % 128 == 0;
  u32 previous = 0;
  hold(d);
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    const Stage& from = shared.stages[stage.index];
    wgmma_fence();
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      const u64 a = matrix_descriptor(from.rows + group * kConsumerRows * kSwizzleBytes +
                                      k * kInstructionBytes);
      const u64 b = matrix_descriptor(from.weights + k * kInstructionBytes);
      multiply(d, a, b, step == 0 && k == 0);
    }
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

}  // namespace moeos::sm90
