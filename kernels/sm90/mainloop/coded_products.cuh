// SPDX-License-Identifier: Apache-2.0
// The consumers' loop over the stages of a part whose rows and weights are quantized to 8 bits: FP8
// by FP8 (W8A8).
//
// Tensor cores add up products of FP8 codes with fewer digits than fp32 has, so they add up only
// one scale group at a time (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The consumers add its
// sums, times the scales of its row and of its weights, to d. While one warpgroup does so, the
// other one multiplies. Scales are read from memory, a step before they are used: a row's scales
// lie after its codes (kernels/element_formats.hpp). Must not depend on: where results go.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

inline constexpr u32 kCodedSums = kNarrowColumns / 2;  // of a thread

/// Where the codes of a tile's row begin. For a row beyond the tile's rows: where another row's
/// begin.
inline const u8* coded_row(const RankArguments& arguments, const Task& task, u32 row) {
  if (task.from == RowsIn::between) {
    const u32 nth = task.first_result + minimum(row, u32{task.padded_rows} - 1);
    return arguments.intermediate_rows + u64{nth} * kGeometry.hidden_bytes;
  }
  const Layout layout(kGeometry, arguments.place);
  u32 index = 0;
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const u32 rows = laid_out_rows(kGeometry, task, s, first);
    if (s == 0 || (row >= first && row < first + rows)) {
      const Segment segment = task.segments[s];
      const u32 within = row >= first && row < first + rows ? row - first : 0;
      index = layout.row_index(segment.source, segment.first_row) + within;
    }
    first += rows;
  }
  return arguments.heap + layout.row_at(index);
}

/// Scales of a thread's two rows, and of the two halves of its part's columns, which may belong to
/// two matrices or to two blocks. `kBoxes`: boxes of codes along the depth in a stage.
template <const Product& kProduct, u32 kBoxes>
class PartScales {
 public:
  static constexpr u32 kGroup = kProduct.activated ? kTokenGroup : kHiddenGroup;
  static constexpr u32 kGroups = kCodedDepth / kGroup;  // in a box

  PartScales(const RankArguments& arguments, const Task& task, u32 part) {
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const u8* row = coded_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
      rows_[lower] = reinterpret_cast<const float*>(row + kProduct.depth);
    }
    const u32 first = first_column_of(task, part);
    const auto* scales = reinterpret_cast<const float*>(kProduct.activated ? arguments.w1_scale
                                                                           : arguments.w2_scale);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 matrix = kMatrices * task.local_expert + (kMatrices == 2 ? half : 0);
      const u32 column = first + (kMatrices == 2 ? 0 : half * kNarrowColumns / 2);
      // A part may reach beyond its matrix. Results of such columns are discarded.
      const u32 row = scale_row(kFormat, minimum(column, kProduct.columns - 1));
      weights_[half] = scales + (u64{matrix} * scale_rows(kFormat, kProduct.columns) + row) *
                                    scales_of_row(kFormat, kProduct.depth);
    }
    load(0);
  }

  /// Asks for the scales of a step. Rows' scales have been acquired with the part, as the rows
  /// have: by the fetch warp, whose slot barrier passes them on to this warp. Beyond the row: any
  /// scales, for codes that are zeros.
  void load(u32 step) {
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      const u32 column = minimum((step * kBoxes + box) * kCodedDepth, kProduct.depth - 1);
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        of_weights_[half][box] =
            kByChannel ? 1.0F : weights_[half][column / scale_columns(kFormat, kProduct.depth)];
      }
#pragma unroll
      for (u32 group = 0; group < kGroups; ++group) {
        const u32 index =
            minimum((step * kBoxes + box) * kGroups + group, kProduct.depth / kGroup - 1);
#pragma unroll
        for (u32 lower = 0; lower < 2; ++lower) {
          of_rows_[lower][box * kGroups + group] = rows_[lower][index];
        }
      }
    }
  }

  /// d += sums of one group, times its scales.
  void add(float (&d)[kCodedSums], const float (&sums)[kCodedSums], u32 box, u32 group) const {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 lower = 0; lower < 2; ++lower) {
        const float scale = of_rows_[lower][box * kGroups + group] * of_weights_[half][box];
#pragma unroll
        for (u32 i = 0; i < kCodedSums / 2; i += 4) {
#pragma unroll
          for (u32 j = 0; j < 2; ++j) {
            const u32 at = half * kCodedSums / 2 + i + 2 * lower + j;
            d[at] += sums[at] * scale;
          }
        }
      }
    }
  }

 private:
  static constexpr u32 kMatrices = kProduct.activated && kShape.gated() ? 2 : 1;  // of an expert
  static constexpr bool kByChannel = kFormat == WeightFormat::fp8_channel;  // scale_channels()

  const float* rows_[2];
  const float* weights_[2];
  float of_rows_[2][kBoxes * kGroups];
  float of_weights_[2][kBoxes];
};

/// sums = the products of one group, from a stage's rows and columns.
template <u32 kGroup>
inline void multiply_group(float (&sums)[kCodedSums], const u8* rows, const u8* columns) {
  constexpr u32 kInstructionBytes = 32;
  multiply_codes<false>(sums, matrix_descriptor(rows), matrix_descriptor(columns));
#pragma unroll
  for (u32 k = kInstructionBytes; k < kGroup; k += kInstructionBytes) {
    multiply_codes<true>(sums, matrix_descriptor(rows + k), matrix_descriptor(columns + k));
  }
}

/// d += the warpgroup's 64 rows of a tile times a part's weights. `kBoxes`: as in PartScales; more
/// than one for a narrow tile.
template <const Product& kProduct, u32 kBoxes>
inline void multiply_coded(float (&d)[kCodedSums], const RankArguments& arguments, const Task& task,
                           u32 part, u32 group, Shared& shared, RingPosition<kStages>& stage) {
  using Scales = PartScales<kProduct, kBoxes>;
  Scales scales(arguments, task, part);
  float sums[kCodedSums] = {};
  const u32 steps = steps_of(task);
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    Scales next = scales;
    next.load(minimum(step + 1, steps - 1));
    shared.stage_full[stage.index].wait(stage.parity);
    const Stage& from = shared.stages[stage.index];
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      const u8* rows =
          from.rows + (kBoxes > 1 ? box * kNarrowRows : group * kConsumerRows) * kSwizzleBytes;
      const u8* columns = from.weights + box * kNarrowColumns * kSwizzleBytes;
#pragma unroll
      for (u32 nth = 0; nth < Scales::kGroups; ++nth) {
        hold(sums);
        wgmma_fence();
        multiply_group<Scales::kGroup>(sums, rows + nth * Scales::kGroup,
                                       columns + nth * Scales::kGroup);
        wgmma_commit();
        wgmma_wait<0>();
        hold(sums);
        if (box + 1 == kBoxes && nth + 1 == Scales::kGroups) {
          release_stage(shared, stage.index);
        }
        scales.add(d, sums, box, nth);
      }
    }
    scales = next;
  }
}

/// Multiplies a thread's sums by the scales of their columns, where each column has one, and adds
/// their biases: then start_accumulators has begun without biases.
template <const Product& kProduct>
inline void scale_channels(float (&d)[kCodedSums], const RankArguments& arguments, const Task& task,
                           u32 part) {
  constexpr bool kGated = kProduct.activated && kShape.gated();
  constexpr bool kRowsAlternate = kGated && kGateUp == GateUp::interleaved;
  const u32 first = first_column_of(task, part);
  const u64 matrix = u64{task.local_expert} * (kGated ? 2 : 1) * kProduct.columns;
  const auto* scales =
      reinterpret_cast<const float*>(kProduct.activated ? arguments.w1_scale : arguments.w2_scale);
  const auto* biases =
      reinterpret_cast<const u32*>(kProduct.activated ? arguments.b1 : arguments.b2);
#pragma unroll
  for (u32 i = 0; i < kCodedSums; i += 4) {
    const u32 column = first + ordered_column(kGated ? i % (kCodedSums / 2) : i);
    const bool of_ups = kGated && i >= kCodedSums / 2;
    const u32 up = of_ups ? kProduct.columns : 0;
    const u32 there = minimum(column, kProduct.columns - 2);
    u64 at = matrix + up + there;
    u64 next = at + 1;
    float2 bias = make_float2(0.0F, 0.0F);
    if constexpr (kRowsAlternate) {
      at = matrix + 2 * there + (of_ups ? 1 : 0);
      next = at + 2;
    }
    if constexpr (kBias) {
      bias = kRowsAlternate ? alternate_pair(biases, at / 2, of_ups) : pair_of_word(biases[at / 2]);
    }
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      d[i + 2 * lower] = d[i + 2 * lower] * scales[at] + bias.x;
      d[i + 2 * lower + 1] = d[i + 2 * lower + 1] * scales[next] + bias.y;
    }
  }
}

}  // namespace moeos::sm90
