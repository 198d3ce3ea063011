// SPDX-License-Identifier: Apache-2.0
// Quantized weights (kernels/element_formats.hpp) that are multiplied by plain rows, W8A16 or
// W4A16: the consumers dequantize them stage by stage, in place.
//
// TMA lands a stage's codes at the beginning of the stage's weights, with rows in the order that
// weights have there (accumulators.cuh). Each consumer thread has one row of each step. It reads
// the row's codes into registers. When all threads have read theirs, it writes the row's elements,
// swizzled as TMA would have left them. Products of the step before run meanwhile: they read
// another stage. Both warpgroups dequantize, even where one has no rows to multiply. Must not
// depend on: which product uses the weights; element types of rows.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/operands/four_bits.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// A row of weights: its matrix, and its index there.
struct WeightRow {
  u32 matrix;
  u32 row;
};
/// Matrices of a product's weights in an MLP.
constexpr u32 matrices_of(const Product& product) {
  return kShape.gated() && product.activated ? 2 : 1;
}
/// The row that lies at index `place` of a part's stages; the part belongs to MLP `mlp`.
inline WeightRow weight_row_at(const Task& task, u32 part, u32 mlp, u32 place) {
  const Product product = product_of(task);
  const u32 columns = columns_of(task);
  const u32 of_part = ordered_row(place);
  const bool up = of_part >= columns;
  // A tile may reach beyond its matrix. Results of such rows are discarded.
  return {mlp * matrices_of(product) + up,
          minimum(first_column_of(task, part) + of_part - (up ? columns : 0), product.columns - 1)};
}
/// Where the row's scales begin, in `all`.
inline const u8* scales_of(const WeightRow& at, const Product& product, const u8* all) {
  const u64 row = row_in_memory(product, at.matrix, scale_row(kFormat, at.row),
                                scale_rows(kFormat, product.columns));
  return all + row * scales_of_row(kFormat, product.depth) * scale_bytes(kFormat);
}
/// A scale of a row, as it is stored.
inline u32 stored_scale(const u8* scales, u32 index) {
  if constexpr (scale_bytes(kFormat) == 4) {
    return reinterpret_cast<const u32*>(scales)[index];
  } else if constexpr (scale_bytes(kFormat) == 2) {
    return reinterpret_cast<const u16*>(scales)[index];
  } else {
    return scales[index];
  }
}
/// A consumer thread's row of a part's weights. The part's task is read again in each step: the
/// accumulators leave few registers.
class StoredRow {
 public:
  StoredRow(const RankArguments& arguments, const Task& task, u32 part) {
    if constexpr (kDecodes) {
      if constexpr (kDecodesShared || kWeightsInRegisters) {
        scales_ = nullptr;
#pragma unroll
        for (u32 s = 0; s < kScales; ++s) {
          next_[s] = 0;
        }
        if (!is_decoded(task, part) || is_in_warps(task)) {
          return;
        }
      }
      const Product product = product_of(task);
      const bool shared = kDecodesShared && is_shared(task);
      const u32 mlp = shared ? mlp_of(task, part) : task.local_expert;
      const WeightRow row =
          weight_row_at(task, part, mlp, consumer_thread() % weight_rows_of(task));
      const u8* scales = product.activated ? arguments.w1_scale : arguments.w2_scale;
      const float* scales_2 = product.activated ? arguments.w1_scale_2 : arguments.w2_scale_2;
      if (shared) {
        scales = product.activated ? arguments.shared_w1_scale : arguments.shared_w2_scale;
        scales_2 = product.activated ? arguments.shared_w1_scale_2 : arguments.shared_w2_scale_2;
      }
      scales_ = scales_of(row, product, scales);
      if constexpr (kFormat == WeightFormat::nvfp4) {
        of_matrices_ = scales_2 + row.matrix;
        of_matrix_ = *of_matrices_;
      }
      load_scales(task, consumer_thread() / weight_rows_of(task), 0);
    }
  }

  /// Dequantizes its row of a step in the stage that has landed. By all consumer threads, for the
  /// steps of a part in turn.
  void decode(Stage& stage, const Task& task, u32 step) {
    if constexpr (kDecodes) {
      if (!decodes(task)) {
        return;
      }
      // Computed again in each step: there is no register to keep addresses in.
      const u32 thread = Machine::opaque(consumer_thread());
      const u32 rows = weight_rows_of(task);
      const u32 nth = thread / rows;
      const u32 place = thread % rows;
      const bool has_row = nth < boxes_of(task);
      u8* const box = stage.weights + nth * rows * kSwizzleBytes;
      uint4 codes[kVectors];
      if (has_row) {
        read(box, place, codes);
      } else if constexpr (kCoded) {
        // Otherwise each register has to keep its old value through all parts.
#pragma unroll
        for (u32 v = 0; v < kVectors; ++v) {
          codes[v] = make_uint4(0, 0, 0, 0);
        }
      }
      // No row is written before all codes are read.
      named_barrier(kConsumersBarrier, kConsumerThreads);
      if (has_row) {
        write(box, place, codes);
      }
      // wgmma reads through the async proxy what was written through the generic one; and TMA
      // overwrites codes that have been read.
      fence_proxy_async_shared();
      // After the fence, which would wait for these loads.
      load_scales(task, nth, step + 1);
      named_barrier(kConsumersBarrier, kConsumerThreads);
    }
  }

 private:
  static constexpr u32 kVectors = kCodeBytes / sizeof(uint4);  // of a row's codes in a stage
  static constexpr u32 kVectorCodes = sizeof(uint4) * 8 / code_bits(kFormat);
  /// Scales of a row in a stage; one if the format has fewer.
  static constexpr u32 kScaleColumns = minimum(scale_columns(kFormat, kTileDepth), kTileDepth);
  static constexpr u32 kScales = kDecodes ? kTileDepth / kScaleColumns : 1;

  /// Whether the part's weights are quantized.
  bool decodes(const Task& task) const {
    if constexpr (kDecodesShared) {
      return scales_ != nullptr;
    } else {
      return !is_shared(task);
    }
  }
  /// A step's boxes of weights along the depth. Threads beyond them have no row in it.
  static u32 boxes_of(const Task& task) { return task.narrow != 0 ? kNarrowDepth : 1; }
  static u32 consumer_thread() { return threadIdx.x - kFirstConsumerWarp * 32; }

  /// Reads a row's codes, which TMA has swizzled within 128 bytes as the box is wide.
  static void read(const u8* box, u32 place, uint4 (&codes)[kVectors]) {
    const u32 turn = place / (kSwizzleBytes / kCodeBytes) % kVectors;
    const auto* row = reinterpret_cast<const uint4*>(box + place * kCodeBytes);
#pragma unroll
    for (u32 v = 0; v < kVectors; ++v) {
      codes[v] = row[v ^ turn];
    }
  }

  /// Writes the row's elements.
  void write(u8* box, u32 place, const uint4 (&codes)[kVectors]) const {
    if constexpr (kFormat == WeightFormat::mxfp4) {
      u32 all = 0;
#pragma unroll
      for (u32 s = 0; s < kScales; ++s) {
        all |= next_[s];
      }
      if (!are_small(all)) {
        write_elements<false>(box, place, codes);
        return;
      }
    }
    write_elements<true>(box, place, codes);
  }
  /// Writes eight at a time. `kSmall`: as for CodeScale.
  template <bool kSmall>
  void write_elements(u8* box, u32 place, const uint4 (&codes)[kVectors]) const {
    auto* row = reinterpret_cast<uint4*>(box + place * kSwizzleBytes);
#pragma unroll
    for (u32 v = 0; v < kTileDepth / 8; ++v) {
      const u32 scale = next_[v * 8 / kScaleColumns];
      u32 pairs[4];
      if constexpr (code_bits(kFormat) == 4) {
        decode_four_bits<kSmall>(pairs, word_of(codes[v * 8 / kVectorCodes], v * 8 % kVectorCodes),
                                 scale);
      } else {
        decode_e4m3(pairs, codes[v * 8 / kVectorCodes], v * 8 % kVectorCodes, scale);
      }
      row[v ^ place % 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  /// The word of a vector that has code `first`.
  static u32 word_of(const uint4& vector, u32 first) {
    const u32 words[] = {vector.x, vector.y, vector.z, vector.w};
    return words[first * code_bits(kFormat) / 32];
  }

  template <bool kSmall>
  void decode_four_bits(u32 (&pairs)[4], u32 codes, u32 stored) const {
    begin_numbers(pairs, codes);
    const CodeScale<kSmall> scale(stored, of_matrix_);
#pragma unroll
    for (u32& pair : pairs) {
      pair = scale(pair);
    }
  }

  static void decode_e4m3(u32 (&pairs)[4], const uint4& vector, u32 first, u32 stored) {
    const float scale = __uint_as_float(stored);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float2 two = from_e4m3(word_of(vector, first + 2 * i) >> i % 2 * 16);
      pairs[i] = Element::pack(two.x * scale, two.y * scale);
    }
  }

  /// Asks for the scales of a step, long before they are used. Beyond the row: zeros.
  void load_scales(const Task& task, u32 nth, u32 step) {
    const Product product = product_of(task);
    const u32 depth = product.depth;
    u32 before = 0;  // scales of matrices before this step's
    bool there = decodes(task);
    if constexpr (kDecodesShared && kSharedSecond.mlps > 1) {
      if (is_shared(task) && !product.activated) {
        const u32 mlp = step / steps_of_each(task);
        there = there && mlp < product.mlps;
        step -= mlp * steps_of_each(task);
        before = mlp * scale_rows(kFormat, product.columns) * scales_of_row(kFormat, depth);
        if constexpr (kFormat == WeightFormat::nvfp4) {
          of_matrix_ = there ? of_matrices_[mlp] : 0.0F;
        }
      }
    }
#pragma unroll
    for (u32 s = 0; s < kScales; ++s) {
      const u32 column = (step * boxes_of(task) + nth) * kTileDepth + s * kScaleColumns;
      const u32 index = before + column / scale_columns(kFormat, depth);
      const bool is_there = there && column < depth;
      next_[s] = is_there ? stored_scale(scales_, index) : 0;
    }
  }

  const u8* scales_;
  const float* of_matrices_;  // from the part's first matrix on, where the format has them
  float of_matrix_ = 1.0F;
  u32 next_[kScales];  // scales of the next step
};

}  // namespace moeos::sm90
