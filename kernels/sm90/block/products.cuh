// SPDX-License-Identifier: Apache-2.0
// What a forward call multiplies: the products of a tile's rows, as data.
//
//   product        its weights   then
//   first          w1            activation
//   second         w2
//   shared first   shared_w1     activation
//   shared second  shared_w2
//   shared gate    shared_gate   sigmoid, which are weights of shared results
//
// Where rows and results lie, what a product awaits and what follows is said for all machines in
// runtime/words/products.hpp. Each is cut into parts of some columns, and a part runs through four
// files:
//
//   operands.cuh   the load warp brings boxes of rows and of weights into the stages
//   mainloop.cuh   the consumers multiply stage by stage: d += rows * weights^T
//                  (stored_weights.cuh: first they decode weights that are codes and scales;
//                  coded_products.cuh: they multiply codes by codes;
//                  token_columns.cuh: codes of 4 bits by codes;
//                  weights_in_registers.cuh: codes of 4 bits by few numbers)
//   epilogue.cuh   bias, activation and conversion, from accumulators to eight columns of a row
//   sinks.cuh      where results lie, and how they get there
//
// tile.cuh puts the last three together. A new product is a line of this table, and a place for its
// rows or its results where there is none yet. Shared experts (n of them) are one product: of a
// first one each has its own parts, and of a second one all are added up. Their gate is the last
// part of a first product. May not know: boxes, stages, accumulators.
#pragma once

#include "kernels/sm90/block/config.cuh"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos::sm90 {

struct Gemm {
  moeos::Product line;
  bool activated;
  u32 mlps;     // side by side in a first product's columns, and in a second one's depth
  u32 depth;    // elements of a row, of each MLP
  u32 columns;  // of a result, of each MLP
};
inline constexpr Gemm kFirst{.line = kFirstProduct,
                             .activated = true,
                             .mlps = 1,
                             .depth = kShape.hidden,
                             .columns = kShape.intermediate};
inline constexpr Gemm kSecond{.line = kSecondProduct,
                              .activated = false,
                              .mlps = 1,
                              .depth = kShape.intermediate,
                              .columns = kShape.hidden};
inline constexpr Gemm kSharedFirst{.line = kSharedFirstProduct,
                                   .activated = true,
                                   .mlps = kShape.shared_experts,
                                   .depth = kShape.hidden,
                                   .columns = kShape.shared_intermediate};
inline constexpr Gemm kSharedSecond{.line = kSharedSecondProduct,
                                    .activated = false,
                                    .mlps = kShape.shared_experts,
                                    .depth = kShape.shared_intermediate,
                                    .columns = kShape.hidden};
inline constexpr u32 kGateParts = kShape.shared_gate ? 1 : 0;

inline bool is_shared(const Task& task) { return kShares && moeos::is_shared(kGeometry, task); }
/// Whether its rows are tokens that it lists: not where a rank has peers.
inline bool is_listed(const Task& task) {
  return kGeometry.plans_itself() && task.from == RowsIn::listed_tokens;
}
/// Whether its rows and weights are codes.
inline bool is_coded(const Task& task) { return kCoded && !is_shared(task); }
/// Whether its weights are decoded in registers; and whether its steps are deep. Each box of a step
/// has a lane: single rows may be too many.
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
inline Gemm product_of(const Task& task) {
  const bool first = task.kind == kFirstProduct.kind;
  if (is_shared(task)) {
    return first ? kSharedFirst : kSharedSecond;
  }
  return first ? kFirst : kSecond;
}

/// Rows of weights of one MLP. A gated first product has its gate rows, then its up rows.
constexpr u32 weight_rows(const Gemm& product) {
  return product.activated ? kShape.w1_rows_of(product.columns) : product.columns;
}
/// Where one of its rows lies in memory: of those of all MLPs, or of their biases or scales, of
/// which each matrix has `rows`. `matrix`: of all, gates and ups being two.
constexpr u64 row_in_memory(const Gemm& product, u32 matrix, u32 row, u32 rows) {
  if (kGateUp == GateUp::interleaved && product.activated) {
    return u64{matrix / 2} * 2 * rows + 2 * row + matrix % 2;
  }
  return u64{matrix} * rows + row;
}
/// Columns of a result in one part, of a tile of so many columns.
constexpr u32 part_columns(const Gemm& product, u32 tile_columns) {
  return product.activated ? product0_columns(tile_columns) : tile_columns;
}
/// Parts of one MLP's columns; of a second product, in which all are added up, of all.
constexpr u32 parts_of_each(const Gemm& product, u32 tile_columns) {
  return ceil_div(product.columns, part_columns(product, tile_columns));
}
constexpr u32 parts_of(const Gemm& product, u32 tile_columns) {
  return product.activated ? product.mlps * parts_of_each(product, tile_columns)
                           : parts_of_each(product, tile_columns);
}
// What the host has made of the same, for a forward call.
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
/// Columns of its product's result that it computes.
inline u32 columns_of(const Task& task) {
  return part_columns(product_of(task), weight_rows_of(task));
}
/// Which of a first product's MLPs it is of; their number: of their gate.
inline u32 mlp_of(const Task& task, u32 part) {
  return is_shared(task) && task.kind == kFirstProduct.kind
             ? part / parts_of_each(kSharedFirst, weight_rows_of(task))
             : 0;
}
/// Whether it is of the gate.
inline bool weighs_tokens(const Task& task, u32 part) {
  return kGateParts > 0 && is_shared(task) && mlp_of(task, part) == kSharedFirst.mlps;
}
/// Whether its weights alone are codes, which are decoded.
inline bool is_decoded(const Task& task, u32 part) {
  if constexpr (kDecodesShared) {
    return is_shared(task) ? !weighs_tokens(task, part) : kDecodesExperts;
  } else {
    return kDecodes && !is_shared(task);
  }
}
/// The first of its columns, of its MLP's.
inline u32 first_column_of(const Task& task, u32 part) {
  const Gemm product = product_of(task);
  const u32 nth = is_shared(task) && product.activated
                      ? part % parts_of_each(product, weight_rows_of(task))
                      : part;
  return first_column(nth, columns_of(task), product.columns);
}
/// Elements of a row in a box of its operands.
inline u32 box_depth_of(const Task& task) { return is_coded(task) ? kCodedDepth : kTileDepth; }
/// Stages that it takes of each MLP whose results it adds up, and of all. None of a tile of no
/// rows.
inline u32 steps_of_each(const Task& task) {
  if (task.padded_rows == 0) {
    return 0;
  }
  return ceil_div(product_of(task).depth, boxes_of(task) * box_depth_of(task));
}
inline u32 steps_of(const Task& task) {
  const Gemm product = product_of(task);
  return product.activated ? steps_of_each(task) : product.mlps * steps_of_each(task);
}

}  // namespace moeos::sm90
