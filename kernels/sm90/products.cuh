// SPDX-License-Identifier: Apache-2.0
// Loads and products of one part: load_tile() and load_route() bring steps of the depth into the
// stages, multiply_tile() and multiply_logits() consume them.
//
// The two run in different warps and meet only at the stages' barriers. May not know: where results
// go.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace moeos::sm90 {

/// Whose products a tile's are.
inline bool is_shared(const Task& task) { return kShares && moeos::is_shared(kGeometry, task); }
inline Mlps mlps_of(const Task& task) { return is_shared(task) ? kSharedExperts : kExpert; }

/// Stages that a GEMM part takes of each MLP whose results it adds up: the row length of its
/// inputs. None of a tile of no rows.
inline u32 steps_of_each(const Task& task) {
  if (task.padded_rows == 0) {
    return 0;
  }
  const u32 depth = task.narrow != 0 ? kNarrowDepth * kTileDepth : kTileDepth;
  return ceil_div(task.kind == TaskKind::gemm1 ? mlps_of(task).values : kShape.hidden, depth);
}
inline u32 steps_of(const Task& task) {
  return task.kind == TaskKind::gemm1 ? mlps_of(task).count * steps_of_each(task)
                                      : steps_of_each(task);
}

/// Slices of a block's Route: those of a bank's depth in order, one bank behind the other. Steps
/// are counted in this order, too.
inline constexpr u32 kRouteSteps = ceil_div(kShape.hidden, kRouteStepColumns);  // of a bank
inline constexpr u32 kBankSlices = kGeometry.route_slices / kRouteBanks;
inline constexpr u32 kSliceSteps = ceil_div(kRouteSteps, kBankSlices);
static_assert(kBankSlices * kRouteBanks == kGeometry.route_slices, "banks have as many slices");
static_assert((kBankSlices - 1) * kSliceSteps < kRouteSteps, "each slice has a step");
inline u32 first_step_of(u32 slice) {
  return slice / kBankSlices * kRouteSteps + slice % kBankSlices * kSliceSteps;
}
inline u32 steps_of_slice(u32 slice) { return first_step_of(slice + 1) - first_step_of(slice); }

/// What a Route part multiplies: a block's tokens, over some slices.
struct RouteShare {
  TokenRange tokens;
  u32 first_slice;
  u32 end_slice;

  RouteShare(const Call& call, ReadyWord word)
      : tokens(tokens_of_block(kGeometry, call, word.part())) {
    const u32 slices = kGeometry.route_slices_of_part(call.tokens);
    first_slice = word.task() * slices;
    end_slice = minimum(kGeometry.route_slices, first_slice + slices);
  }
  u32 steps() const { return first_step_of(end_slice) - first_step_of(first_slice); }
};

/// Rows of weights that a part multiplies by.
inline u32 weight_rows_of(const Task& task) {
  return has_narrow_parts(task) ? kNarrowColumns : kTileColumns;
}
/// Columns of its GEMM's result that a part computes.
inline u32 columns_of(const Task& task) {
  const u32 tile = weight_rows_of(task);
  return task.kind == TaskKind::gemm0 ? gemm0_columns(tile) : tile;
}

/// Which of a tile's MLPs a part of a first product is of; their number: of their gate.
inline u32 mlp_of(const Task& task, u32 part) {
  return is_shared(task) && task.kind == TaskKind::gemm0
             ? part / parts_of_each(kSharedExperts, weight_rows_of(task))
             : 0;
}
inline bool weighs_tokens(const Task& task, u32 part) {
  return kShape.shared_gate && is_shared(task) && mlp_of(task, part) == kSharedExperts.count;
}
/// The first of a part's columns, of its MLP's.
inline u32 first_column_of(const Task& task, u32 part) {
  const bool first_product = task.kind == TaskKind::gemm0;
  const Mlps mlps = mlps_of(task);
  const u32 nth =
      is_shared(task) && first_product ? part % parts_of_each(mlps, weight_rows_of(task)) : part;
  return first_column(nth, columns_of(task), first_product ? mlps.values : kShape.hidden);
}

/// A box that one lane loads in each step of a part; without a map: none.
///
/// Each lane has its own and keeps it for the whole part. What is left to do in a step takes some
/// ten instructions a box; finding the boxes again in each would take longer than the step's loads
/// where a tile has many small segments (docs/performance.md, "A lane a box").
struct Box {
  const TensorMap* map = nullptr;
  bool of_weights = false;
  u32 row = 0;
  u32 column = 0;  // in the first step
  u32 place = 0;   // of its destination, bytes from the begin of the stage
  CachePolicy policy = CachePolicy::normal;  // of weights
};
/// Where a box begins in its matrix, in one of the steps.
struct BoxPlace {
  u32 row;
  u32 column;
};

// Each of a step's boxes has a lane, and a narrow tile's steps are two in one. A segment of 8n rows
// is cut into as many boxes as n has bits, at most (n + 1) / 2.
constexpr u32 padded_boxes(u32 rows) {
  return (rows / Geometry::kSegmentAlign + Geometry::kMaxSegments) / 2;
}
static_assert(padded_boxes(kNarrowRows) + kNarrowColumns / kNarrowBoxRows <=
              Machine::kLanes / kNarrowDepth);
static_assert(kTileRows == Geometry::kExactTileRows);
static_assert((kGeometry.segment_align == Geometry::kSegmentAlign ? padded_boxes(kTileRows)
                                                                  : Geometry::kMaxExactBoxes) +
                  kTileColumns / kWeightBoxRows <=
              Machine::kLanes);
static_assert(kRouteDepth <= kNarrowDepth);

/// Box `index` of `rows` rows, the first of which is row `first` of the matrix and lies at `place`.
/// There is one for each bit of rows, the smallest first. (Where a box begins amid eight rows, TMA
/// still swizzles by the place in shared memory, as wgmma reads.)
template <u32 kSizes>
inline void cut_rows(const TensorMap (&maps)[kSizes], u32 first, u32 rows, u32 place, u32 index,
                     Box& box) {
  u32 bits = rows / box_height(kSizes, 0);
  for (; index > 0; --index) {
    bits &= bits - 1;
  }
  const u32 size = Machine::first_lane(bits);
  const u32 before = rows & (box_height(kSizes, size) - 1);
  box.map = &maps[size];
  box.row = first + before;
  box.place = place + before * kSwizzleBytes;
}

static_assert(Geometry::kInPlaceTokens + kNarrowColumns / kNarrowBoxRows <=
              Machine::kLanes / kNarrowDepth);

/// Rows of a tile that are loaded. What lies beyond a tile's tokens is of products before, or other
/// rows: its results are nobody's.
inline u32 loaded_rows_of(const Task& task) {
  return is_shared(task)      ? align_up(task.padded_rows, kTokenBoxRows)
         : task.in_place != 0 ? task.rows
                              : task.padded_rows;
}

/// Box `index` of a tile's rows: tokens, segments of cells, or what the first product left.
inline void find_rows(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 index, u32 place, Box& box) {
  if (is_shared(task)) {
    if (index < loaded_rows_of(task) / kTokenBoxRows) {
      box.map = task.kind == TaskKind::gemm0 ? &arguments.x : &arguments.shared_between;
      box.row = task.first_result + index * kTokenBoxRows;
      box.place = place + index * kTokenBoxRows * kSwizzleBytes;
    }
    return;
  }
  if (task.in_place != 0) {
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
  if (task.kind == TaskKind::gemm1) {
    visit(arguments.intermediate, task.first_result, task.padded_rows);
    return;
  }
  u32 laid_out = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment segment = task.segments[s];
    const u32 rows = laid_out_rows(kGeometry, task, s, laid_out);
    visit(arguments.cells,
          layout.row_index(segment.source, Round::dispatch, Buffer::arrival, segment.first_row),
          rows);
    laid_out += rows;
  }
}

/// Rows of a box of a part's weights, and its boxes in each step.
inline u32 weight_box_rows_of(const Task& task) {
  return task.narrow != 0 && task.kind == TaskKind::gemm0 ? kNarrowBoxRows : kWeightBoxRows;
}
inline u32 weight_boxes_of(const Task& task, u32 part) {
  return weighs_tokens(task, part) ? 1 : weight_rows_of(task) / weight_box_rows_of(task);
}

/// Box `index` of them. A gated part's gate rows come before its up rows.
inline void find_weights(const RankArguments& arguments, const Task& task, u32 part, u32 index,
                         u32 place, Box& box) {
  const bool first_product = task.kind == TaskKind::gemm0;
  if (weighs_tokens(task, part)) {
    box.map = &arguments.shared_gate;
    box.place = place;
    return;
  }
  const Mlps mlps = mlps_of(task);
  const u32 of_mlp = first_product ? w1_rows(mlps) : kShape.hidden;
  const u32 columns = columns_of(task);
  const u32 first = index * weight_box_rows_of(task);  // among the part's
  const u32 up = first >= columns ? mlps.values - columns : 0;
  const u32 mlp = is_shared(task) ? mlp_of(task, part) : task.local_expert;
  box.of_weights = true;
  // Nobody else reads a narrow tile's weights. L2 is left to what is read again: rows, tables, code
  // (docs/performance.md, "Weights that pass through").
  box.policy = task.narrow != 0 ? CachePolicy::evict_first : CachePolicy::normal;
  const WeightMaps& maps = is_shared(task) ? arguments.shared : arguments.experts;
  box.map = !first_product ? &maps.w2 : task.narrow != 0 ? &maps.w1_narrow : &maps.w1;
  box.row = mlp * of_mlp + first_column_of(task, part) + first + up;
  box.place = place + first * kSwizzleBytes;
}

/// The load warp: fills the stages with a part's operands, `bytes` bytes in each. One lane waits;
/// each loads its box, from place_at(step) on: row and column. The next part is claimed on the way.
template <class PlaceAt>
inline void fill_stages(u32 steps, u32 bytes, const Box& box, Loader& loader, PlaceAt place_at) {
  for (u32 step = 0; step < steps; ++step, loader.advance()) {
    if (Machine::lane() == 0) {
      if (steps - step == minimum(steps, kClaimSteps)) {
        loader.let_claim();
      }
      loader.wait();
      loader.full().arrive_expecting(bytes);
    }
    __syncwarp();
    // Beyond the matrix: zeros.
    u8* to = reinterpret_cast<u8*>(&loader.stage()) + box.place;
    const auto [row, column] = place_at(step);
    if (box.of_weights) {
      load_weights(*box.map, to, loader.full(), row, column, box.policy);
    } else if (box.map != nullptr) {
      load_box(*box.map, to, loader.full(), row, column);
    }
  }
}

/// A GEMM part's operands.
inline void load_tile(const RankArguments& arguments, const Layout& layout, const Task& task,
                      u32 part, Loader& loader) {
  const bool narrow = task.narrow != 0;
  const u32 depth = narrow ? kNarrowDepth : 1;
  const u32 columns = weight_rows_of(task);
  const u32 lanes = Machine::kLanes / depth;  // for the boxes of each kTileDepth columns
  const u32 n = Machine::lane() / lanes;
  const u32 index = Machine::lane() % lanes;
  const u32 weight_boxes = weight_boxes_of(task, part);
  Box box;
  box.column = n * kTileDepth;
  if (index < weight_boxes) {
    find_weights(arguments, task, part, index, kWeightsPlace + n * columns * kSwizzleBytes, box);
  } else {
    find_rows(arguments, layout, task, index - weight_boxes, n * kNarrowRows * kSwizzleBytes, box);
  }
  const u32 weight_rows = weighs_tokens(task, part) ? kSharedGateRows : columns;
  fill_stages(steps_of(task), depth * (loaded_rows_of(task) + weight_rows) * kSwizzleBytes, box,
              loader, [&](u32 step) {
                if constexpr (kSharedExperts.count > 1) {
                  if (is_shared(task) && task.kind == TaskKind::gemm1) {
                    const u32 mlp = step / steps_of_each(task);
                    const u32 column =
                        box.column + (step - mlp * steps_of_each(task)) * depth * kTileDepth;
                    return box.of_weights ? BoxPlace{box.row + mlp * kShape.hidden, column}
                                          : BoxPlace{box.row, column + mlp * kSharedExperts.values};
                  }
                }
                return BoxPlace{box.row, box.column + step * depth * kTileDepth};
              });
}

/// A Route part's operands: slices of a block's tokens, and of the router's weights.
inline void load_route(const RankArguments& arguments, const RouteShare& share, Loader& loader) {
  const u32 n = Machine::lane() / 2;
  const bool of_gate = Machine::lane() % 2 != 0;
  Box box;
  if (n < (of_gate ? kRouteDepth : kTokenBoxes)) {
    box.map = of_gate ? &arguments.gate : &arguments.x;
    box.row = of_gate ? 0 : share.tokens.first;
    box.column = n * (of_gate ? kGateBoxColumns : kTileDepth);
    box.place = of_gate ? kWeightsPlace + n * kRouteColumns * kSwizzleBytes
                        : n * kRouteRows * kSwizzleBytes;
  }
  const u32 first = first_step_of(share.first_slice);
  fill_stages(
      share.steps(), (kTokenBoxes * kRouteRows + kRouteDepth * kRouteColumns) * kSwizzleBytes, box,
      loader, [&](u32 step) {
        const u32 bank = kRouteBanks == 1 ? 0 : (first + step) / kRouteSteps;
        return BoxPlace{box.row + (of_gate ? bank * kRouteColumns : 0),
                        box.column + (first + step - bank * kRouteSteps) * kRouteStepColumns};
      });
}

/// One K-step of 16 elements out of a stage, whose rows and columns begin at `rows` and `columns`.
template <u32 kRegisters>
inline void multiply(float (&d)[kRegisters], const u8* rows, const u8* columns, u32 k) {
  constexpr u32 kInstructionBytes = 32;  // 16 elements
  multiply_accumulate<MOEOS_FLOAT16>(d, matrix_descriptor(rows + k * kInstructionBytes),
                                     matrix_descriptor(columns + k * kInstructionBytes));
}

/// One consumer warpgroup: runs over all steps of a part; issue(stage) adds a step's products
/// to d, and its operands are released a step later, when they have been used.
template <u32 kRegisters, class Issue>
inline void for_each_step(float (&d)[kRegisters], u32 steps, Shared& shared,
                          RingPosition<kStages>& stage, Issue issue) {
  u32 previous = 0;
  hold(d);
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    wgmma_fence();
    issue(shared.stages[stage.index]);
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();  // the step before is done with its stage
      release_stage(shared, previous);
    }
    previous = stage.index;
  }
  wgmma_wait<0>();
  hold(d);
  if (steps > 0) {
    release_stage(shared, previous);
  }
}

/// d += the warpgroup's 64 rows of the tile times the part's weights, all of a tile's or half.
template <u32 kRegisters>
inline void multiply_tile(float (&d)[kRegisters], u32 steps, u32 group, Shared& shared,
                          RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      multiply(d, from.rows + group * kConsumerRows * kSwizzleBytes, from.weights, k);
    }
  });
}

/// d += a narrow tile's 64 rows times its weights.
inline void multiply_narrow(float (&d)[kNarrowColumns / 2], u32 steps, Shared& shared,
                            RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 n = 0; n < kNarrowDepth; ++n) {
#pragma unroll
      for (u32 k = 0; k < kTileDepth / 16; ++k) {
        multiply(d, from.rows + n * kNarrowRows * kSwizzleBytes,
                 from.weights + n * kNarrowColumns * kSwizzleBytes, k);
      }
    }
  });
}

/// A warpgroup whose rows of the tile are empty: it only lets the stages pass.
inline void skip_tile(u32 steps, Shared& shared, RingPosition<kStages>& stage) {
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    release_stage(shared, stage.index);
  }
}

/// d += a block's 64 tokens times the router's weights, over so many steps of the depth and this
/// warpgroup's half of each.
inline void multiply_logits(float (&d)[kRouteSums], u32 steps, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  constexpr u32 kInstructions = kTileDepth / 16;
  constexpr u32 kShare = kRouteDepth * kInstructions / kConsumers;
  for_each_step(d, steps, shared, stage, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kShare; ++k) {
      const u32 n = (group * kShare + k) / kInstructions;
      multiply(d, from.rows + n * kRouteRows * kSwizzleBytes,
               from.weights + n * kRouteColumns * kSwizzleBytes,
               (group * kShare + k) % kInstructions);
    }
  });
}

}  // namespace moeos::sm90
