// SPDX-License-Identifier: Apache-2.0
// The consumers' loop over the stages of a narrow tile whose weights are quantized to 4 bits and
// whose rows are plain (W4A16): each lane dequantizes its own operands.
//
// Nothing is written back to the stages, and no warp waits for another one. Each of eight warps has
// 16 of the part's 128 weight rows, as rows of its products, and all of the tile's tokens as their
// columns, eight at a time. Since a stage is used only briefly, more stages are under way. Sums are
// added up in the order of other tiles. Must not depend on: where results go.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/mainloop/token_columns.cuh"
#include "kernels/sm90/operands/stored_weights.cuh"
#include "kernels/sm90/ptx/mma.cuh"

namespace moeos::sm90 {

inline constexpr u32 kLaneColumns = 32;  // columns of two products, whose codes a lane dequantizes
                                         // together
inline constexpr u32 kProductTokens = 8;

/// A lane's scales of its two rows of weights. Four lanes have the same rows: each keeps the scales
/// of one of four steps, and passes them to the others. So a lane asks for scales in one step of
/// four. `kBoxes`: boxes of a step.
template <u32 kBoxes>
class LaneScales {
 public:
  static constexpr u32 kSteps = 4;
  static constexpr u32 kColumns = scale_columns(kFormat, kShape.hidden);
  static constexpr u32 kBytes = scale_bytes(kFormat);
  static constexpr u32 kOfStep = maximum(1U, kBoxes* kTileDepth / kColumns);  // of a row
  static constexpr u32 kWords = ceil_div(kOfStep * kBytes, 4U);

  /// `place`: index of the first row in a stage.
  LaneScales(const RankArguments& arguments, const Task& task, u32 part, u32 place, u32 lane)
      : lane_(lane) {
    const Product product = product_of(task);
    const u32 first = lane % kSteps * kOfStep;
    left_ = static_cast<i32>(scales_of_row(kFormat, product.depth)) - static_cast<i32>(first);
    const u8* all = product.activated ? arguments.w1_scale : arguments.w2_scale;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const WeightRow row = weight_row_at(task, part, task.local_expert, place + 8 * lower);
      next_[lower] = scales_of(row, product, all) + first * kBytes;
      if constexpr (kFormat == WeightFormat::nvfp4) {  // a warp's rows are of one matrix
        of_matrix_ = (product.activated ? arguments.w1_scale_2 : arguments.w2_scale_2)[row.matrix];
      }
    }
  }

  /// Asks for the scales of the next four steps. Beyond the row: zeros.
  void ask() {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (u32 nth = 0; nth < kOfStep; ++nth) {
        const bool there = static_cast<i32>(nth) < left_;
        asked_[lower][nth] = there ? stored_scale(next_[lower], nth) : 0;
      }
      next_[lower] += kSteps * kOfStep * kBytes;
    }
    left_ -= static_cast<i32>(kSteps * kOfStep);
  }
  /// Takes the scales that were asked for, when their steps begin. Also before the first step:
  /// otherwise each register would have to keep its old value through all parts.
  void take() {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (u32 word = 0; word < kWords; ++word) {
        kept_[lower][word] = 0;
#pragma unroll
        for (u32 at = 0; at < 4; at += kBytes) {
          kept_[lower][word] |= asked_[lower][(word * 4 + at) / kBytes] << 8 * at;
        }
      }
    }
  }
  /// Distributes a step's scales when the step begins. By all lanes.
  void begin(u32 step) {
    const u32 lane = lane_ / 4 * 4 + step % kSteps;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (u32 word = 0; word < kWords; ++word) {
        of_step_[lower][word] = __shfl_sync(~0U, kept_[lower][word], static_cast<int>(lane));
      }
    }
  }

  /// Whether the warp's scales in this step are all small. By all lanes.
  bool are_all_small() const {
    u32 all = 0;
#pragma unroll
    for (u32 word = 0; word < kWords; ++word) {
      all |= of_step_[0][word] | of_step_[1][word];
    }
    return kFormat != WeightFormat::mxfp4 || Machine::ballot(!are_small(all)) == 0;
  }
  /// The `nth` scale of a row in the step.
  template <bool kSmall>
  CodeScale<kSmall> of(u32 lower, u32 nth) const {
    const u32 at = nth * kBytes;
    const u32 which = kBytes == 2 ? 0x4410U + at % 4 * 0x11U : 0x4440U + at % 4;
    return {permute_bytes(of_step_[lower][at / 4], 0, which), of_matrix_};
  }

 private:
  u32 lane_;
  const u8* next_[2];
  i32 left_;  // scales of a row, from there on
  float of_matrix_ = 1.0F;
  u32 asked_[2][kOfStep];
  u32 kept_[2][kWords];
  u32 of_step_[2][kWords];
};

/// Codes of 32 columns of a lane's two rows of weights.
struct LaneCodes {
  uint4 of[2];

  /// Reads 32 columns' codes, the `nth` of a step of `kBoxes` boxes. `place`: index of the first
  /// row in the stage.
  template <u32 kBoxes>
  static LaneCodes read(const Stage& stage, u32 place, u32 nth) {
    constexpr u32 kRowBytes = kBoxes == kDeepDepth ? kSwizzleBytes : kCodeBytes;
    constexpr u32 kPieces = kRowBytes / sizeof(uint4);  // of a row, swizzled by TMA
    const u32 turn = place / (kSwizzleBytes / kRowBytes) % kPieces;
    const u8* const row = stage.weights + nth / kPieces * kNarrowColumns * kSwizzleBytes +
                          place * kRowBytes + (nth % kPieces ^ turn) * sizeof(uint4);
    LaneCodes codes;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      codes.of[lower] = *reinterpret_cast<const uint4*>(row + lower * 8 * kRowBytes);
    }
    return codes;
  }
};

/// A warp's operands for 32 columns: 16 rows of weights.
struct WarpWeights {
  u32 of[kLaneColumns / 16][4];

  /// `nth`: which 32 columns of the step.
  template <bool kSmall, u32 kBoxes>
  static WarpWeights make(const LaneCodes& codes, u32 lane, const LaneScales<kBoxes>& scales,
                          u32 nth) {
    constexpr u32 kScales = kLaneColumns / minimum(LaneScales<kBoxes>::kColumns, kLaneColumns);
    const u32 which = lane % 4 * 0x11U + 0x40U;  // one byte of each of two words
    WarpWeights made;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const uint4& all = codes.of[lower];
      const u32 mine = permute_bytes(permute_bytes(all.x, all.y, which),
                                     permute_bytes(all.z, all.w, which), 0x5410U);
      u32 pairs[4];
      begin_numbers(pairs, mine);
#pragma unroll
      for (u32 nth_scale = 0; nth_scale < kScales; ++nth_scale) {
        const auto scale = scales.template of<kSmall>(lower, nth * kScales + nth_scale);
#pragma unroll
        for (u32 i = nth_scale * 4 / kScales; i < (nth_scale + 1) * 4 / kScales; ++i) {
          made.of[i / 2][i % 2 * 2 + lower] = scale(pairs[i]);
        }
      }
    }
    return made;
  }
};

/// The initial values of a lane's sums: the biases of its two rows of weights, or zeros.
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
      values[lower] =
          Element::low(biases[row_in_memory(product, row.matrix, row.row, product.columns)]);
    }
  }
#pragma unroll
  for (u32 i = 0; i < kColumnSums; ++i) {
    d[i] = values[i / 2 % 2];
  }
}

/// d += a warp's products of a step, whose stage it releases. `place`: index of the lane's first
/// row in the stage; `kSmall`: as for CodeScale.
template <u32 kTokens, u32 kBoxes, bool kSmall>
inline void multiply_step(float (&d)[kColumnSums], Shared& shared, u32 index, u32 place, u32 lane,
                          const LaneScales<kBoxes>& scales) {
  constexpr u32 kOfBox = kTileDepth / kLaneColumns;
  constexpr u32 kRowsOfBox = kBoxes == kDeepDepth ? kWarpTokens : kNarrowRows;
  constexpr u32 kProducts = kTokens / kProductTokens;
  const Stage& stage = shared.stages[index];
  // The lane's row of matrices of columns: pieces of 16 bytes, swizzled within 128.
  const u8* const rows = stage.rows + lane % 8 * kSwizzleBytes;
#pragma unroll
  for (u32 box = 0; box < kBoxes; ++box) {
    // All codes of a box at once: reading takes long.
    const LaneCodes read[kOfBox] = {LaneCodes::read<kBoxes>(stage, place, box * kOfBox),
                                    LaneCodes::read<kBoxes>(stage, place, box * kOfBox + 1)};
#pragma unroll
    for (u32 nth = 0; nth < kOfBox; ++nth) {
      const u8* const pieces =
          rows + box * kRowsOfBox * kSwizzleBytes + ((nth * 4 + lane / 8) ^ lane % 8) * 16;
      u32 columns[kProducts][4];
#pragma unroll
      for (u32 product = 0; product < kProducts; ++product) {
        load_matrices(columns[product], pieces + product * kProductTokens * kSwizzleBytes);
      }
      if (box + 1 == kBoxes && nth + 1 == kOfBox) {
        release_read_stage(shared, index);
      }
      const auto weights = WarpWeights::make<kSmall>(read[nth], lane, scales, box * kOfBox + nth);
#pragma unroll
      for (u32 product = 0; product < kProducts; ++product) {
        float* const sums = d + product * kProductTokens / 2;
        const auto& of = columns[product];
        multiply_in_warp<MOEOS_FLOAT16>(sums, weights.of[0], of[0], of[1]);
        multiply_in_warp<MOEOS_FLOAT16>(sums, weights.of[1], of[2], of[3]);
      }
    }
  }
}

/// d += a warp's 16 rows of a part's weights times a tile's tokens: four accumulators for eight
/// tokens.
template <u32 kTokens, u32 kBoxes>
inline void multiply_rows_of_warp(float (&d)[kColumnSums], const RankArguments& arguments,
                                  const Task& task, u32 part, Shared& shared,
                                  RingPosition<kStages>& stage) {
  // Computed again for each part: there is no register to keep it in.
  const u32 thread = Machine::opaque(threadIdx.x);
  const u32 lane = thread % 32;
  const u32 place = (thread / 32 - kFirstConsumerWarp) * kWarpRows + lane / 4;
  const u32 steps = steps_of(task);
  if (steps == 0) {
    return;
  }
  LaneScales<kBoxes> scales(arguments, task, part, place, lane);
  scales.ask();
  scales.take();
  scales.ask();
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    scales.begin(step);
    const bool small = scales.are_all_small();
    shared.stage_full[stage.index].wait(stage.parity);
    if (small) {
      multiply_step<kTokens, kBoxes, true>(d, shared, stage.index, place, lane, scales);
    } else {
      multiply_step<kTokens, kBoxes, false>(d, shared, stage.index, place, lane, scales);
    }
    if (step % LaneScales<kBoxes>::kSteps == LaneScales<kBoxes>::kSteps - 1) {
      scales.take();
      scales.ask();
    }
  }
}

/// exchange_sums for few rows: the sums of both warpgroups have room at once.
inline void exchange_few_sums(float (&to)[kCodedSums], const float (&d)[kColumnSums], u32 rows,
                              u32 group, Shared& shared) {
  constexpr u32 kSums = kWarpTokens / 2;
  constexpr u32 kPlaces = kWarpTokens * kColumnWeights;  // of a warpgroup
  static_assert(kConsumers * kPlaces * sizeof(float) <= kRouteMemory);
  if (rows == 0) {
    return;  // a warp that rehearses has no others to meet
  }
  auto* const sums = reinterpret_cast<float*>(shared.route);
  const u32 row = first_weight_row();
  const u32 pair = of_part(Machine::lane()) % 4 * 2;
  named_barrier(kConsumersBarrier, kConsumerThreads);  // what was there has been read
#pragma unroll
  for (u32 i = 0; i < kSums; ++i) {
    const u32 first = 2 * (i - i % 4);  // of eight tokens
    if (first < rows) {
      sums[of_part(group) * kPlaces + place_of_sum(first + pair + i % 2, row + i / 2 % 2 * 8)] =
          d[i];
    }
  }
  named_barrier(kConsumersBarrier, kConsumerThreads);
  if (of_part(group) == 0 && of_part(threadIdx.x) / 32 % 4 * kWarpRows < rows) {
#pragma unroll
    for (u32 i = 0; i < kCodedSums; i += 2) {
      const u32 of_group = i % kColumnSums;
      const u32 at = place_of_sum(row + i / 2 % 2 * 8, 2 * (of_group - of_group % 4) + pair);
      const auto two = *reinterpret_cast<const float2*>(&sums[i / kColumnSums * kPlaces + at]);
      to[i] = two.x;
      to[i + 1] = two.y;
    }
  }
  named_barrier(kConsumersBarrier, kConsumerThreads);  // Route may write there
}

/// multiply_rows_of_warp for the number of tokens that the tile has.
template <u32 kBoxes>
inline void multiply_rows_by_boxes(float (&d)[kColumnSums], const RankArguments& arguments,
                                   const Task& task, u32 part, Shared& shared,
                                   RingPosition<kStages>& stage) {
  if (task.padded_rows <= 8) {
    multiply_rows_of_warp<8, kBoxes>(d, arguments, task, part, shared, stage);
  } else if (task.padded_rows <= 16) {
    multiply_rows_of_warp<16, kBoxes>(d, arguments, task, part, shared, stage);
  } else {
    multiply_rows_of_warp<kWarpTokens, kBoxes>(d, arguments, task, part, shared, stage);
  }
}

/// d = a narrow tile's 64 rows times its weights, plus biases, in the layout of accumulators.cuh:
/// in the warpgroup whose rows they are; by both. `kUsed`: kWeightsInRegisters.
template <bool kUsed>
inline void multiply_in_warps(float (&d)[kCodedSums], const RankArguments& arguments,
                              const Task& task, u32 part, u32 group, Shared& shared,
                              RingPosition<kStages>& stage) {
  if constexpr (kUsed) {
    float sums[kColumnSums];
    start_rows(sums, arguments, task, part);
    // For other numbers of tokens some unused columns are multiplied, too.
    if (!is_deep(task)) {
      multiply_rows_by_boxes<kNarrowDepth>(sums, arguments, task, part, shared, stage);
    } else {
      multiply_rows_by_boxes<kDeepDepth>(sums, arguments, task, part, shared, stage);
    }
#pragma unroll
    for (float& sum : d) {
      sum = 0.0F;
    }
    exchange_few_sums(d, sums, task.padded_rows, group, shared);
  }
}

}  // namespace moeos::sm90
