// SPDX-License-Identifier: Apache-2.0
// Combine: the weighted sums of tokens whose rows are all back.
//
// The fetch warp looks up where the rows lie, while the block is at the part before; the load warp
// brings them into the stages, and the consumers sum them from there. May not know: who counts the
// tokens.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/gradient_arguments.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/planted.hpp"
#include "runtime/row_tasks.hpp"
#include "runtime/slices.hpp"

namespace moeos::sm90 {

// Tokens pass through the stages in pieces, each of the same columns of all of a token's rows; a
// stage carries several tokens when their rows are short, or a piece of one when they are long.
inline constexpr u32 kVectorBytes = 16;
inline constexpr u32 kPieceLimit =
    static_cast<u32>(sizeof(Stage)) / kSummands / kVectorBytes * kVectorBytes;
inline constexpr u32 kPieces = ceil_div(kOutputBytes, kPieceLimit);
inline constexpr u32 kPieceBytes = align_up(ceil_div(kOutputBytes, kPieces), kVectorBytes);
inline constexpr u32 kPiecesInStage = minimum(
    Machine::kLanes / kSummands, static_cast<u32>(sizeof(Stage)) / (kSummands * kPieceBytes));
static_assert(kPieceBytes <= kPieceLimit && kPiecesInStage > 0);
static_assert(kSummands <= Machine::kLanes, "a lane loads a row's piece");

/// A part's pieces from `first` on that a stage carries, one behind the other. The load warp and
/// the consumers count them alike.
inline u32 pieces_in_stage(const Task& task, u32 first) {
  return minimum(kPiecesInStage, task.rows * kPieces - first);
}

/// In place of rows: tokens of a block that have none.
struct Unsent {
  u32 count;
  u32 token[kRouteTokens];
};
static_assert(sizeof(Unsent) <= sizeof(Stage));
inline Unsent& unsent_of(Stage& stage) { return *reinterpret_cast<Unsent*>(&stage); }

/// In place of a row: the token itself, whose pair is with a zero expert.
inline constexpr u32 kOwnRow = kNone - 1;
/// What a pair adds to its token's sum. `row`: where its row lies, or kNone: it was not sent.
inline PairRow summand_of(const Rank<Machine>& rank, u32 pair, u32 row) {
  const float weight = rank.memory.pair_weight[pair];
  if constexpr (kShape.weight_on_input || kGradients) {
    return {row, 1.0F};  // it has been multiplied by its weight
  } else if constexpr (kShape.zero_experts > 0) {
    // Pairs beyond a capacity have an expert, and unused slots no weight.
    const bool zero = rank.memory.pair_expert[pair] == kNone && weight != 0.0F;
    return {row == kNone && zero ? kOwnRow : row, weight};
  }
  return {row, weight};
}

/// What the shared experts add to it.
inline PairRow shared_summand_of(const Rank<Machine>& rank, u32 token) {
  const float weight = kShape.shared_gate ? rank.memory.shared_weight[token] : 1.0F;
  return {rank.layout.shared_result(token), weight};
}

/// The fetch warp, of a part's tokens that it has looked up: notes where their partial sums go, and
/// that slices add no rows to these.
inline void note_partials(const RankArguments& arguments, const Call& call, const Task& task,
                          CombineRows& rows) {
  static_assert(CombineRows::kTokens <= Machine::kLanes);
  if (task.kind != TaskKind::combine || summands_of(kGeometry, task) != Summands::pairs) {
    return;
  }
  __syncwarp();  // the lanes have noted them
  // Of this look alone: else addresses take registers for all parts.
  const Rank<Machine> here = rank_of_look(arguments);
  Call its = call;
  its.tokens = Machine::opaque(call.tokens);
  if (Machine::lane() < task.rows) {
    u32& token = rows.token[Machine::lane()];
    token = place_of_partial(here, its, token);
#pragma unroll 1
    for (u32 j = kExpertSummands; j < kSummands; ++j) {
      rows.row[Machine::lane() * kSummands + j] = {kNone, 0.0F};
    }
  }
}

/// The fetch warp, of tokens whose sums over slices are here.
inline void look_up_sums(const RankArguments& arguments, const Call& call, const Task& task,
                         CombineRows& rows) {
  const Summands summands = summands_of(kGeometry, task);
  const Rank<Machine> rank = rank_of_look(arguments);
#pragma unroll 1
  for (u32 i = Machine::lane(); i < task.rows * kSummands; i += Machine::kLanes) {
    const u32 token = task.first_ready + i / kSummands;
    const u32 nth = i % kSummands;
    const bool there = nth < sums_of(kGeometry, summands);
    rows.row[i] = {there ? sum_row(rank, call, summands, token, nth) : kNone, 1.0F};
    rows.token[i / kSummands] = token;
  }
}

/// The fetch warp: where a part's rows lie, all of them at once, because a round trip to memory
/// takes longer than a token's rows do. Not of rows that are awaited.
inline void look_up_rows(const RankArguments& arguments, const Rank<Machine>& rank,
                         const Call& call, const RoutingMap& map, const Task& task,
                         CombineRows& rows) {
  const u32 summands = task.rows * kExpertSummands;
  if (task.kind != TaskKind::combine || summands == 0 || task.awaits != 0) {
    return;
  }
  MOEOS_CHECK(task.rows <= CombineRows::kTokens);
  if (summands_of(kGeometry, task) != Summands::pairs) {
    look_up_sums(arguments, call, task, rows);
    return;
  }
  // Of shared experts by an address of this look: else it is kept for all parts.
  const Rank<Machine> here = kShares ? rank_of_look(arguments) : rank;
#pragma unroll
  for (u32 first = 0; first < CombineRows::kTokens * kExpertSummands; first += Machine::kLanes) {
    // Nothing is conditional but what is stored, so that all loads are under way together.
    const u32 i = minimum(first + Machine::lane(), summands - 1);
    // Acquired with the part's word.
    const u32 token = rank.memory.ready_tokens[task.first_ready + i / kExpertSummands];
    const u32 j = i % kExpertSummands;
    const u32 pair = token * kGeometry.top_k + minimum(j, kGeometry.top_k - 1);
    const u32 row = rank.memory.pair_row[pair];  // of a pair that was not sent, anything
    PairRow summand = summand_of(
        rank, pair, map.sent(pair) || MOEOS_PLANTED(unsent_rows_are_summed) ? row : kNone);
    if constexpr (kShares) {
      const PairRow shared = shared_summand_of(here, token);
      summand = j < kGeometry.top_k ? summand : shared;
    }
    if (first + Machine::lane() < summands) {
      rows.row[kSummands == kExpertSummands ? i : i / kExpertSummands * kSummands + j] = summand;
      if (j == 0) {
        rows.token[i / kExpertSummands] = token;
      }
    }
  }
}

/// The same of a pair whose row is awaited, in a part of tokens that follow each other.
inline void note_awaited_row(const Rank<Machine>& rank, u32 number, u32 pair, u32 row,
                             CombineRows& rows) {
  const u32 nth = number / kGeometry.top_k;
  const u32 token = pair / kGeometry.top_k;
  rows.row[nth * kSummands + number % kGeometry.top_k] = summand_of(rank, pair, row);
  if (number % kGeometry.top_k == 0) {
    rows.token[nth] = token;
    if constexpr (kShares) {
      rows.row[nth * kSummands + kGeometry.top_k] = shared_summand_of(rank, token);
    }
  }
}

/// The load warp: lists a block's tokens that sent no row in one stage; returns how many they are.
inline u32 list_unsent(const Rank<Machine>& rank, const Call& call, const RoutingMap& map,
                       const Task& task, Loader& loader) {
  if (Machine::lane() == 0) {
    loader.wait();
  }
  __syncwarp();
  Unsent& list = unsent_of(loader.stage());
  u32 count = 0;
  find_unsent(rank, call, map, task.first_ready, [&](u32 token, bool unsent) {
    const u32 all = Machine::ballot(unsent);
    if (unsent) {
      const u32 before = count + Machine::lanes_before(all);
      list.token[MOEOS_PLANTED(unsent_tokens_are_listed_with_gaps) ? Machine::lane() : before] =
          token;
    }
    count += Machine::count(all);
  });
  __syncwarp();
  if (Machine::lane() == 0) {
    list.count = count;
    loader.full().arrive();
  }
  loader.advance();
  return count;
}

/// The load warp's side of a Combine part; notes in the slot how many tokens there are.
inline void load_tokens(const RankArguments& arguments, const Rank<Machine>& rank, const Call& call,
                        const RoutingMap& map, const Task& task, Slot& slot, Loader& loader) {
  const u32 lane = Machine::lane();
  u32 combined = task.rows;
  if (task.rows == 0) {
    combined = list_unsent(rank, call, map, task, loader);
  }
  for (u32 first = 0; first < task.rows * kPieces; first += kPiecesInStage) {
    const u32 piece = (MOEOS_PLANTED(stages_carry_the_first_tokens) ? 0 : first) + lane / kSummands;
    const u32 summand = piece / kPieces * kSummands + lane % kSummands;
    const bool there = lane < pieces_in_stage(task, first) * kSummands;
    const u32 row = there ? slot.rows.row[summand].row : kNone;
    const u32 first_byte = MOEOS_PLANTED(pieces_are_the_first) ? 0 : piece % kPieces * kPieceBytes;
    const u32 bytes = row == kNone ? 0 : minimum(kPieceBytes, kOutputBytes - first_byte);
    const u32 all_bytes = __reduce_add_sync(~0U, bytes);
    Barrier& full = loader.full();
    if (lane == 0) {
      loader.wait();
      full.arrive_expecting(all_bytes);
    }
    __syncwarp();
    if (row != kNone) {
      const bool of_slices = summands_of(kGeometry, task) != Summands::pairs;
      const u8* from = rank.heap + (of_slices ? rank.layout.sum_at(row) : rank.layout.result(row));
      if (kShape.zero_experts > 0 && row == kOwnRow) {
        from = arguments.x_rows + u64{slot.rows.token[piece / kPieces]} * kOutputBytes;
      }
      load_bytes(from + first_byte, reinterpret_cast<u8*>(&loader.stage()) + lane * kPieceBytes,
                 bytes, full);
    }
    loader.advance();
  }
  if (lane == 0) {
    slot.combined = combined;
  }
}

/// A byte of a token's output.
inline uint4* output_at(const RankArguments& arguments, u32 token, u32 byte) {
  u8* const output = kGradients ? of_gradients(arguments).d_x : arguments.out;
  return reinterpret_cast<uint4*>(output + u64{token} * kOutputBytes + byte);
}

/// sum += weight times eight elements.
inline void add_weighted(float (&sum)[8], float weight, const u8* elements) {
  const uint4 value = *reinterpret_cast<const uint4*>(elements);
  const u32 packed[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (u32 n = 0; n < 4; ++n) {
    sum[2 * n] += weight * Element::low(packed[n]);
    sum[2 * n + 1] += weight * Element::high(packed[n]);
  }
}
inline uint4 packed(const float (&sum)[8]) {
  return make_uint4(Element::pack(sum[0], sum[1]), Element::pack(sum[2], sum[3]),
                    Element::pack(sum[4], sum[5]), Element::pack(sum[6], sum[7]));
}

/// Bytes of a token that no expert took: zeros, or what zero and shared experts return of it. The
/// list of these tokens was made behind an acquire of all blocks' routing and of the shared
/// results, and the stage's barrier brings it here.
inline uint4 unsent_output(const RankArguments& arguments, u32 token, u32 byte) {
  float sum[8] = {};
  if constexpr (kShape.zero_experts > 0) {
    const RankMemory memory = rank_memory(arguments);
    float weight = 0.0F;
#pragma unroll 1
    for (u32 pair = token * kGeometry.top_k; pair < (token + 1) * kGeometry.top_k; ++pair) {
      weight += memory.pair_expert[pair] == kNone ? memory.pair_weight[pair] : 0.0F;
    }
    if (weight != 0.0F) {
      add_weighted(sum, weight, arguments.x_rows + u64{token} * kOutputBytes + byte);
    }
  }
  if constexpr (kShares) {
    const PairRow shared = shared_summand_of(rank_of(arguments, nullptr), token);
    add_weighted(sum, shared.weight,
                 arguments.heap + Layout(kGeometry, arguments.place).result(shared.row) + byte);
  }
  return packed(sum);
}

/// A byte of where the sum of a token goes that has no rows.
inline uint4* unsent_at(const RankArguments& arguments, const Call& call, u32 token, u32 byte) {
  if constexpr (kSliced) {
    const Rank<Machine> rank = rank_of(arguments, nullptr);
    u8* row = outgoing_partial(rank, place_of_partial(rank, call, token));
    return reinterpret_cast<uint4*>(row + byte);
  }
  return output_at(arguments, token, byte);
}

/// Some bytes of a token's sum, the nth of a part, to where they go.
inline void store_sum(const RankArguments& arguments, const Task& task, const CombineRows& rows,
                      u32 nth, u32 byte, uint4 sum) {
  if constexpr (kSliced) {
    const Summands summands = summands_of(kGeometry, task);
    const Rank<Machine> rank = rank_of(arguments, nullptr);
    if (summands == Summands::pairs) {
      *reinterpret_cast<uint4*>(outgoing_partial(rank, rows.token[nth]) + byte) = sum;
      return;
    }
    if (kGeometry.sums_everywhere != 0 && summands == Summands::slices) {
      for (u32 other = 1; other < kGeometry.slices; ++other) {
        *reinterpret_cast<uint4*>(outgoing_total(rank, other, rows.token[nth]) + byte) = sum;
      }
    }
  }
  *output_at(arguments, rows.token[nth], byte) = sum;
}

/// The consumers' side, of tokens that have no rows.
inline void write_unsent(const RankArguments& arguments, const Call& call, Shared& shared,
                         RingPosition<kStages>& stage) {
  constexpr u32 kVectors = kOutputBytes / kVectorBytes;
  shared.stage_full[stage.index].wait(stage.parity);
  const Unsent& list = unsent_of(shared.stages[stage.index]);
  const u32 vectors = list.count * kVectors;
  for (u32 i = threadIdx.x - kFirstConsumerWarp * 32; i < vectors; i += kConsumerThreads) {
    const u32 token = list.token[i / kVectors];
    const u32 byte = i % kVectors * kVectorBytes;
    *unsent_at(arguments, call, token, byte) = unsent_output(arguments, token, byte);
  }
  release_read_stage(shared, stage.index);
  stage.advance();
}

/// The consumers' side of a call of gradients: what is behind each row is its weight's.
inline void take_weight_gradients(const RankArguments& arguments, const Task& task,
                                  const CombineRows& rows) {
  const Layout layout(kGeometry, arguments.place);
  for (u32 i = threadIdx.x - kFirstConsumerWarp * 32; i < task.rows * kGeometry.top_k;
       i += kConsumerThreads) {
    const u32 row = rows.row[i].row;
    if (row != kNone) {
      const u32 token = rows.token[i / kGeometry.top_k];
      of_gradients(arguments).d_topk_weights[u64{token} * kGeometry.top_k + i % kGeometry.top_k] =
          *reinterpret_cast<const float*>(arguments.heap + layout.result(row) + kDWeightAt);
    }
  }
}

/// The consumers' side: each token's rows, weighted and summed in the order j = 0 ... k-1 in fp32
/// (thesis eq. 5.2), rounded once.
inline void sum_tokens(const RankArguments& arguments, const Call& call, const Task& task,
                       const CombineRows& rows, Shared& shared, RingPosition<kStages>& stage) {
  if (task.rows == 0) {
    write_unsent(arguments, call, shared, stage);
  }
  if constexpr (kGradients) {
    static_assert(!kGradients || kSummands == kGeometry.top_k);
    take_weight_gradients(arguments, task, rows);
  }
  constexpr u32 kVectors = kPieceBytes / kVectorBytes;
  for (u32 first = 0; first < task.rows * kPieces; first += kPiecesInStage, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    const u32 vectors = pieces_in_stage(task, first) * kVectors;
    for (u32 i = threadIdx.x - kFirstConsumerWarp * 32; i < vectors; i += kConsumerThreads) {
      const u32 nth = i / kVectors;
      const u32 at = i % kVectors * kVectorBytes;
      const u32 token = (first + nth) / kPieces;
      const PairRow* summands = &rows.row[token * kSummands];
      const u8* from = reinterpret_cast<const u8*>(&shared.stages[stage.index]) +
                       nth * kSummands * kPieceBytes + at;
      float sum[8] = {};
#pragma unroll
      for (u32 j = 0; j < kSummands; ++j) {
        const PairRow summand = summands[j];
        if (summand.row != kNone) {
          add_weighted(sum, summand.weight, from + j * kPieceBytes);
        }
      }
      const u32 byte = (first + nth) % kPieces * kPieceBytes + at;
      if (byte < kOutputBytes) {
        store_sum(arguments, task, rows, token, byte, packed(sum));
      }
    }
    release_read_stage(shared, stage.index);
  }
}

}  // namespace moeos::sm90
