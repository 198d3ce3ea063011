// SPDX-License-Identifier: Apache-2.0
// Operands of a part of a call of gradients.
//
//   product  its rows are              its weights              over
//   first    gradients of the output   w2, a depth row a row    H
//            then x                    w1, gate and up rows     H; no turn where h is saved
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
static_assert(kValueBoxes <= kWeightLanes && kHalves <= kWeightLanes);
// What the host has made of the parts' columns.
static_assert(kGeometry.product0_parts == ceil_div(kShape.intermediate, kValueColumns) &&
              kGeometry.product1_parts == ceil_div(kShape.hidden, kTileColumns));

/// This lane's box of rows: from a cell in a first product, else from kept rows.
inline Box find_gradient_rows(const GradientArguments& arguments, const Layout& layout,
                              const Task& task, u32 index) {
  const bool first = task.kind == TaskKind::product0;
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

/// Boxes of weights of the first product over gradients of the output: depth rows, and so many
/// columns from `first` on.
inline Box find_w2(const GradientArguments& arguments, const Task& task, u32 first, u32 columns,
                   u32 lane) {
  Box box;
  if (lane * kBoxColumns < columns) {
    box.map = &arguments.gradients.w2;
    box.row = task.local_expert * kShape.hidden;
    box.column = first + lane * kBoxColumns;
    box.place = kWeightsPlace + lane * kColumnsBoxBytes;
  }
  return box;
}
/// And over x: gate rows, and up rows, of a turn's columns.
inline Box find_w1(const GradientArguments& arguments, const Task& task, u32 first, u32 lane) {
  Box box;
  if (lane < kHalves) {
    box.map = &arguments.gradients.w1;
    box.row = task.local_expert * kShape.w1_rows() + lane * kShape.intermediate + first;
    box.place = kWeightsPlace + lane * kTurnColumns * kSwizzleBytes;
  }
  return box;
}
/// Those of the second product: rows of w1 in the order of kept columns.
inline Box find_ordered_w1(const GradientArguments& arguments, const Task& task, u32 part,
                           u32 lane) {
  const u32 nth = lane / kGroupBoxes;
  const u32 group = lane % kGroupBoxes * kDepthBoxRows;
  Box box;
  box.map = &arguments.gradients.w1_ordered;
  box.of_weights = true;
  box.row = task.local_expert * kShape.w1_rows() + group;
  box.column = part * kTileColumns + nth * kBoxColumns;
  box.place = kWeightsPlace + nth * kColumnsBoxBytes + group * kSwizzleBytes;
  return box;
}

/// Steps over x of a first product's turn.
inline u32 hidden_steps(const RankArguments& arguments, const Task& task) {
  return task.padded_rows == 0 || saves_all(arguments, task) ? 0 : kHiddenSteps;
}
/// Steps of all of a first product: of one turn for all columns where its tile's rows are saved.
inline u32 value_steps(const RankArguments& arguments, const Task& task) {
  return saves_all(arguments, task) ? kHiddenSteps : kTurns * 2 * kHiddenSteps;
}
/// Steps of a part; none of a tile of no rows.
inline u32 gradient_steps(const RankArguments& arguments, const Task& task) {
  if (task.padded_rows == 0) {
    return 0;
  }
  return task.kind == TaskKind::product0 ? value_steps(arguments, task) : kSecondSteps;
}

/// The load warp, before its first part.
inline void prefetch_maps(const RankArguments& given) {
  prefetch_maps<sizeof(GradientMaps) / sizeof(TensorMap)>(
      reinterpret_cast<const TensorMap*>(&of_gradients(given).gradients));
}

/// The load warp: a part's operands, step by step.
inline void load_tile(const RankArguments& given, const Layout& layout, const Task& task, u32 part,
                      Loader& loader) {
  const GradientArguments& arguments = of_gradients(given);
  const u32 lane = Machine::lane();
  const u32 steps = gradient_steps(given, task);
  const bool of_rows = lane >= kWeightLanes;
  Box rows;
  if (of_rows) {
    rows = find_gradient_rows(arguments, layout, task, lane - kWeightLanes);
  }
  const auto fill = [&](u32 first, u32 end, Box box, u32 weight_rows, auto place_at) {
    if (of_rows) {
      box = rows;  // a copy: a choice of two would lie in memory
    }
    fill_stages(Steps{first, end, steps}, (task.padded_rows + weight_rows) * kSwizzleBytes, box,
                loader, place_at);
  };
  if (task.kind == TaskKind::product0) {
#pragma unroll 1
    for (u32 first = 0; first < steps; first += 2 * kHiddenSteps) {
      const u32 turn = minimum(first + kHiddenSteps, steps);
      const u32 end = minimum(turn + kHiddenSteps, steps);
      const u32 column = part * kValueColumns + first / (2 * kHiddenSteps) * kTurnColumns;
      const u32 columns = end == turn ? kValueColumns : kTurnColumns;
      const Box w2 = find_w2(arguments, task, column, columns, lane);
      fill(first, turn, w2, columns, [&](u32 step) {
        return of_rows ? BoxPlace{rows.row, kShape.hidden + (step - first) * kTileDepth}
                       : BoxPlace{w2.row + (step - first) * kDepthRows, w2.column};
      });
      const Box w1 = find_w1(arguments, task, column, lane);
      fill(turn, end, w1, kHalves * kTurnColumns, [&](u32 step) {
        return BoxPlace{of_rows ? rows.row : w1.row, (step - turn) * kTileDepth};
      });
    }
  } else {
    const Box w1 = find_ordered_w1(arguments, task, part, lane);
    fill(0, steps, w1, kTileColumns, [&](u32 step) {
      const u32 half = step / kHalfSteps;
      return of_rows ? BoxPlace{rows.row, step * kTileDepth}
                     : BoxPlace{w1.row + half * kShape.intermediate +
                                    (step - half * kHalfSteps) * kDepthRows,
                                w1.column};
    });
  }
}

}  // namespace moeos::sm90
