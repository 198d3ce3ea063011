// SPDX-License-Identifier: Apache-2.0
// The gradients of experts' weights, from all rows that a gradient call kept: a launch of its own
// after the call, since no rank waits for another one here.
//
//   gradient   left factor (its rows)      right factor (its columns)
//   dW1        gradients of h, kept        x
//   dW2        gradients of the output     activated values, kept
//
// Where weights are transposed, the factors are exchanged, so that a gradient lies as its weight
// does. A product's depth is an expert's rows: both factors have adjacent columns, as tensor cores
// take them. In each line one factor has been multiplied by the rows' weights. One block computes a
// tile of a gradient and adds rows up in the order of sources, and for each source in the order of
// its cell, in steps of 64. So bits depend neither on how rows were packed into tiles nor on the
// number of blocks. Must not depend on: queues, flags, tiles of the call.
#pragma once

#include "kernels/sm90/block/backward_arguments.cuh"
#include "kernels/sm90/gradient_tile.cuh"
#include "kernels/sm90/mainloop/mainloop.cuh"

namespace moeos::sm90 {

inline constexpr u32 kLeftColumns = kTileRows;
inline constexpr u32 kRightColumns = kTileColumns;
inline constexpr u32 kLeftBoxes = kLeftColumns / kBoxColumns;
inline constexpr u32 kRightBoxes = kRightColumns / kBoxColumns;
inline constexpr u32 kFactorColumns = kHalves * kKeptColumns;  // kept gradients of h
inline constexpr u32 kLeft1 = kTransposed ? kShape.hidden : kFactorColumns;
inline constexpr u32 kRight1 = kTransposed ? kFactorColumns : kShape.hidden;
inline constexpr u32 kLeft2 = kTransposed ? kShape.intermediate : kShape.hidden;
inline constexpr u32 kRight2 = kTransposed ? kShape.hidden : kShape.intermediate;
inline constexpr u32 kTilesAcross1 = ceil_div(kRight1, kRightColumns);
inline constexpr u32 kTiles1 = ceil_div(kLeft1, kLeftColumns) * kTilesAcross1;
inline constexpr u32 kTilesAcross2 = ceil_div(kRight2, kRightColumns);
inline constexpr u32 kTiles2 = ceil_div(kLeft2, kLeftColumns) * kTilesAcross2;

/// A consumer warp's rows of a tile and 64 of their columns on their way to memory: a box.
///
/// Row 8l + 2p + q lies at 8l + 4q + p, so that lanes with other rows use other banks. The maps
/// have dimensions in that order: columns, p, q, l, and experts, or their halves. Rows of d_w1 are
/// kept columns, so p is eight rows of the matrix, q one and l two (kept_column); for d_w2 they are
/// two, one and eight.
inline constexpr u32 kGradientBoxBytes = kWarpRows * kSwizzleBytes;
inline constexpr u32 kGradientBoxes = 2;  // of a warp
inline constexpr u32 kBoxSums = kSecondSums / kRightBoxes;

/// Shared memory of this launch's blocks.
struct FactorShared {
  Stage stages[kStages];
  alignas(1024) u8 boxes[kConsumerWarps][kGradientBoxes][kGradientBoxBytes];
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
};
static_assert(sizeof(FactorShared) <= sizeof(Shared), "a launch has as much");

/// A tile of a gradient, by its number.
struct GradientTile {
  u32 expert;
  bool second;  // dW2's
  u32 left;     // first column in the left factor
  u32 right;    // first column in the right factor

  GradientTile(const GradientArguments& arguments, u32 number) {
    const u32 first = wants_first(arguments) ? kTiles1 : 0;
    const u32 each = each_of(arguments);
    expert = number / each;
    const u32 nth = number % each;
    second = nth >= first;
    const u32 within = second ? nth - first : nth;
    const u32 across = second ? kTilesAcross2 : kTilesAcross1;
    left = within / across * kLeftColumns;
    right = within % across * kRightColumns;
  }
  /// Tiles of an expert.
  static u32 each_of(const GradientArguments& arguments) {
    return (wants_first(arguments) ? kTiles1 : 0) + (arguments.d_w2 != nullptr ? kTiles2 : 0);
  }
  static bool wants_first(const GradientArguments& arguments) {
    return arguments.d_w1 != nullptr || (kGateUp == GateUp::separate && arguments.d_w3 != nullptr);
  }
};

/// A source's rows of an expert: the index of the first among kept rows, and among the rows of
/// `inputs`.
struct SourceRows {
  u32 count;
  u32 kept;
  u32 input;
};
inline SourceRows rows_of(const GradientArguments& arguments, u32 expert, u32 source) {
  const u32* const starts = rank_memory(arguments).receive_starts(source);
  const u32 start = minimum(starts[expert], kKeptOfSource);
  // In a call that has failed the count may be anything.
  const u32 count = minimum(starts[expert + 1] - start, kKeptOfSource - start);
  const u32 kept = source * kKeptOfSource + start;
  if constexpr (kCopies) {
    return {count, kept, kept};
  }
  const Layout layout(kGeometry, arguments.place);
  return {count, kept, count == 0 ? 0 : layout.row_index(source, layout.row(expert, 0, start))};
}
// Not unrolled: the compiler takes minutes for a sum of two sources' steps.
inline u32 steps_of_expert(const GradientArguments& arguments, u32 expert) {
  u32 steps = 0;
#pragma unroll 1
  for (u32 source = 0; source < kGeometry.world; ++source) {
    steps += ceil_div(rows_of(arguments, expert, source).count, kDepthRows);
  }
  return steps;
}

/// Calls visit(tile) for each of this block's tiles.
template <class Visit>
inline void for_each_gradient(const GradientArguments& arguments, Visit visit) {
  const u32 all = arguments.experts * GradientTile::each_of(arguments);
  for (u32 number = blockIdx.x; number < all; number += arguments.blocks) {
    visit(GradientTile(arguments, number));
  }
}

/// The load warp: loads both factors of each step.
inline void load_factors(const GradientArguments& arguments, FactorShared& shared) {
  const u32 lane = Machine::lane();
  RingPosition<kStages> at;
  for_each_gradient(arguments, [&](const GradientTile& tile) {
    const bool of_left = lane < kLeftBoxes;
    const u32 nth = of_left ? lane : lane - kLeftBoxes;
    const bool of_kept = (of_left != tile.second) != kTransposed;
    const TensorMap& map = !of_kept      ? arguments.gradients.inputs
                           : tile.second ? arguments.gradients.values
                                         : arguments.gradients.d_hidden[kCellBoxes - 2];
    const u32 column = (of_left ? tile.left : tile.right) + nth * kBoxColumns +
                       (of_left != kTransposed && tile.second ? kShape.hidden : 0);
    for (u32 source = 0; source < kGeometry.world; ++source) {
      const SourceRows rows = rows_of(arguments, tile.expert, source);
      for (u32 first = 0; first < rows.count; first += kDepthRows, at.advance()) {
        Barrier& full = shared.stage_full[at.index];
        if (lane == 0) {
          shared.stage_empty[at.index].wait(at.parity ^ 1);
          full.arrive_expecting(sizeof(Stage));
        }
        __syncwarp();
        if (lane < kLeftBoxes + kRightBoxes) {
          u8* const to = of_left ? shared.stages[at.index].rows : shared.stages[at.index].weights;
          load_box(map, to + nth * kColumnsBoxBytes, full,
                   (of_kept ? rows.kept : rows.input) + first, column);
        }
      }
    }
  });
}
static_assert(box_height(kCellBoxes, kCellBoxes - 2) == kDepthRows);
static_assert((kLeftBoxes + kRightBoxes) * kColumnsBoxBytes == sizeof(Stage));

/// The rows of an expert, step by step.
class Depth {
 public:
  Depth(const GradientArguments& arguments, u32 expert) : arguments_(arguments), expert_(expert) {
    find();
  }
  /// Returns the number of rows of the current step, which must exist, and goes on to the next.
  u32 take() {
    const u32 rows = minimum(kDepthRows, left_);
    left_ -= rows;
    find();
    return rows;
  }

 private:
  void find() {
    while (left_ == 0 && source_ < kGeometry.world) {
      left_ = rows_of(arguments_, expert_, source_).count;
      ++source_;
    }
  }

  const GradientArguments& arguments_;
  u32 expert_;
  u32 source_ = 0;
  u32 left_ = 0;  // of the source's rows
};

/// Clears what a stage has after the first `rows` rows of both factors: rows of other experts. By
/// all consumers.
inline void clear_behind(Stage& stage, u32 rows) {
  constexpr u32 kVectors = kColumnsBoxBytes / sizeof(uint4);
  constexpr u32 kOfRow = kBoxColumns * 2 / sizeof(uint4);
  auto* const to = reinterpret_cast<uint4*>(&stage);
  const u32 first = rows * kOfRow;
  const u32 each = kVectors - first;
  for (u32 i = threadIdx.x % kConsumerThreads; i < (kLeftBoxes + kRightBoxes) * each;
       i += kConsumerThreads) {
    to[i / each * kVectors + first + i % each] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async_shared();
  named_barrier(kConsumersBarrier, kConsumerThreads);
}

/// The map by which a box of a gradient is stored; a box of dW1 has values of half `half`.
inline const TensorMap& map_of_stores(const GradientArguments& arguments, bool second, u32 half) {
  if constexpr (kUpGradientMaps) {
    if (!second && half != 0) {
      return arguments.up_gradients.d_w1;
    }
  }
  return second ? arguments.gradients.d_w2 : arguments.gradients.d_w1;
}
/// Whether the box is wanted: where gates and ups are two tensors, one of them may not be.
inline bool is_wanted(const GradientArguments& arguments, bool second, u32 half) {
  return kGateUp != GateUp::separate || second ||
         (half == 0 ? arguments.d_w1 : arguments.d_w3) != nullptr;
}

/// Stores a box of a transposed gradient. Its columns are all in one half, and use that half's map.
inline void store_of_half(const GradientArguments& arguments, bool second, const u8* box,
                          const u32 (&at)[5]) {
  const u32 half = second ? 0 : at[0] / kKeptColumns;
  const u32 of_half[5] = {at[0] - half * kKeptColumns, at[1], at[2], at[3], at[4]};
  if (half < kHalves && is_wanted(arguments, second, half)) {
    store_box(map_of_stores(arguments, second, half), box, of_half);
  }
}

/// Stores a warp's rows of a tile through its boxes, whose bytes leave while the next tile's
/// products are under way.
inline void store_gradients(const float (&d)[kSecondSums], const GradientArguments& arguments,
                            const GradientTile& tile, FactorShared& shared) {
  const u32 lane = Machine::lane();
  const u32 row = tile.left + tile_row(0);
  const u32 half = row / kKeptColumns;
  const u32 within = row - half * kKeptColumns;
  const bool there = kTransposed   ? row < (tile.second ? kLeft2 : kLeft1)
                     : tile.second ? row < kLeft2
                                   : half < kHalves && is_wanted(arguments, false, half);
  const TensorMap& map = map_of_stores(arguments, tile.second, half);
  u32 at[5] = {tile.right, 0, 0, row / 8, tile.expert};
  if (!kTransposed && !tile.second) {
    at[1] = within / kOrderedRows * 4;
    at[3] = within % kOrderedRows / kWarpRows * 2;
    at[4] = kUpGradientMaps ? tile.expert : tile.expert * kHalves + half;
  }
  auto& boxes = shared.boxes[threadIdx.x / 32 - kFirstConsumerWarp];
  const u32 place = lane / 4 % 2 * 4 + lane / 8;  // of this lane's row, among eight
#pragma unroll
  for (u32 box = 0; box < kRightBoxes; ++box) {
    u8* const to = boxes[box % kGradientBoxes];
    if (lane == 0) {
      wait_until_read<kGradientBoxes - 1>();
    }
    __syncwarp();
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      u8* const to_row = to + (8 * lower + place) * kSwizzleBytes;
      // TMA finds 16 bytes of a row at their number, exclusive-or the row's.
#pragma unroll
      for (u32 k = 0; k < kBoxSums / 4; ++k) {
        const u32 i = box * kBoxSums + 4 * k + 2 * lower;
        if (kTransposed || !tile.second) {
          *reinterpret_cast<u32*>(to_row + (k ^ place) * 16 + lane % 4 * 4) =
              Element::pack(d[i], d[i + 1]);
        } else if (k % 4 == 0) {
          // Kept columns lie in the order of accumulators: a thread's values in four eights are
          // eight consecutive columns.
          *reinterpret_cast<uint4*>(to_row + ((k + lane % 4) ^ place) * 16) =
              make_uint4(Element::pack(d[i], d[i + 1]), Element::pack(d[i + 4], d[i + 5]),
                         Element::pack(d[i + 8], d[i + 9]), Element::pack(d[i + 12], d[i + 13]));
        }
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      if (there) {
        if constexpr (kTransposed && kUpGradientMaps) {
          store_of_half(arguments, tile.second, to, at);
        } else {
          store_box(map, to, at);
        }
      }
      commit_stores();
    }
    at[0] += kBoxColumns;
  }
}

/// The consumers: compute each tile's products and store them.
inline void multiply_factors(const GradientArguments& arguments, FactorShared& shared) {
  const u32 group = (threadIdx.x / 32 - kFirstConsumerWarp) / 4;
  RingPosition<kStages> stage;
  for_each_gradient(arguments, [&](const GradientTile& tile) {
    Depth depth(arguments, tile.expert);
    float d[kSecondSums] = {};
    for_each_step(
        d, steps_of_expert(arguments, tile.expert), shared, stage,
        [&](Stage& of, u32) {
          const u32 rows = depth.take();
          if (rows < kDepthRows) {
            clear_behind(of, rows);
          }
        },
        [&](const Stage& from) {
#pragma unroll
          for (u32 k = 0; k < kDepthRows / 16; ++k) {
            multiply_accumulate<MOEOS_FLOAT16, Major::columns, Major::columns>(
                d, columns_descriptor(from.rows + group * kColumnsBoxBytes + k * kDepthStepBytes),
                columns_descriptor(from.weights + k * kDepthStepBytes));
          }
        });
    store_gradients(d, arguments, tile, shared);
  });
  wait_until_stored();
}

/// The biases' gradients: sums of an expert's rows, in their order. One thread a column, by all
/// consumers.
inline void add_biases(const GradientArguments& arguments) {
  const auto add = [&](u8* to, u32 expert, u32 column, auto value) {
    float sum = 0.0F;
    for (u32 source = 0; source < kGeometry.world; ++source) {
      const SourceRows rows = rows_of(arguments, expert, source);
      for (u32 i = 0; i < rows.count; ++i) {
        sum +=
            value(arguments.intermediate_rows + u64{rows.kept + i} * kKeptRowBytes, rows.input + i);
      }
    }
    reinterpret_cast<u16*>(to)[column] = static_cast<u16>(Element::pack(sum, 0.0F));
  };
  const auto element = [](const u8* row, u32 column) {
    return Element::low(reinterpret_cast<const u16*>(row)[column]);
  };
  const Layout layout(kGeometry, arguments.place);
  for (u32 expert = blockIdx.x; expert < arguments.experts; expert += arguments.blocks) {
    const u32 first = threadIdx.x % kConsumerThreads;
    for (u32 n = first; arguments.d_b1 != nullptr && n < kShape.w1_rows(); n += kConsumerThreads) {
      const bool alternate = kGateUp == GateUp::interleaved;
      const u32 half = alternate ? n % 2 : n / kShape.intermediate;
      const u32 column = kept_gradient(half, alternate ? n / 2 : n - half * kShape.intermediate);
      add(arguments.d_b1 + u64{expert} * kShape.w1_rows() * 2, expert, n,
          [&](const u8* kept, u32) { return element(kept + kDHiddenAt, column); });
    }
    for (u32 n = first; arguments.d_b2 != nullptr && n < kShape.hidden; n += kConsumerThreads) {
      add(arguments.d_b2 + u64{expert} * kShape.hidden * 2, expert, n,
          [&](const u8* kept, u32 input) {
            const u8* const from =
                kCopies ? kept + kCopiesAt : arguments.heap + layout.row_at(input);
            return *reinterpret_cast<const float*>(kept + kWeightAt) * element(from + kDOutAt, n);
          });
    }
  }
}

}  // namespace moeos::sm90
