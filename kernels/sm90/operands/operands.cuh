// SPDX-License-Identifier: Apache-2.0
// Operands of a part: the load warp brings its rows and its weights into the stages, box by box.
//
// Must not depend on: what is made of operands; where results go.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/operands/boxes.cuh"
#include "kernels/sm90/operands/gathered_rows.cuh"
#include "kernels/sm90/operands/stored_weights.cuh"
#include "kernels/sm90/ptx/code.cuh"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

static_assert(padded_boxes(kNarrowRows) + kNarrowColumns / kNarrowBoxRows <=
              Machine::kLanes / kNarrowDepth);
static_assert(kTileRows == Geometry::kExactTileRows);
static_assert((kGeometry.segment_align == Geometry::kSegmentAlign ? padded_boxes(kTileRows)
                                                                  : Geometry::kMaxExactBoxes) +
                  kTileColumns / kWeightBoxRows <=
              Machine::kLanes);

static_assert(Geometry::kInPlaceTokens + kNarrowColumns / kNarrowBoxRows <=
              Machine::kLanes / kNarrowDepth);

/// Rows of a tile that are loaded. What lies beyond a tile's tokens is left from earlier products,
/// or other rows: their results are discarded.
inline u32 loaded_rows_of(const Task& task) {
  return is_shared(task)   ? align_up(task.padded_rows, kTokenBoxRows)
         : is_listed(task) ? task.rows
                           : task.padded_rows;
}

/// Box `index` of a tile's rows: tokens, segments of cells, or the results of GEMM0.
inline void find_rows(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 index, u32 place, Box& box) {
  if (is_shared(task)) {
    if (index < loaded_rows_of(task) / kTokenBoxRows) {
      box.map = task.from == RowsIn::tokens ? &arguments.x : &arguments.shared_between;
      box.row = (MOEOS_PLANTED(shared_rows_are_of_the_first_tile) ? 0 : task.first_result) +
                index * kTokenBoxRows;
      box.place = place + index * kTokenBoxRows * kSwizzleBytes;
    }
    return;
  }
  if (is_listed(task)) {
    if (index < task.rows) {
      box.map = &arguments.x_row;
      box.row = token_of_row(task, index);
      box.place = place + index * kSwizzleBytes;
    }
    return;
  }
  const auto visit = [&](const auto& maps, u32 first, u32 rows) {
    const u32 boxes = Machine::count(rows);
    if (index < boxes) {
      cut_rows(maps, first, rows, place, index, box);
    }
    index -= boxes;  // once found: beyond all that follow
    place += rows * kSwizzleBytes;
  };
  if (!kPairsBetween && task.from == RowsIn::between) {
    visit(arguments.intermediate, task.first_result, task.padded_rows);
    return;
  }
  u32 laid_out = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment segment = task.segments[s];
    const u32 rows = laid_out_rows(kGeometry, task, s, laid_out);
    if (is_gathered(arguments, segment)) {
      place += rows * kSwizzleBytes;
    } else {
      visit(arguments.cells, layout.row_index(segment.source, segment.first_row), rows);
    }
    laid_out += rows;
  }
}

/// Rows of a box of a part's weights, and the number of its boxes in each step.
inline u32 weight_box_rows_of(const Task& task) {
  const u32 whole = MOEOS_PLANTED(weight_boxes_end_beyond_the_matrix) ? 128 : kWeightBoxRows;
  return task.narrow != 0 && product_of(task).activated ? kNarrowBoxRows : whole;
}
inline u32 weight_boxes_of(const Task& task, u32 part) {
  return weighs_tokens(task, part) ? 1 : weight_rows_of(task) / weight_box_rows_of(task);
}

/// Bytes of a row of the weights as it lands in a stage, and the column in its matrix, as the map
/// counts.
inline u32 weight_row_bytes_of(const Task& task, u32 part) {
  return is_decoded(task, part) ? kCodeBytes : is_coded(task) ? kCodedRowBytes : kSwizzleBytes;
}
inline u32 weight_column(const Task& task, u32 part, u32 column) {
  return is_decoded(task, part) ? column / kTileDepth * kCodeBytes
         : is_coded(task)       ? column / kCodedDepth * kCodedRowBytes
                                : column;
}

/// Box `index` of a part's weights. A gated part's gate rows come before its up rows.
inline void find_weights(const RankArguments& arguments, const Task& task, u32 part, u32 index,
                         u32 place, Box& box) {
  if (weighs_tokens(task, part)) {
    box.map = &arguments.shared_gate;
    box.place = place;
    return;
  }
  const Product product = product_of(task);
  const u32 columns = columns_of(task);
  const u32 first = index * weight_box_rows_of(task);  // among the part's
  const bool of_ups = first >= columns;
  const u32 up = of_ups ? (kUpMaps ? 0 : product.columns) - columns : 0;
  const u32 mlp = is_shared(task) ? mlp_of(task, part) : task.local_expert;
  box.of_weights = true;
  // A narrow tile's weights are read once. L2 is left to what is read again: rows, tables, code.
  // Calls of few tokens became 2 to 4 % faster.
  box.policy = task.narrow != 0 ? CachePolicy::evict_first : CachePolicy::normal;
  const WeightMaps& maps = is_shared(task)     ? arguments.shared
                           : kUpMaps && of_ups ? arguments.ups
                                               : arguments.experts;
  if (is_deep(task)) {
    box.map = product.activated ? &maps.w1_deep : &maps.w2_deep;
  } else {
    box.map = !product.activated ? &maps.w2 : task.narrow != 0 ? &maps.w1_narrow : &maps.w1;
  }
  const u32 turns = kColumnsAlternate && product.activated ? 2 : 1;
  if constexpr (kTransposed) {
    box.matrix = mlp;
    box.row = box.column;  // along the depth
    box.column = first_column_of(task, part) * turns + first + (kColumnsAlternate ? 0 : up);
  } else {
    const u32 rows = kUpMaps ? product.columns : weight_rows(product);
    box.row = mlp * rows + first_column_of(task, part) + first + up;
  }
  box.place = place + first * (is_deep(task) ? kSwizzleBytes : weight_row_bytes_of(task, part));
}

/// The load warp, before its first part: prefetches the tensor maps.
inline void prefetch_maps(const RankArguments& arguments) {
  constexpr u32 kMaps = (sizeof(ForwardMaps) + (kShares   ? sizeof(SharedMaps)
                                                : kUpMaps ? sizeof(WeightMaps)
                                                          : 0)) /
                        sizeof(TensorMap);
  prefetch_maps<kMaps>(
      reinterpret_cast<const TensorMap*>(&static_cast<const TensorMaps&>(arguments)));
}

/// Prefetches the scales of a part's weights to L2, where each row has many. The part's stages are
/// loaded some steps before they are used, but in each step the consumers wait for the scales of
/// the next.
inline void prefetch_scales(const RankArguments& arguments, const Task& task, u32 part) {
  if constexpr (kFormat != WeightFormat::plain && !is_fp8(kFormat)) {
    const Product product = product_of(task);
    const u32 nth = Machine::lane();  // of the part's matrices
    if (is_shared(task) || task.padded_rows == 0 || nth >= matrices_of(product)) {
      return;
    }
    const u32 first = first_column_of(task, part);
    WeightRow row{task.local_expert * matrices_of(product) + nth, first};
    const u32 rows = minimum(columns_of(task), product.columns - first);
    if constexpr (kGateUp == GateUp::interleaved) {
      // Both matrices' rows lie side by side: each lane prefetches half of these.
      row = {task.local_expert * matrices_of(product), first + nth * rows / 2};
    }
    const u64 begin = reinterpret_cast<u64>(
        scales_of(row, product, product.activated ? arguments.w1_scale : arguments.w2_scale));
    const u64 end = begin + rows * scales_of_row(kFormat, product.depth) * scale_bytes(kFormat);
    prefetch_bytes(begin / 16 * 16, static_cast<u32>(align_up(end, u64{16}) - begin / 16 * 16));
  }
}

/// The load warp: loads the operands of a part of a product, step by step.
inline void load_tile(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 part, Loader& loader) {
  prefetch_scales(arguments, task, part);
  const bool narrow = task.narrow != 0;
  const u32 depth = boxes_of(task);
  const u32 columns = weight_rows_of(task);
  const u32 lanes = Machine::kLanes / depth;  // for the boxes of each of the `depth` boxes along
                                              // the depth
  const u32 n = Machine::lane() / lanes;
  const u32 index = Machine::lane() % lanes;
  const u32 weight_boxes = weight_boxes_of(task, part);
  Box box;
  box.column = n * box_depth_of(task);
  if (index < weight_boxes) {
    if (n == 0 || !is_deep(task)) {
      find_weights(arguments, task, part, index, kWeightsPlace + n * columns * kSwizzleBytes, box);
    }
  } else {
    const u32 rows = is_deep(task) ? kWarpTokens : kNarrowRows;
    find_rows(arguments, layout, task, index - weight_boxes, n * rows * kSwizzleBytes, box);
  }
  const u32 weight_rows = weighs_tokens(task, part) ? kSharedGateRows : columns;
  const GatheredRows gathered(arguments, task);
  const u32 bytes = (loaded_rows_of(task) - gathered.laid_out()) * kSwizzleBytes +
                    weight_rows * weight_row_bytes_of(task, part);
  const u32 lost = MOEOS_PLANTED(a_copy_never_lands) ? 16 : 0;
  fill_stages(
      steps_of(task), depth * (bytes + lost), box, loader,
      [&](u32 step) {
        if constexpr (kSharedSecond.mlps > 1) {
          if (is_shared(task) && task.kind == kSecondProduct.kind) {
            const u32 mlp = step / steps_of_each(task);
            const u32 column = box.column + (step - mlp * steps_of_each(task)) * depth * kTileDepth;
            return box.of_weights
                       ? BoxPlace{box.row + mlp * kShape.hidden, weight_column(task, part, column)}
                       : BoxPlace{box.row, column + mlp * kSharedSecond.depth};
          }
        }
        if constexpr (kTransposed) {
          if (box.of_weights) {
            return BoxPlace{box.row + step * depth * kTileDepth, box.column};
          }
        }
        const u32 column = box.column + step * depth * box_depth_of(task);
        return BoxPlace{box.row, box.of_weights ? weight_column(task, part, column) : column};
      },
      gathered);
}

}  // namespace moeos::sm90
