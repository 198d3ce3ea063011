// Loads and products of one part: load_tile() and load_route() bring steps of the depth into the
// stages, multiply_tile() and multiply_logits() consume them.
//
// The two run in different warps and meet only at the stages' barriers. May not know: where results
// go.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// Stages that a GEMM part takes: the row length of its inputs.
inline u32 steps_of(const Task& task) {
  const u32 depth = kGeometry.narrow(task.padded_rows) ? kNarrowDepth * kTileDepth : kTileDepth;
  return ceil_div(task.kind == TaskKind::gemm1 ? kShape.intermediate : kShape.hidden, depth);
}
inline constexpr u32 kRouteSteps = ceil_div(kShape.hidden, kRouteDepth* kTileDepth);

/// Columns of its GEMM's result that a part computes.
inline u32 columns_of(const Task& task) {
  const u32 tile = kGeometry.narrow(task.padded_rows) ? kNarrowColumns : kTileColumns;
  return task.kind == TaskKind::gemm0 ? gemm0_columns(tile) : tile;
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

/// A tile's rows over one step of the depth: segments of cells, or what the first product left.
inline void load_tile_rows(const RankArguments& arguments, const Layout& layout, const Task& task,
                           u8* destination, Barrier& full, u32 column) {
  if (task.kind == TaskKind::gemm1) {
    load_rows(arguments.intermediate, destination, full, task.first_result, task.padded_rows,
              column);
    return;
  }
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment segment = task.segments[s];
    const u32 padded = align_up(u32{segment.rows}, Geometry::kSegmentAlign);
    load_rows(arguments.cells, destination, full,
              layout.cell_index(segment.source, Round::dispatch, Buffer::arrival) *
                      layout.geometry().cell_rows() +
                  segment.first_row,
              padded, column);
    destination += padded * kSwizzleBytes;
  }
}

/// A part's weights over one step of the depth. A gated part's gate rows come before its up rows.
inline void load_tile_weights(const RankArguments& arguments, const Task& task, u32 part,
                              u8* destination, Barrier& full, u32 column) {
  const u32 columns = columns_of(task);
  if (task.kind == TaskKind::gemm0 && kShape.gated()) {
    const TensorMap& map = kGeometry.narrow(task.padded_rows) ? arguments.w1_narrow : arguments.w1;
    const u32 gate = task.local_expert * kShape.w1_rows() + part * columns;
    load_box(map, destination, full, gate, column);
    load_box(map, destination + columns * kSwizzleBytes, full, gate + kShape.intermediate, column);
    return;
  }
  const TensorMap& map = task.kind == TaskKind::gemm0 ? arguments.w1 : arguments.w2;
  const u32 of_expert = task.kind == TaskKind::gemm0 ? kShape.w1_rows() : kShape.hidden;
  const u32 first = task.local_expert * of_expert + part * columns;
  for (u32 n = 0; n < columns; n += kWeightBoxRows) {
    load_box(map, destination + n * kSwizzleBytes, full, first + n, column);
  }
}

/// The load warp: fills the stages with a part's operands. One lane does it; all keep the position.
/// load(stage, full, step) begins the loads of one stage, of `bytes` bytes.
template <class Load>
inline void fill_stages(u32 steps, u32 bytes, Loader& loader, Load load) {
  for (u32 step = 0; step < steps; ++step, loader.advance()) {
    if (Machine::lane() == 0) {
      loader.wait();
      loader.full().arrive_expecting(bytes);
      load(loader.stage(), loader.full(), step);
    }
  }
}

/// A GEMM part's operands.
inline void load_tile(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 part, Loader& loader) {
  const bool narrow = kGeometry.narrow(task.padded_rows);
  const u32 depth = narrow ? kNarrowDepth : 1;
  const u32 columns = narrow ? kNarrowColumns : kTileColumns;
  const u32 bytes = depth * (task.padded_rows + columns) * kSwizzleBytes;
  fill_stages(steps_of(task), bytes, loader, [&](Stage& to, Barrier& full, u32 step) {
    for (u32 n = 0; n < depth; ++n) {
      const u32 column = (step * depth + n) * kTileDepth;  // beyond the matrix: zeros
      load_tile_rows(arguments, layout, task, to.rows + n * kNarrowRows * kSwizzleBytes, full,
                     column);
      load_tile_weights(arguments, task, part, to.weights + n * columns * kSwizzleBytes, full,
                        column);
    }
  });
}

/// A Route part's operands: tokens, and the router's weights.
inline void load_route(const RankArguments& arguments, u32 part, Loader& loader) {
  constexpr u32 kBytes = kRouteDepth * (kRouteTokens + kRouteColumns) * kSwizzleBytes;
  fill_stages(kRouteSteps, kBytes, loader, [&](Stage& to, Barrier& full, u32 step) {
    for (u32 n = 0; n < kRouteDepth; ++n) {
      const u32 column = (step * kRouteDepth + n) * kTileDepth;
      load_box(arguments.x, to.rows + n * kRouteTokens * kSwizzleBytes, full, part * kRouteTokens,
               column);
      load_box(arguments.gate, to.weights + n * kRouteColumns * kSwizzleBytes, full, 0, column);
    }
  });
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
  u32 previous = 0;
  hold(d);
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
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
  release_stage(shared, previous);
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

/// d += a narrow tile's 64 rows times its weights.
inline void multiply_tile(float (&d)[64], u32 steps, Shared& shared, RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 n = 0; n < kNarrowDepth; ++n) {
#pragma unroll
      for (u32 k = 0; k < kTileDepth / 16; ++k) {
        multiply(d, from.rows + n * kNarrowRows * kSwizzleBytes,
                 from.weights + n * kNarrowColumns * kSwizzleBytes, k);
      }
    }
  });
}

/// A warpgroup whose rows of the tile are empty: it only lets the stages pass.
inline void skip_tile(u32 steps, Shared& shared, RingPosition<kStages>& stage) {
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    release_stage(shared, stage.index);
  }
}

/// d += a block's 64 tokens times the router's weights, over this warpgroup's half of the depth.
inline void multiply_logits(float (&d)[kRouteColumns / 2], u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  constexpr u32 kInstructions = kTileDepth / 16;
  constexpr u32 kShare = kRouteDepth * kInstructions / kConsumers;
  for_each_step(d, kRouteSteps, shared, stage, [&](const Stage& from) {
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
