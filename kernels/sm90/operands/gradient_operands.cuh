// SPDX-License-Identifier: Apache-2.0
// Operands of a part of a gradient call.
//
//   product  its rows are              its weights              over
//   first    gradients of the output   w2, a depth row a row    H
//            then x                    w1, gate and up rows     H; no turn where h is saved
//   second   gradients of h, kept      w1, a depth row a row    its rows: kHalves * kKeptColumns
//
// Where weights are transposed, their rows are I columns in the first line, the depth in the second
// and H columns in the last: each operand is of the other kind. Must not depend on: what is made of
// operands; where results go.
#pragma once

#include "kernels/sm90/block/backward_arguments.cuh"
#include "kernels/sm90/operands/boxes.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// Steps of the depth H, over which GEMM0 takes two turns; and steps of GEMM1.
inline constexpr u32 kHiddenSteps = ceil_div(kShape.hidden, kTileDepth);
inline constexpr u32 kHalfSteps = kKeptColumns / kTileDepth;
inline constexpr u32 kSecondSteps = kHalves * kHalfSteps;

/// Boxes of weights in a step, at most, which the first lanes load; the lanes after them load rows.
inline constexpr u32 kBoxColumns = kTileDepth;
inline constexpr u32 kGroupBoxes = kDepthRows / kDepthBoxRows;
inline constexpr u32 kWeightLanes = kTileColumns / kBoxColumns * kGroupBoxes;
inline constexpr u32 kValueBoxes = kValueColumns / kBoxColumns;
static_assert(kGeometry.segment_align == Geometry::kSegmentAlign &&
              kWeightLanes + padded_boxes(kTileRows) <= Machine::kLanes);
static_assert(kValueBoxes * kHalves <= kWeightLanes);
// The host must have derived the same numbers of parts.
static_assert(kGeometry.product0_parts == ceil_div(kShape.intermediate, kValueColumns) &&
              kGeometry.product1_parts == ceil_div(kShape.hidden, kTileColumns));

/// This lane's box of rows: from a cell in GEMM0, otherwise from kept rows.
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

/// Boxes of GEMM0's weights, in its turn over gradients of the output: depth rows.
inline Box find_w2(const GradientArguments& arguments, const Task& task, u32 part, u32 lane) {
  Box box;
  if constexpr (kTransposed) {
    if (lane == 0) {
      box.map = &arguments.gradients.w2;
      box.of_weights = box.ordered = true;
      box.matrix = task.local_expert;
      box.row = part * kValueColumns;
      box.place = kWeightsPlace;
    }
  } else if (lane < kValueBoxes) {
    box.map = &arguments.gradients.w2;
    box.row = task.local_expert * kShape.hidden;
    box.column = part * kValueColumns + lane * kBoxColumns;
    box.place = kWeightsPlace + lane * kColumnsBoxBytes;
  }
  return box;
}
/// Boxes of GEMM0's weights, in its turn over x: gate rows, and up rows.
inline Box find_w1(const GradientArguments& arguments, const Task& task, u32 part, u32 lane) {
  Box box;
  if constexpr (kTransposed) {
    const RankArguments& of_call = arguments;  // which has these boxes
    if (lane < kHalves * kValueBoxes) {
      const u32 half = kColumnsAlternate ? 0 : lane / kValueBoxes;
      const bool apart = kUpMaps && half != 0;
      box.map = apart ? &of_call.ups.w1 : &of_call.experts.w1;
      box.of_weights = true;
      box.matrix = task.local_expert;
      box.column = part * kValueColumns * (kColumnsAlternate ? 2 : 1) +
                   (apart ? 0 : half * kShape.intermediate) +
                   (kColumnsAlternate ? lane : lane % kValueBoxes) * kBoxColumns;
      box.place = kWeightsPlace + lane * kColumnsBoxBytes;
    }
  } else if (lane < kHalves) {
    box.map = kUpMaps && lane != 0 ? &arguments.up_gradients.w1 : &arguments.gradients.w1;
    box.row = kUpMaps ? task.local_expert * kShape.intermediate + part * kValueColumns
                      : task.local_expert * kShape.w1_rows() + lane * kShape.intermediate +
                            part * kValueColumns;
    box.place = kWeightsPlace + lane * kValueColumns * kSwizzleBytes;
  }
  return box;
}
/// Boxes of GEMM1's weights, for kept columns of one half: rows of w1 in their order, or where it
/// is transposed, kRowsOfBox of its rows.
inline constexpr u32 kRowsOfBox = 128;
inline Box find_second_w1(const GradientArguments& arguments, const Task& task, u32 part, u32 lane,
                          u32 half) {
  const bool ups = kUpMaps && half != 0;
  if constexpr (kTransposed) {
    Box box;
    if (lane < kTileColumns / kRowsOfBox) {
      box.map = ups ? &arguments.up_gradients.w1 : &arguments.gradients.w1;
      box.row = task.local_expert * kShape.hidden + part * kTileColumns + lane * kRowsOfBox;
      box.place = kWeightsPlace + lane * kRowsOfBox * kSwizzleBytes;
    }
    return box;
  }
  const u32 nth = lane / kGroupBoxes;
  const u32 group = lane % kGroupBoxes * kDepthBoxRows;
  Box box;
  box.map = ups ? &arguments.up_gradients.w1_ordered : &arguments.gradients.w1_ordered;
  box.of_weights = true;
  box.row = task.local_expert * (kUpMaps ? kShape.intermediate : kShape.w1_rows()) + group;
  box.column = part * kTileColumns + nth * kBoxColumns;
  box.place = kWeightsPlace + nth * kColumnsBoxBytes + group * kSwizzleBytes;
  return box;
}

/// Steps of GEMM0's turn over x.
inline u32 hidden_steps(const RankArguments& arguments, const Task& task) {
  return task.padded_rows == 0 || saves_all(arguments, task) ? 0 : kHiddenSteps;
}
/// Steps of a part; none for a tile of no rows.
inline u32 gradient_steps(const RankArguments& arguments, const Task& task) {
  if (task.padded_rows == 0) {
    return 0;
  }
  return task.kind == TaskKind::product0 ? kHiddenSteps + hidden_steps(arguments, task)
                                         : kSecondSteps;
}

/// The load warp, before its first part: prefetches the tensor maps.
inline void prefetch_maps(const RankArguments& given) {
  prefetch_maps<sizeof(GradientMaps) / sizeof(TensorMap)>(
      reinterpret_cast<const TensorMap*>(&of_gradients(given).gradients));
}

/// The load warp: loads a part's operands, step by step.
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
    const u32 turn = minimum(steps, kHiddenSteps);
    const Box w2 = find_w2(arguments, task, part, lane);
    fill(0, turn, w2, kValueColumns, [&](u32 step) {
      return of_rows       ? BoxPlace{rows.row, kShape.hidden + step * kTileDepth}
             : kTransposed ? BoxPlace{w2.row, step * kTileDepth}
                           : BoxPlace{w2.row + step * kDepthRows, w2.column};
    });
    const Box w1 = find_w1(arguments, task, part, lane);
    fill(turn, steps, w1, kHalves * kValueColumns, [&](u32 step) {
      if (kTransposed && !of_rows) {
        return BoxPlace{(step - turn) * kDepthRows, w1.column};
      }
      return BoxPlace{of_rows ? rows.row : w1.row, (step - turn) * kTileDepth};
    });
  } else {
    const auto fill_half = [&](u32 first, u32 end, u32 map) {
      const Box w1 = find_second_w1(arguments, task, part, lane, map);
      fill(first, end, w1, kTileColumns, [&](u32 step) {
        const u32 half = kColumnsAlternate ? 0 : step / kHalfSteps;
        const u32 within = (step - half * kHalfSteps) * kDepthRows;
        const u32 before = kUpMaps ? 0 : half * kShape.intermediate;
        return of_rows       ? BoxPlace{rows.row, step * kTileDepth}
               : kTransposed ? BoxPlace{w1.row, before + within}
                             : BoxPlace{w1.row + before + within, w1.column};
      });
    };
    if constexpr (kUpMaps) {
      fill_half(0, minimum(steps, kHalfSteps), 0);
      fill_half(minimum(steps, kHalfSteps), steps, 1);
    } else {
      fill_half(0, steps, 0);
    }
  }
}

}  // namespace moeos::sm90
