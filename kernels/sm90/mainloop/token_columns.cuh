// SPDX-License-Identifier: Apache-2.0
// The consumers' loop over the stages of a part whose rows are quantized to 8 bits and whose
// weights are quantized to 4 (W4A8): tokens are the columns of its products, and rows of weights
// the rows.
//
// So wgmma takes weights from registers, where each thread makes e4m3 codes of its own codes: every
// value of 4 bits has one. Each warpgroup has half of the part's weights and all of its tokens, 64
// at a time, or 16 if there are no more: adding up takes instructions for each column. A thread's
// weights belong to two rows, hence to two scales. Their products are added up in fp32, scale by
// scale: a weight's scale is applied once for 32 or 16 columns, a token's once for its group.
// Scales of tokens, one a column, pass through Route's memory. So do sums, in the end: each
// warpgroup then takes from there the tokens that are its rows in every other tile, so that the
// epilogue is common. Must not depend on: where results go.
#pragma once

#include "kernels/sm90/mainloop/coded_products.cuh"
#include "kernels/sm90/operands/stored_weights.cuh"

namespace moeos::sm90 {

inline constexpr u32 kColumnTokens = kConsumerRows;  // of a product, at most
inline constexpr u32 kFewTokens = 16;                // or this many
inline constexpr u32 kColumnHalves = kTileRows / kColumnTokens;
inline constexpr u32 kColumnWeights = kConsumerRows;   // rows of a warpgroup's weights
inline constexpr u32 kColumnSums = kColumnTokens / 2;  // of a thread
inline constexpr u32 kProductCodes = 32;               // along the depth
inline constexpr u32 kWeightsOfScale = scale_columns(kFormat, kShape.hidden);
/// Whether scales, which are powers of two, may be folded into codes: where the scales of 128
/// columns of a row are not far apart. Then what is added up has one scale.
inline constexpr bool kFoldsScales = kFormat == WeightFormat::mxfp4;
static_assert(!kTokensAreColumns ||
              (kProductCodes % kWeightsOfScale == 0 && 2 * kColumnWeights == kTileColumns));

/// The first of a thread's rows of its warpgroup's weights.
inline u32 first_weight_row() {
  const u32 thread = of_part(threadIdx.x);
  return thread / 32 % 4 * kWarpRows + thread % 32 / 4;
}

/// The e4m3 codes of the magnitudes of e2m1, 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times a power of two.
struct Magnitudes {
  u32 low = 0x3C383000U;
  u32 high = 0x4C484440U;

  /// Magnitudes times 2^(nth - 5); e4m3 represents all up to kPowers - 1.
  static constexpr u32 kPowers = 12;
  static Magnitudes times_power(u32 nth) {
    return {0x14100800U + nth * 0x08080800U, 0x24201C18U + nth * 0x08080808U};
  }
};

/// The e4m3 codes of four 4-bit ones, which are the lower 16 bits; other bits may be anything.
inline u32 e4m3_of(u32 codes, const Magnitudes& magnitudes) {
  // Bytes whose first bit is set: permute_bytes fills bytes that the codes' own first bits choose.
  constexpr u32 kSigned = 0x80808080U;
  if constexpr (kFormat == WeightFormat::int4_group32) {
    const u32 other = codes ^ 0x8888U;  // whose first bit means: below zero
    const u32 below = permute_bytes(0x4A4C4E50U, 0x38404448U, codes);   // 8, 7, ... 1, or 0
    const u32 others = permute_bytes(0x44403800U, 0x4E4C4A48U, other);  // 0, 1, ... 7, or 0
    return below | others | (permute_bytes(kSigned, kSigned, other) << 1 & kSigned);
  } else {
    return permute_bytes(magnitudes.low, magnitudes.high, codes & 0x7777U) |
           (permute_bytes(kSigned, kSigned, codes) << 1 & kSigned);
  }
}

/// A thread's scales in the steps of a part: those of its two rows of weights, of which each of
/// four lanes keeps a quarter, and one scale of a token, for all other threads. `kColumns`: tokens
/// of the tile; `kBoxes`: boxes of codes along the depth in a stage.
template <const Product& kProduct, u32 kColumns, u32 kBoxes>
class ColumnScales {
 public:
  static constexpr u32 kGroup = kProduct.activated ? kTokenGroup : kHiddenGroup;
  static constexpr u32 kGroups = kCodedDepth / kGroup;  // in a box

  ColumnScales(const RankArguments& arguments, const Task& task, u32 part, u32 group) {
    tokens_ = reinterpret_cast<const float*>(coded_row(arguments, task, thread() % kColumns) +
                                             kProduct.depth);
    const u32 first = group * kColumnWeights + first_weight_row();
    const u8* all = kProduct.activated ? arguments.w1_scale : arguments.w2_scale;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const WeightRow row = weight_row_at(task, part, task.local_expert, first + 8 * lower);
      weights_[lower] = scales_of(row, kProduct, all);
      if constexpr (kFormat == WeightFormat::nvfp4) {  // a warp's rows are of one matrix
        of_matrix_ = (kProduct.activated ? arguments.w1_scale_2 : arguments.w2_scale_2)[row.matrix];
      }
    }
    load(0);
  }

  /// Asks for the scales of a step. Beyond the row: any scales, for codes that are zeros. Rows'
  /// scales have been acquired with the part, as the rows have (PartScales::load).
  void load(u32 step) {
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (u32 nth = 0; nth < kOfLane; ++nth) {
        const u32 index = ((step * kBoxes + box) * 4 + Machine::lane() % 4) * kOfLane + nth;
#pragma unroll
        for (u32 lower = 0; lower < 2; ++lower) {
          of_weights_[lower][box * kOfLane + nth] =
              stored_scale(weights_[lower], minimum(index, kProduct.depth / kWeightsOfScale - 1));
        }
      }
    }
    const u32 nth = minimum(thread() / kColumns, kBoxes * kGroups - 1);
    of_token_ = tokens_[minimum(step * kBoxes * kGroups + nth, kProduct.depth / kGroup - 1)];
  }

  /// Passes its token's scale to all consumers: group by group of the step, token by token.
  void publish(float* all) const {
    if (thread() < kColumns * kBoxes * kGroups) {
      all[thread()] = of_token_;
    }
  }

  /// For mxfp4: finds the largest scale of each row in each box. Returns a bit for each box in
  /// which its warp's rows have scales that are too small to fold, or are NaN. By all lanes.
  u32 find_largest() {
    u32 misfits = 0;
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      bool fits = true;
#pragma unroll
      for (u32 lower = 0; lower < 2; ++lower) {
        const u32 mine = of_weights_[lower][box];
        u32 largest = maximum(mine, __shfl_xor_sync(~0U, mine, 1U));
        largest = maximum(largest, __shfl_xor_sync(~0U, largest, 2U));
        fits = fits && largest - mine < Magnitudes::kPowers && largest != 0xFF &&
               largest >= kLeastLargest;
        largest_[lower][box] = largest;
      }
      misfits |= Machine::ballot(!fits) != 0 ? 1U << box : 0;
    }
    return misfits;
  }
  /// A row's magnitudes for the `nth` 32 columns of a box, relative to its largest scale there; and
  /// that scale.
  Magnitudes folded(u32 lower, u32 box, u32 nth) const {
    const u32 lane = Machine::lane() / 4 * 4 + nth;
    const u32 scale = __shfl_sync(~0U, of_weights_[lower][box], static_cast<int>(lane));
    return Magnitudes::times_power(scale + Magnitudes::kPowers - 1 - largest_[lower][box]);
  }
  float largest(u32 lower, u32 box) const {
    return __uint_as_float((largest_[lower][box] - (Magnitudes::kPowers - 6)) << 23);
  }

  /// The scale of one of the two rows for the `nth` piece of a box that has a scale of its own.
  float of_weights(u32 lower, u32 box, u32 nth) const {
    const u32 stored = of_weights_[lower][box * kOfLane + nth % kOfLane];
    const u32 lane = Machine::lane() / 4 * 4 + nth / kOfLane;
    return scale_of(__shfl_sync(~0U, stored, static_cast<int>(lane)), of_matrix_);
  }

 private:
  static constexpr u32 kOfLane = kCodedDepth / kWeightsOfScale / 4;  // of a row in a box
  static constexpr u32 kLeastLargest = Magnitudes::kPowers - 5;      // so that no code is subnormal
  static_assert(kColumns * kBoxes * kGroups <= kConsumerThreads);
  static_assert(part_columns(kProduct, kTileColumns) % kWarpRows == 0);
  static u32 thread() { return of_part(threadIdx.x - kFirstConsumerWarp * 32); }

  const float* tokens_;
  const u8* weights_[2];
  float of_matrix_ = 1.0F;
  float of_token_;
  u32 of_weights_[2][kBoxes * kOfLane];
  u32 largest_[2][kBoxes];  // where scales are folded
};

/// A thread's codes for the `nth` 32 columns of a box, as rows of a product. `row`: its first row,
/// which TMA has swizzled within 128 bytes.
inline void decode_codes(u32 (&codes)[4], const u8* row, u32 nth, u32 turn,
                         const Magnitudes (&of_rows)[2]) {
  constexpr u32 kBytes = kProductCodes / 2;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 at = i % 2 * 8 * kCodedRowBytes + (nth ^ turn) * kBytes + i / 2 * kBytes / 2;
    codes[i] =
        e4m3_of(*reinterpret_cast<const u16*>(row + at + Machine::lane() % 4 * 2), of_rows[i % 2]);
  }
}

/// d += the products of a box whose scales are folded into codes: tensor cores add up a token's
/// group. `sums`: accumulators of the group; `published`: scales of tokens, as in
/// multiply_by_columns.
template <u32 kHalves, u32 kTokens, class Scales>
inline void multiply_folded(float (&d)[kColumnHalves][kColumnSums], float (&sums)[kTokens / 2],
                            const Scales& scales, const Stage& from, const u8* codes,
                            const float* published, u32 turn, u32 box, u32 rows) {
  constexpr u32 kColumns = kHalves * kTokens;
  constexpr u32 kOfGroup = kCodedDepth / kProductCodes / Scales::kGroups;
#pragma unroll
  for (u32 nth = 0; nth < Scales::kGroups; ++nth) {
    u32 weights[kOfGroup][4];
#pragma unroll
    for (u32 k = 0; k < kOfGroup; ++k) {
      const u32 product = nth * kOfGroup + k;
      decode_codes(weights[k], codes, product, turn,
                   {scales.folded(0, box, product), scales.folded(1, box, product)});
    }
    const float of_row[2] = {scales.largest(0, box), scales.largest(1, box)};
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      if (half * kColumnTokens >= rows) {
        continue;
      }
      const u8* const tokens = from.rows + (box + half) * kColumnTokens * kSwizzleBytes;
      hold(sums);
      wgmma_fence();
      const auto of = [&](u32 k) {
        return matrix_descriptor(tokens + (nth * kOfGroup + k) * kProductCodes);
      };
      multiply_codes<false>(sums, weights[0], of(0));
#pragma unroll
      for (u32 k = 1; k < kOfGroup; ++k) {
        multiply_codes<true>(sums, weights[k], of(k));
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(sums);
#pragma unroll
      for (u32 k = 0; k < kOfGroup; ++k) {
        hold(weights[k]);  // until here
      }
      const auto* const of_columns =
          published + (box * Scales::kGroups + nth) * kColumns + half * kColumnTokens;
#pragma unroll
      for (u32 i = 0; i < kTokens / 2; i += 4) {
        const auto two =
            *reinterpret_cast<const float2*>(of_columns + 2 * i + Machine::lane() % 4 * 2);
#pragma unroll
        for (u32 lower = 0; lower < 2; ++lower) {
          d[half][i + 2 * lower] += sums[i + 2 * lower] * of_row[lower] * two.x;
          d[half][i + 2 * lower + 1] += sums[i + 2 * lower + 1] * of_row[lower] * two.y;
        }
      }
    }
  }
}

/// d += the warpgroup's 64 rows of a part's weights times a tile's tokens. `kHalves`: halves of a
/// tile, of 64 tokens each; `kTokens`: tokens of a product.
template <const Product& kProduct, u32 kHalves, u32 kTokens = kColumnTokens>
inline void multiply_by_columns(float (&d)[kColumnHalves][kColumnSums],
                                const RankArguments& arguments, const Task& task, u32 part,
                                u32 group, Shared& shared, RingPosition<kStages>& stage) {
  constexpr u32 kColumns = kHalves * kTokens;
  constexpr u32 kSums = kTokens / 2;  // of a thread
  constexpr u32 kBoxes = kHalves == 1 ? kNarrowDepth : 1;
  using Scales = ColumnScales<kProduct, kColumns, kBoxes>;
  constexpr u32 kProducts = kCodedDepth / kProductCodes;    // in a box
  constexpr u32 kPieces = kProductCodes / kWeightsOfScale;  // of a product
  constexpr u32 kOfGroup = kProducts / Scales::kGroups;
  // With few tokens several products run together: each would wait for tensor cores longer than it
  // uses them.
  constexpr u32 kAtOnce = minimum(kOfGroup * kPieces, kColumnSums / kSums);
  const u32 steps = steps_of(task);
  if (steps == 0) {
    return;
  }
  Scales scales(arguments, task, part, group);
  auto* const of_tokens = reinterpret_cast<float*>(shared.route);
  const u32 row = group * kColumnWeights + first_weight_row();
  const u32 turn = row / (kSwizzleBytes / kCodedRowBytes) % kProducts;
  float sums[kAtOnce][kSums] = {};
  auto* const misfits = reinterpret_cast<u32*>(of_tokens + 2 * kConsumerThreads);
  // Other warps may still read what Route has there.
  named_barrier(kConsumersBarrier, kConsumerThreads);
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    // Two buffers by turns: the thread that writes one has met all that read it before, a step ago.
    float* const published = of_tokens + step % 2 * kConsumerThreads;
    scales.publish(published);
    u32* const of_warps = misfits + step % 2 * kConsumerWarps;
    if constexpr (kFoldsScales) {
      const u32 found = scales.find_largest();
      if (Machine::lane() == 0) {
        of_warps[threadIdx.x / 32 - kFirstConsumerWarp] = found;
      }
    }
    Scales next = scales;
    next.load(minimum(step + 1, steps - 1));
    shared.stage_full[stage.index].wait(stage.parity);
    named_barrier(kConsumersBarrier, kConsumerThreads);
    const Stage& from = shared.stages[stage.index];
    // Whether scales are folded is the same for a part's rows in every tile, and so are its bits.
    u32 unfolded = 0;
    if constexpr (kFoldsScales) {
#pragma unroll
      for (u32 warp = 0; warp < kConsumerWarps; ++warp) {
        unfolded |= of_warps[warp];
      }
    }
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      const u8* const codes =
          from.weights + box * kTileColumns * kSwizzleBytes + row * kCodedRowBytes;
      if constexpr (kFoldsScales) {
        if ((unfolded >> box & 1) == 0) {
          multiply_folded<kHalves, kTokens>(d, sums[0], scales, from, codes, published, turn, box,
                                            task.padded_rows);
          continue;
        }
      }
#pragma unroll
      for (u32 nth = 0; nth < Scales::kGroups; ++nth) {
        u32 weights[kOfGroup][4];
#pragma unroll
        for (u32 k = 0; k < kOfGroup; ++k) {
          decode_codes(weights[k], codes, nth * kOfGroup + k, turn, {});
        }
#pragma unroll
        for (u32 half = 0; half < kHalves; ++half) {
          if (half * kColumnTokens >= task.padded_rows) {
            continue;
          }
          const u8* const tokens = from.rows + (box + half) * kColumnTokens * kSwizzleBytes;
          float of_group[kSums] = {};
#pragma unroll
          for (u32 first = 0; first < kOfGroup * kPieces; first += kAtOnce) {
            u32 rows[kAtOnce][4];
#pragma unroll
            for (u32 nth_sum = 0; nth_sum < kAtOnce; ++nth_sum) {
              // A scale of 16 columns applies to two of the four registers; the others have another
              // scale.
              const u32 piece = (first + nth_sum) % kPieces;
#pragma unroll
              for (u32 i = 0; i < 4; ++i) {
                rows[nth_sum][i] =
                    kPieces == 1 || i / 2 == piece ? weights[(first + nth_sum) / kPieces][i] : 0;
              }
              hold(sums[nth_sum]);
            }
            wgmma_fence();
#pragma unroll
            for (u32 nth_sum = 0; nth_sum < kAtOnce; ++nth_sum) {
              const u32 product = nth * kOfGroup + (first + nth_sum) / kPieces;
              multiply_codes<false>(sums[nth_sum], rows[nth_sum],
                                    matrix_descriptor(tokens + product * kProductCodes));
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (u32 nth_sum = 0; nth_sum < kAtOnce; ++nth_sum) {
              hold(sums[nth_sum]);
              hold(rows[nth_sum]);  // until here
              const u32 scale = nth * kOfGroup * kPieces + first + nth_sum;
              const float of_row[2] = {scales.of_weights(0, box, scale),
                                       scales.of_weights(1, box, scale)};
#pragma unroll
              for (u32 i = 0; i < kSums; ++i) {
                of_group[i] += sums[nth_sum][i] * of_row[i / 2 % 2];
              }
            }
          }
          const auto* const of_columns =
              published + (box * Scales::kGroups + nth) * kColumns + half * kColumnTokens;
#pragma unroll
          for (u32 i = 0; i < kSums; i += 4) {
            const auto two =
                *reinterpret_cast<const float2*>(of_columns + 2 * i + Machine::lane() % 4 * 2);
#pragma unroll
            for (u32 lower = 0; lower < 2; ++lower) {
              d[half][i + 2 * lower] += of_group[i + 2 * lower] * two.x;
              d[half][i + 2 * lower + 1] += of_group[i + 2 * lower + 1] * two.y;
            }
          }
        }
      }
    }
    release_read_stage(shared, stage.index);
    scales = next;
  }
}

/// multiply_by_columns for a narrow tile.
template <const Product& kProduct>
inline void multiply_narrow_columns(float (&d)[kColumnHalves][kColumnSums],
                                    const RankArguments& arguments, const Task& task, u32 part,
                                    u32 group, Shared& shared, RingPosition<kStages>& stage) {
  if (task.padded_rows <= kFewTokens) {
    multiply_by_columns<kProduct, 1, kFewTokens>(d, arguments, task, part, group, shared, stage);
  } else {
    multiply_by_columns<kProduct, 1>(d, arguments, task, part, group, shared, stage);
  }
}

/// Where the sum of a token and a row of weights lies on its way, in 64 by 64. Neither the sums
/// that a warp writes together nor those that it reads share a bank.
inline u32 place_of_sum(u32 token, u32 row) {
  return token * kColumnWeights + (row ^ (token / 2 + token % 2 * 2) % 4 * 8);
}

/// Hands the sums of both warpgroups to the warpgroup whose rows they are, in the layout of
/// accumulators.cuh; `to` begins as zeros. By all consumers, for a tile of `rows` rows. With 0
/// rows: a warp that rehearses has no others to meet.
template <u32 kHalves>
inline void exchange_sums(float (&to)[kCodedSums], const float (&d)[kHalves][kColumnSums], u32 rows,
                          u32 group, Shared& shared) {
  static_assert(kColumnTokens * kColumnWeights * sizeof(float) <= kRouteMemory);
  static_assert(kCodedSums == kConsumers * kColumnSums);
  auto* const sums = reinterpret_cast<float*>(shared.route);
  const u32 row = first_weight_row();
  const u32 pair = of_part(Machine::lane()) % 4 * 2;
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    if (half * kColumnTokens >= rows) {
      continue;
    }
#pragma unroll
    for (u32 writer = 0; writer < kConsumers; ++writer) {
      // What was there has been read: scales, or other sums.
      named_barrier(kConsumersBarrier, kConsumerThreads);
      if (group == writer) {
#pragma unroll
        for (u32 i = 0; i < kColumnSums; ++i) {
          sums[place_of_sum(2 * (i - i % 4) + pair + i % 2, row + i / 2 % 2 * 8)] = d[half][i];
        }
      }
      named_barrier(kConsumersBarrier, kConsumerThreads);
      if (group == half) {
#pragma unroll
        for (u32 i = 0; i < kColumnSums; i += 2) {
          const u32 at = place_of_sum(row + i / 2 % 2 * 8, 2 * (i - i % 4) + pair);
          const auto two = *reinterpret_cast<const float2*>(&sums[at]);
          to[writer * kColumnSums + i] = two.x;
          to[writer * kColumnSums + i + 1] = two.y;
        }
      }
    }
  }
  if (rows > 0) {
    named_barrier(kConsumersBarrier, kConsumerThreads);  // Route may write there
  }
}

}  // namespace moeos::sm90
