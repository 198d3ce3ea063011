// SPDX-License-Identifier: Apache-2.0
// What a forward call multiplies: the products of a tile's rows, as data.
//
//   product        its weights   then
//   first          w1            activation
//   second         w2
//   shared first   shared_w1     activation
//   shared second  shared_w2
//   shared gate    shared_gate   sigmoid; its values are the weights of shared results
//
// Where rows and results lie, what a product awaits and what follows is said for all machines in
// runtime/words/products.hpp. Each product is cut into parts of some columns, and a part runs
// through four files:
//
//   operands.cuh   the load warp brings boxes of rows and of weights into the stages
//   mainloop.cuh   the consumers multiply stage by stage: d += rows * weights^T
//                  (stored_weights.cuh: first they dequantize weights;
//                  coded_products.cuh: they multiply quantized rows by quantized weights;
//                  token_columns.cuh: quantized rows by weights of 4 bits;
//                  weights_in_registers.cuh: few plain rows by weights of 4 bits)
//   epilogue.cuh   bias, activation and conversion, from accumulators to eight columns of a row
//   sinks.cuh      where results lie, and how they get there
//
// tile.cuh puts the last three together. A new product is a line of this table, and a memory area
// for its rows or its results if there is none yet. Shared experts (n of them) are one product: in
// GEMM0 each has its own parts, and GEMM1 adds all of them up. Their gate is the last part of
// GEMM0. Must not depend on: boxes, stages, accumulators.
#pragma once

#include "kernels/sm90/block/config.cuh"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos::sm90 {

struct Product {
  moeos::Product line;
  bool activated;
  u32 mlps;     // side by side in GEMM0's columns, and in GEMM1's depth
  u32 depth;    // elements of a row, of each MLP
  u32 columns;  // of a result, of each MLP
};
inline constexpr Product kFirst{.line = kFirstProduct,
                                .activated = true,
                                .mlps = 1,
                                .depth = kShape.hidden,
                                .columns = kShape.intermediate};
inline constexpr Product kSecond{.line = kSecondProduct,
                                 .activated = false,
                                 .mlps = 1,
                                 .depth = kShape.intermediate,
                                 .columns = kShape.hidden};
inline constexpr Product kSharedFirst{.line = kSharedFirstProduct,
                                      .activated = true,
                                      .mlps = kShape.shared_experts,
                                      .depth = kShape.hidden,
                                      .columns = kShape.shared_intermediate};
inline constexpr Product kSharedSecond{.line = kSharedSecondProduct,
                                       .activated = false,
                                       .mlps = kShape.shared_experts,
                                       .depth = kShape.shared_intermediate,
                                       .columns = kShape.hidden};
inline constexpr u32 kGateParts = kShape.shared_gate ? 1 : 0;

inline bool is_shared(const Task& task) { return kShares && moeos::is_shared(kGeometry, task); }
/// Whether the tile's rows are listed tokens: not where a rank has peers.
inline bool is_listed(const Task& task) {
  return kGeometry.plans_itself() && task.from == RowsIn::listed_tokens;
}
/// Whether the tile's rows and weights are quantized.
inline bool is_coded(const Task& task) { return kCoded && !is_shared(task); }
/// Whether the tile's weights are dequantized in registers; and whether its steps are deep. Each
/// box of a step needs a lane, and single rows may be too many.
inline bool is_in_warps(const Task& task) {
  return kWeightsInRegisters && task.narrow != 0 && !is_shared(task) &&
         task.padded_rows <= kWarpTokens;
}
inline bool is_deep(const Task& task) {
  constexpr bool kDeep = kWeightsInRegisters && !kGeometry.gathers_own_rows();
  constexpr u32 kRowBoxes = Machine::kLanes / kDeepDepth - kNarrowColumns / kOrderedRows;
  static_assert(kWarpTokens / Geometry::kSegmentAlign <= kRowBoxes);
  return kDeep && is_in_warps(task) && (!is_listed(task) || task.rows <= kRowBoxes);
}
/// Boxes of a step along the depth.
inline u32 boxes_of(const Task& task) {
  return task.narrow == 0 ? 1 : is_deep(task) ? kDeepDepth : kNarrowDepth;
}
/// The product of a task.
inline Product product_of(const Task& task) {
  const bool first = task.kind == kFirstProduct.kind;
  if (is_shared(task)) {
    return first ? kSharedFirst : kSharedSecond;
  }
  return first ? kFirst : kSecond;
}

/// Rows of weights of one MLP. A gated GEMM0 has its gate rows, then its up rows.
constexpr u32 weight_rows(const Product& product) {
  return product.activated ? kShape.w1_rows_of(product.columns) : product.columns;
}
/// Where one of these rows lies in memory, among those of all MLPs; or its bias or scale, of which
/// each matrix has `rows`. `matrix`: counted through all MLPs, gates and ups being two.
constexpr u64 row_in_memory(const Product& product, u32 matrix, u32 row, u32 rows) {
  if (kGateUp == GateUp::interleaved && product.activated) {
    return u64{matrix / 2} * 2 * rows + 2 * row + matrix % 2;
  }
  return u64{matrix} * rows + row;
}
/// Columns of a result in one part, of a tile of `tile_columns` columns.
constexpr u32 part_columns(const Product& product, u32 tile_columns) {
  return product.activated ? product0_columns(tile_columns) : tile_columns;
}
/// Parts of one MLP's columns; for GEMM1, which adds all MLPs up, all parts.
constexpr u32 parts_of_each(const Product& product, u32 tile_columns) {
  return ceil_div(product.columns, part_columns(product, tile_columns));
}
constexpr u32 parts_of(const Product& product, u32 tile_columns) {
  return product.activated ? product.mlps * parts_of_each(product, tile_columns)
                           : parts_of_each(product, tile_columns);
}
// The host must have derived the same numbers for a forward call.
static_assert(kGradients || (kGeometry.product0_parts == parts_of(kFirst, kTileColumns) &&
                             kGeometry.product1_parts == parts_of(kSecond, kTileColumns) &&
                             kGeometry.product0_narrow_parts == parts_of(kFirst, kNarrowColumns) &&
                             kGeometry.product1_narrow_parts == parts_of(kSecond, kNarrowColumns)));
static_assert(!kShares ||
              (kGeometry.shared0_parts == parts_of(kSharedFirst, kTileColumns) + kGateParts &&
               kGeometry.shared0_narrow_parts ==
                   parts_of(kSharedFirst, kNarrowColumns) + kGateParts &&
               kGeometry.product1_parts == parts_of(kSharedSecond, kTileColumns) &&
               kGeometry.product1_narrow_parts == parts_of(kSharedSecond, kNarrowColumns)));

// --- A part of a task's product ---

/// Rows of weights that a part multiplies by.
inline u32 weight_rows_of(const Task& task) {
  const bool narrow =
      MOEOS_PLANTED(halves_load_whole_weights) ? task.narrow != 0 : has_narrow_parts(task);
  return narrow ? kNarrowColumns : kTileColumns;
}
/// Columns of the product's result that a part computes.
inline u32 columns_of(const Task& task) {
  return part_columns(product_of(task), weight_rows_of(task));
}
/// The MLP of a part of GEMM0; the gate's part has the number after the last.
inline u32 mlp_of(const Task& task, u32 part) {
  return is_shared(task) && task.kind == kFirstProduct.kind
             ? part / parts_of_each(kSharedFirst, weight_rows_of(task))
             : 0;
}
/// Whether a part is the gate's.
inline bool weighs_tokens(const Task& task, u32 part) {
  return kGateParts > 0 && is_shared(task) && mlp_of(task, part) == kSharedFirst.mlps;
}
/// Whether only the part's weights are quantized, so that they are dequantized.
inline bool is_decoded(const Task& task, u32 part) {
  if constexpr (kDecodesShared) {
    return is_shared(task) ? !weighs_tokens(task, part) : kDecodesExperts;
  } else {
    return kDecodes && !is_shared(task);
  }
}
/// The first of the part's columns, among its MLP's.
inline u32 first_column_of(const Task& task, u32 part) {
  const Product product = product_of(task);
  const u32 nth = is_shared(task) && product.activated
                      ? part % parts_of_each(product, weight_rows_of(task))
                      : part;
  return first_column(nth, columns_of(task), product.columns);
}
/// Elements of a row in a box of the task's operands.
inline u32 box_depth_of(const Task& task) { return is_coded(task) ? kCodedDepth : kTileDepth; }
/// Stages of a part for each MLP whose results it adds up, and for all. 0 for a tile of no rows.
inline u32 steps_of_each(const Task& task) {
  if (task.padded_rows == 0) {
    return 0;
  }
  return ceil_div(product_of(task).depth, boxes_of(task) * box_depth_of(task));
}
inline u32 steps_of(const Task& task) {
  const Product product = product_of(task);
  return product.activated ? steps_of_each(task) : product.mlps * steps_of_each(task);
}

}  // namespace moeos::sm90
