// SPDX-License-Identifier: Apache-2.0
// The consumers' loop over the stages of a narrow tile whose weights are codes of 4 bits and whose
// rows are numbers: each lane decodes its own operands of products.
//
// Nothing is written back to the stages, and no warp waits for another one. Each of eight warps has
// 16 of the part's 128 weights, as rows of its products, and all of the tile's tokens as their
// columns, eight at a time. A stage is used for a short time then, so more of them are on their
// way. Sums are added up in the order that other tiles have. May not know: where results go.
#pragma once

#include "kernels/sm90/accumulators.cuh"
#include "kernels/sm90/ptx/mma.cuh"
#include "kernels/sm90/stored_weights.cuh"
#include "kernels/sm90/token_columns.cuh"

namespace moeos::sm90 {

/// Whether a kernel has such tiles; and whether one is.
inline constexpr bool kWeightsInRegisters = kDecodesExperts && !is_fp8(kFormat);
inline bool is_in_warps(const Task& task) {
  return kWeightsInRegisters && task.narrow != 0 && !is_shared(task);
}

inline constexpr u32 kLaneColumns = 32;  // of two products, whose codes a lane decodes together
inline constexpr u32 kProductTokens = 8;

/// A lane's scales of its two rows of weights in the steps of a part. Of a row's scales in a step
/// each of the four lanes that have it keeps a quarter.
class LaneScales {
 public:
  static constexpr u32 kColumns = scale_columns(kFormat, kShape.hidden);
  static constexpr u32 kOfLane =
      maximum(1U, kNarrowDepth* kTileDepth / minimum(kColumns, kLaneColumns) / 4);
  /// In a step, as they are stored.
  struct Stored {
    u32 of[2][kOfLane];
  };

  /// `place`: of the first row in a stage.
  LaneScales(const RankArguments& arguments, const Task& task, u32 part, u32 place, u32 lane)
      : lane_(lane), depth_(product_of(task).depth) {
    const Product product = product_of(task);
    const u8* all = product.activated ? arguments.w1_scale : arguments.w2_scale;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const WeightRow row = weight_row_at(task, part, task.local_expert, place + 8 * lower);
      rows_[lower] = scales_of(row, product, all);
      if constexpr (kFormat == WeightFormat::nvfp4) {  // a warp's rows are of one matrix
        of_matrix_ = (product.activated ? arguments.w1_scale_2 : arguments.w2_scale_2)[row.matrix];
      }
    }
  }

  /// Asks for those of a step. Beyond the row: zeros.
  Stored load(u32 step) const {
    Stored stored;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (u32 nth = 0; nth < kOfLane; ++nth) {
        const u32 index = (step * 4 + lane_ % 4) * kOfLane + nth;
        stored.of[lower][nth] = index * kColumns < depth_ ? stored_scale(rows_[lower], index) : 0;
      }
    }
    return stored;
  }

  /// They are the step's.
  void set(const Stored& stored) {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (u32 nth = 0; nth < kOfLane; ++nth) {
        scales_[lower][nth] = CodeScale(stored.of[lower][nth], of_matrix_);
      }
    }
  }

  /// The `nth` of a row's in the step.
  CodeScale of(u32 lower, u32 nth) const {
    return scales_[lower][nth % kOfLane].of_lane(lane_ / 4 * 4 + nth / kOfLane);
  }

 private:
  u32 lane_;
  u32 depth_;
  const u8* rows_[2];
  float of_matrix_ = 1.0F;
  CodeScale scales_[2][kOfLane];
};

/// A warp's products of 32 columns: 16 rows of weights.
struct WarpWeights {
  u32 of[kLaneColumns / 16][4];

  /// `row`: of codes of 64 columns, which TMA has swizzled; `nth`: of its halves, the first of
  /// which lies behind the second where `turn` is 1. `column`: in the step.
  WarpWeights(const u8* row, u32 nth, u32 turn, u32 lane, const LaneScales& scales, u32 column) {
    constexpr u32 kScales = kLaneColumns / minimum(LaneScales::kColumns, kLaneColumns);
    const u32 which = lane % 4 * 0x11U + 0x40U;  // a byte of each of two words
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const uint4 codes =
          *reinterpret_cast<const uint4*>(row + lower * 8 * kCodeBytes + (nth ^ turn) * 16);
      const u32 mine = permute_bytes(permute_bytes(codes.x, codes.y, which),
                                     permute_bytes(codes.z, codes.w, which), 0x5410U);
      u32 pairs[4];
      numbers_of(pairs, mine);
#pragma unroll
      for (u32 nth_scale = 0; nth_scale < kScales; ++nth_scale) {
        const CodeScale scale = scales.of(lower, column / kLaneColumns * kScales + nth_scale);
#pragma unroll
        for (u32 i = nth_scale * 4 / kScales; i < (nth_scale + 1) * 4 / kScales; ++i) {
          of[i / 2][i % 2 * 2 + lower] = scale(pairs[i]);
        }
      }
    }
  }
};

/// What a lane's sums start from: the biases of its two rows of weights, or zeros.
inline void start_rows(float (&d)[kColumnSums], const RankArguments& arguments, const Task& task,
                       u32 part) {
  float values[2] = {};
  if constexpr (kBias) {
    const Product product = product_of(task);
    const auto* biases =
        reinterpret_cast<const u16*>(product.activated ? arguments.b1 : arguments.b2);
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const WeightRow row =
          weight_row_at(task, part, task.local_expert, tile_row(lower) + Machine::lane() / 4);
      values[lower] = Element::low(biases[u64{row.matrix} * product.columns + row.row]);
    }
  }
#pragma unroll
  for (u32 i = 0; i < kColumnSums; ++i) {
    d[i] = values[i / 2 % 2];
  }
}

/// d += a warp's 16 rows of a part's weights times a tile's tokens: fours of eight of them each.
template <u32 kTokens>
inline void multiply_rows_of_warp(float (&d)[kColumnSums], const RankArguments& arguments,
                                  const Task& task, u32 part, Shared& shared,
                                  RingPosition<kStages>& stage) {
  // Worked out again for each part: there is no register to keep it in.
  const u32 thread = Machine::opaque(threadIdx.x);
  const u32 lane = thread % 32;
  const u32 place = (thread / 32 - kFirstConsumerWarp) * kWarpRows + lane / 4;
  const u32 turn = place / (kSwizzleBytes / kCodeBytes) % 2;
  const u32 steps = steps_of(task);
  if (steps == 0) {
    return;
  }
  LaneScales scales(arguments, task, part, place, lane);
  // Scales are asked for two steps ahead: a fence between proxies waits for loads, too.
  LaneScales::Stored next = scales.load(0);
  LaneScales::Stored second = scales.load(1);
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    scales.set(next);
    next = second;
    second = scales.load(step + 2);
    shared.stage_full[stage.index].wait(stage.parity);
    const Stage& from = shared.stages[stage.index];
    const u8* const codes = from.weights + place * kCodeBytes;
    // The lane's row of matrices of columns: pieces of 16 bytes, swizzled within 128.
    const u8* const rows = from.rows + lane % 8 * kSwizzleBytes;
#pragma unroll
    for (u32 box = 0; box < kNarrowDepth; ++box) {
#pragma unroll
      for (u32 nth = 0; nth < kTileDepth / kLaneColumns; ++nth) {
        const WarpWeights weights(codes + box * kNarrowColumns * kSwizzleBytes, nth, turn, lane,
                                  scales, box * kTileDepth + nth * kLaneColumns);
        const u8* const pieces =
            rows + box * kNarrowRows * kSwizzleBytes + ((nth * 4 + lane / 8) ^ lane % 8) * 16;
#pragma unroll
        for (u32 token = 0; token < kTokens; token += kProductTokens) {
          u32 columns[4];
          load_matrices(columns, pieces + token * kSwizzleBytes);
          float* const sums = d + token / 2;
          multiply_in_warp<MOEOS_FLOAT16>(sums, weights.of[0], columns[0], columns[1]);
          multiply_in_warp<MOEOS_FLOAT16>(sums, weights.of[1], columns[2], columns[3]);
        }
      }
    }
    release_read_stage(shared, stage.index);
  }
}

/// d = a narrow tile's 64 rows times its weights, plus biases, as accumulators.cuh has them: of the
/// warpgroup whose rows they are, by both. `kUsed`: kWeightsInRegisters.
template <bool kUsed>
inline void multiply_in_warps(float (&d)[kCodedSums], const RankArguments& arguments,
                              const Task& task, u32 part, u32 group, Shared& shared,
                              RingPosition<kStages>& stage) {
  if constexpr (kUsed) {
    float sums[1][kColumnSums];
    start_rows(sums[0], arguments, task, part);
    // Of other numbers of tokens some are multiplied that nobody sent.
    if (task.padded_rows <= 8) {
      multiply_rows_of_warp<8>(sums[0], arguments, task, part, shared, stage);
    } else if (task.padded_rows <= 16) {
      multiply_rows_of_warp<16>(sums[0], arguments, task, part, shared, stage);
    } else if (task.padded_rows <= 32) {
      multiply_rows_of_warp<32>(sums[0], arguments, task, part, shared, stage);
    } else {
      multiply_rows_of_warp<kNarrowRows>(sums[0], arguments, task, part, shared, stage);
    }
#pragma unroll
    for (float& sum : d) {
      sum = 0.0F;
    }
    exchange_sums(d, sums, task.padded_rows, group, shared);
  }
}

}  // namespace moeos::sm90
