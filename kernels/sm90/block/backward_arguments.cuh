// SPDX-License-Identifier: Apache-2.0
// The additional arguments of a gradient call's launch:
// host/moeos/engines/cuda/backward_arguments.py packs them after a rank's SavingArguments, whose
// `out` has room for the rows that are sent.
//
// Must not depend on: their users.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/gradient_rows.cuh"
#include "kernels/sm90/block/saved_rows.cuh"

namespace moeos::sm90 {

/// Rows of a box of an operand whose rows are the depth: one step's. For w1 they are groups in an
/// order of their own, of which only one at a time may reach beyond the matrix.
inline constexpr u32 kDepthRows = kTileDepth;
inline constexpr u32 kDepthBoxRows =
    kShape.intermediate % kDepthRows == 0 ? kDepthRows : kOrderedRows;
/// Columns of a part's activated values.
inline constexpr u32 kValueColumns = 128;

struct GradientMaps {
  TensorMap rows[kCellBoxes];      // [rows of all cells, 2 H]: x and the gradient of the output
  TensorMap d_hidden[kCellBoxes];  // [kept rows, kHalves * kKeptColumns]
  TensorMap values;                // [kept rows, kKeptColumns], box 64 x 64
  TensorMap inputs;                // [kept rows or rows of all cells, 2 H], box 64 x 64
  TensorMap w1;                    // [X * w1 rows, H], box kValueColumns x 64
  TensorMap w1_ordered;            // [X * w1 rows, H], box kDepthBoxRows x 64
  TensorMap w2;                    // [X * H, I], box 64 x 64
  TensorMap d_w1;                  // a warp's box of a gradient: weight_gradients.cuh
  TensorMap d_w2;
  // Where weights are transposed: w1 is [X * H, w1 rows], box 128 x 64; w2 is [X, I, H], box 1 x
  // kValueColumns x 64, its rows in the order of GEMM0's accumulators; there is no w1_ordered.
};
/// The maps of up rows, where gate and up rows have separate maps. There is no `w1` and no
/// `w1_ordered` where both are columns of one matrix.
struct UpGradientMaps {
  TensorMap w1;
  TensorMap w1_ordered;
  TensorMap d_w1;
};
/// Whether gradients of gate rows and of up rows are stored by separate maps: where they lie apart,
/// or side by side in a row of a transposed matrix.
inline constexpr bool kUpGradientMaps =
    kUpMaps || (kTransposed && kShape.gated() && kGateUp == GateUp::concatenated);

struct GradientArguments : SavingArguments {
  GradientMaps gradients;
  const u8* d_out;        // [rows, H]
  u8* d_x;                // [rows, H]
  float* d_topk_weights;  // [rows, k]: zeros, into which those of choices that were sent are
                          // written
  u8* d_w1;               // gradients of the weights over all rows, laid out as the weights; or
                          // null: not wanted
  u8* d_w2;
  u8* d_b1;
  u8* d_b2;
  // For ranks that have slices of the same experts, or null:
  const float* d_x_added;  // [rows, H], added to this slice's part of d_x
  float* d_shared;         // [rows], this slice's part, over which the sum is written
  u32 blocks;              // of the launch that makes the weights' gradients
  u32 experts;  // of this rank: a placement table may give it fewer than there are places
  u8* d_w3;     // as d_w1, for up rows that are a tensor of their own
  alignas(TensorMap) UpGradientMaps up_gradients;
};

inline const GradientArguments& of_gradients(const RankArguments& arguments) {
  return static_cast<const GradientArguments&>(arguments);
}

/// The index of a segment's first row among kept rows: its source's rows are in the order of
/// sending.
inline u32 first_kept(const RankArguments& arguments, const Task& task, const Segment& segment) {
  return segment.source * kKeptOfSource + first_sent(arguments, task, segment);
}

}  // namespace moeos::sm90
