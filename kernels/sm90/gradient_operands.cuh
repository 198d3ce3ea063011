// SPDX-License-Identifier: Apache-2.0
// Operands of a part of a call of gradients.
//
//   product  its rows are              its weights              over
//   first    gradients of the output   w2, a depth row a row    H
//            then x                    w1, gate and up rows     H
//   second   gradients of h, kept      w1, a depth row a row    its rows: kHalves * kKeptColumns
//
// May not know: what is made of them; where results go.
#pragma once

#include "kernels/sm90/boxes.cuh"
#include "kernels/sm90/gradient_arguments.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// Steps of the depth H, of which the first product takes two turns; and of the second product.
inline constexpr u32 kHiddenSteps = ceil_div(kShape.hidden, kTileDepth);
inline constexpr u32 kHalfSteps = kKeptColumns / kTileDepth;
inline constexpr u32 kSecondSteps = kHalves * kHalfSteps;

/// Boxes of weights in a step, at most, which the first lanes load; those behind load rows.
inline constexpr u32 kBoxColumns = kTileDepth;
inline constexpr u32 kGroupBoxes = kDepthRows / kDepthBoxRows;
inline constexpr u32 kWeightLanes = kTileColumns / kBoxColumns * kGroupBoxes;
inline constexpr u32 kValueBoxes = kValueColumns / kBoxColumns;
static_assert(kGeometry.segment_align == Geometry::kSegmentAlign &&
              kWeightLanes + padded_boxes(kTileRows) <= Machine::kLanes);
static_assert(kValueBoxes + kHalves <= kWeightLanes);

/// This lane's box of rows: from a cell in a first product, else from kept rows.
inline Box find_gradient_rows(const GradientArguments& arguments, const Layout& layout,
                              const Task& task, u32 index) {
  const bool first = task.kind == TaskKind::gemm0;
  const auto& maps = first ? arguments.gradients.rows : arguments.gradients.d_hidden;
  Box box;
  u32 laid_out = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment segment = task.segments[s];
    const u32 rows = laid_out_rows(kGeometry, task, s, laid_out);
    const u32 boxes = Machine::count(rows);
    if (index < boxes) {
      const u32 row = first ? layout.row_index(segment.source, segment.first_row)
                            : first_kept(arguments, task, segment);
      cut_rows(maps, row, rows, laid_out * kSwizzleBytes, index, box);
    }
    index -= boxes;  // once found: beyond all that follow
    laid_out += rows;
  }
  return box;
}

/// What a lane loads in a step.
struct GradientBox {
  const TensorMap* map = nullptr;  // none: nothing
  u32 row = 0;
  u32 column = 0;
  u32 place = 0;  // in the stage
  bool ordered = false;
};

/// A box of weights in a step of the first product.
inline GradientBox first_weights(const GradientArguments& arguments, const Task& task, u32 part,
                                 u32 lane, u32 step) {
  const u32 first = part * kValueColumns;
  if (step < kHiddenSteps) {
    if (lane >= kValueBoxes) {
      return {};
    }
    return {&arguments.gradients.w2, task.local_expert * kShape.hidden + step * kDepthRows,
            first + lane * kBoxColumns, kWeightsPlace + lane * kColumnsBoxBytes, false};
  }
  if (lane >= kHalves) {
    return {};
  }
  return {&arguments.gradients.w1,
          task.local_expert * kShape.w1_rows() + lane * kShape.intermediate + first,
          (step - kHiddenSteps) * kTileDepth, kWeightsPlace + lane * kValueColumns * kSwizzleBytes,
          false};
}

/// And of the second one: rows of w1 in the order of kept columns.
inline GradientBox second_weights(const GradientArguments& arguments, const Task& task, u32 part,
                                  u32 lane, u32 step) {
  const u32 half = step / kHalfSteps;
  const u32 group = lane % kGroupBoxes * kDepthBoxRows;
  return {&arguments.gradients.w1_ordered,
          task.local_expert * kShape.w1_rows() + half * kShape.intermediate +
              (step - half * kHalfSteps) * kDepthRows + group,
          part * kTileColumns + lane / kGroupBoxes * kBoxColumns,
          kWeightsPlace + lane / kGroupBoxes * kColumnsBoxBytes + group * kSwizzleBytes, true};
}

/// Steps of a part; none of a tile of no rows.
inline u32 gradient_steps(const Task& task) {
  const u32 steps = task.kind == TaskKind::gemm0 ? 2 * kHiddenSteps : kSecondSteps;
  return task.padded_rows == 0 ? 0 : steps;
}

/// The load warp: a part's operands, step by step.
inline void load_tile(const RankArguments& given, const Layout& layout, const Task& task, u32 part,
                      Loader& loader) {
  const GradientArguments& arguments = of_gradients(given);
  const u32 lane = Machine::lane();
  const bool first = task.kind == TaskKind::gemm0;
  const u32 steps = gradient_steps(task);
  Box rows;
  if (lane >= kWeightLanes) {
    rows = find_gradient_rows(arguments, layout, task, lane - kWeightLanes);
  }
  for (u32 step = 0; step < steps; ++step, loader.advance()) {
    const bool of_d_out = first && step < kHiddenSteps;
    if (lane == 0) {
      if (steps - step == minimum(steps, kClaimSteps)) {
        loader.let_claim();
      }
      loader.wait();
      const u32 weight_rows =
          !first || !of_d_out ? (first ? kHalves * kValueColumns : kTileColumns) : kValueColumns;
      loader.full().arrive_expecting((task.padded_rows + weight_rows) * kSwizzleBytes);
    }
    __syncwarp();
    u8* const to = reinterpret_cast<u8*>(&loader.stage());
    if (lane >= kWeightLanes) {
      if (rows.map != nullptr) {
        const u32 column = first ? (of_d_out ? kShape.hidden + step * kTileDepth
                                             : (step - kHiddenSteps) * kTileDepth)
                                 : step * kTileDepth;
        load_box(*rows.map, to + rows.place, loader.full(), rows.row, column);
      }
      continue;
    }
    const GradientBox box = first ? first_weights(arguments, task, part, lane, step)
                                  : second_weights(arguments, task, part, lane, step);
    if (box.map == nullptr) {
      continue;
    }
    if (box.ordered) {
      load_weights(*box.map, to + box.place, loader.full(), box.row, box.column,
                   CachePolicy::normal);
    } else {
      load_box(*box.map, to + box.place, loader.full(), box.row, box.column);
    }
  }
}

}  // namespace moeos::sm90
