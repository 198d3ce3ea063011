// SPDX-License-Identifier: Apache-2.0
// Combine: the weighted sums of tokens whose rows are all back.
//
// The fetch warp looks up where the rows lie, while the block computes the part before; the load
// warp brings them into the stages, and the consumers sum them from there. Must not depend on: the
// actors that count the tokens.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/backward_arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/decode.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/route/routing_rules.cuh"
#include "runtime/memory/slices.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

// Tokens pass through the stages in pieces, each with the same columns of all of a token's rows; a
// stage carries several tokens when their rows are short, or a piece of one when they are long. A
// piece has kPieceBytes bytes of the output. For a quantized row it has half as many, followed by
// all scales of the row.
inline constexpr u32 kVectorBytes = 16;
inline constexpr u32 kPieceAlign = kCodedResults ? 2 * kVectorBytes : kVectorBytes;
inline constexpr u32 kScalesBytes = align_up(kShape.hidden / kResultGroup * 4, kVectorBytes);
/// Whether some rows that are added up are quantized and others are not.
inline constexpr bool kMixed = kCodedResults && (kShares || kShape.zero_experts > 0);
/// Bytes that a row's piece of `piece` bytes takes in a stage.
constexpr u32 place_bytes(u32 piece) {
  const u32 codes = piece / 2 + kScalesBytes;
  return !kCodedResults ? piece : kMixed ? maximum(piece, codes) : codes;
}
inline constexpr u32 kPlaceLimit =
    static_cast<u32>(sizeof(Stage)) / kSummands / kVectorBytes * kVectorBytes;
inline constexpr u32 kPieceLimit =
    (kCodedResults && !kMixed ? 2 * (kPlaceLimit - kScalesBytes) : kPlaceLimit) / kPieceAlign *
    kPieceAlign;
inline constexpr u32 kPieces = ceil_div(kOutputBytes, kPieceLimit);
inline constexpr u32 kPieceBytes = align_up(ceil_div(kOutputBytes, kPieces), kPieceAlign);
inline constexpr u32 kPlaceBytes = place_bytes(kPieceBytes);
inline constexpr u32 kPiecesInStage = minimum(
    Machine::kLanes / kSummands, static_cast<u32>(sizeof(Stage)) / (kSummands * kPlaceBytes));
static_assert(kPieceBytes <= kPieceLimit && kPlaceBytes <= kPlaceLimit && kPiecesInStage > 0);
static_assert(kSummands <= Machine::kLanes, "a lane loads a row's piece");

/// The number of a part's pieces from `first` on that a stage carries, one after the other. The
/// load warp and the consumers count alike.
inline u32 pieces_in_stage(const Task& task, u32 first) {
  return minimum(kPiecesInStage, task.rows * kPieces - first);
}

/// Instead of rows: tokens of a block that have none.
struct Unsent {
  u32 count;
  u32 token[kRouteTokens];
};
static_assert(sizeof(Unsent) <= sizeof(Stage));
inline Unsent& unsent_of(Stage& stage) { return *reinterpret_cast<Unsent*>(&stage); }

/// Instead of a row: the token itself, whose pair is with a zero expert; for gradients, the
/// gradient of its output.
inline constexpr u32 kOwnRow = kNone - 1;
inline const u8* own_row(const RankArguments& arguments, u32 token) {
  const u8* const rows = kGradients ? of_gradients(arguments).d_out : arguments.x_rows;
  return rows + u64{token} * kOutputBytes;
}
/// Whether a row has been multiplied by its weight when it is back: as a token before it was sent,
/// or as gradients where they were made. With a weight on the input, gradients of the input are
/// multiplied here.
inline constexpr bool kWeighedRows = kShape.weight_on_input != kGradients;
/// What a pair adds to its token's sum. `row`: where its row lies, or kNone: it was not sent.
inline PairRow summand_of(const Rank<Machine>& rank, u32 pair, u32 row) {
  const float weight = rank.memory.pair_weight[pair];
  if constexpr (kGradients && kShape.zero_experts > 0) {
    if (row == kNone && has_zero_expert(rank.memory, pair)) {
      return {kOwnRow, weight};
    }
  } else if constexpr (kShape.zero_experts > 0) {
    // Pairs beyond a capacity have an expert, and unused slots no weight.
    const bool zero = rank.memory.pair_expert[pair] == kNone && weight != 0.0F;
    return {row == kNone && zero ? kOwnRow : row, kWeighedRows ? 1.0F : weight};
  }
  return {row, kWeighedRows ? 1.0F : weight};
}

/// What the shared experts add to a token's sum. Their rows follow the others, unless results are
/// quantized: then a token's row has the token's number.
inline PairRow shared_summand_of(const Rank<Machine>& rank, u32 token) {
  const float weight = kShape.shared_gate ? rank.memory.shared_weight[token] : 1.0F;
  return {kCodedResults ? token : rank.layout.results() + token, weight};
}
/// Whether the nth row that is added up for a token is the shared experts'; and whether it is
/// quantized.
inline bool is_of_shared(u32 nth) { return kShares && nth == kGeometry.top_k; }
inline bool is_of_codes(u32 nth, u32 row) {
  return kCodedResults && !is_of_shared(nth) && !(kShape.zero_experts > 0 && row == kOwnRow);
}
/// Where the row lies, unless it is the token itself.
inline u64 result_at(const Layout& layout, u32 nth, u32 row) {
  return kCodedResults && is_of_shared(nth) ? layout.shared_result(row) : layout.result(row);
}

/// The fetch warp, for a part's tokens that it has looked up: notes where their partial sums go, if
/// not to the output, and that slices add no rows to these. For gradients the consumers find it.
inline void note_partials(const RankArguments& arguments, const Call& call, const Task& task,
                          CombineRows& rows) {
  static_assert(CombineRows::kTokens <= Machine::kLanes);
  if (kGradients || task.kind != TaskKind::combine ||
      summands_of(kGeometry, task) != Summands::pairs) {
    return;
  }
  __syncwarp();  // the lanes have noted them
  // For this look only: otherwise addresses take registers for all parts.
  const Rank<Machine> here = rank_of_look(arguments);
  Call its = call;
  its.tokens = Machine::opaque(call.tokens);
  if (Machine::lane() < task.rows) {
    u32& token = rows.token[Machine::lane()];
    token = adds_slices(kGeometry, its) ? place_of_partial(here, its, token) : token;
#pragma unroll 1
    for (u32 j = kExpertSummands; j < kSummands; ++j) {
      rows.row[Machine::lane() * kSummands + j] = {kNone, 0.0F};
    }
  }
}

/// The fetch warp, for tokens whose sums over slices are here.
inline void look_up_sums(const RankArguments& arguments, const Call& call, const Task& task,
                         CombineRows& rows) {
  if constexpr (kGradients) {  // the consumers read them where they are
    for (u32 i = Machine::lane(); i < task.rows; i += Machine::kLanes) {
      rows.token[i] = task.first_ready + i;
    }
    return;
  }
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

/// The fetch warp: looks up where a part's rows lie, all of them at once, because a round trip to
/// memory takes longer than a token's rows do. Not for rows that are awaited.
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
  // For shared experts at an address for this look: otherwise it is kept for all parts.
  const Rank<Machine> here = kShares ? rank_of_look(arguments) : rank;
#pragma unroll
  for (u32 first = 0; first < CombineRows::kTokens * kExpertSummands; first += Machine::kLanes) {
    // Only stores are conditional, so that all loads are under way together.
    const u32 i = minimum(first + Machine::lane(), summands - 1);
    // Acquired with the part's word.
    const u32 token = rank.memory.ready_tokens[task.first_ready + i / kExpertSummands];
    const u32 j = i % kExpertSummands;
    const u32 pair = token * kGeometry.top_k + minimum(j, kGeometry.top_k - 1);
    const u32 row = rank.memory.pair_row[pair];  // arbitrary for a pair that was not sent
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

/// look_up_rows for a pair whose row is awaited, in a part of consecutive tokens.
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

/// The load warp: lists a block's tokens that sent no row in one stage; returns how many there are.
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
  const bool read_in_place = kSumsGradients && summands_of(kGeometry, task) != Summands::pairs;
  const u32 pieces = read_in_place ? 0 : task.rows * kPieces;
  for (u32 first = 0; first < pieces; first += kPiecesInStage) {
    const u32 piece = (MOEOS_PLANTED(stages_carry_the_first_tokens) ? 0 : first) + lane / kSummands;
    const u32 summand = piece / kPieces * kSummands + lane % kSummands;
    const bool there = lane < pieces_in_stage(task, first) * kSummands;
    const u32 row = there ? slot.rows.row[summand].row : kNone;
    const u32 first_byte = MOEOS_PLANTED(pieces_are_the_first) ? 0 : piece % kPieces * kPieceBytes;
    const u32 bytes = row == kNone ? 0 : minimum(kPieceBytes, kOutputBytes - first_byte);
    const u32 nth = lane % kSummands;
    const bool coded = row != kNone && is_of_codes(nth, row);
    const u32 all_bytes = __reduce_add_sync(~0U, coded ? bytes / 2 + kScalesBytes : bytes);
    Barrier& full = loader.full();
    if (lane == 0) {
      loader.wait();
      full.arrive_expecting(all_bytes);
    }
    __syncwarp();
    if (row != kNone) {
      const bool of_slices = summands_of(kGeometry, task) != Summands::pairs;
      const u8* from =
          rank.heap + (of_slices ? rank.layout.sum_at(row) : result_at(rank.layout, nth, row));
      if (kShape.zero_experts > 0 && row == kOwnRow) {
        from = own_row(arguments, slot.rows.token[piece / kPieces]);
      }
      u8* const to = reinterpret_cast<u8*>(&loader.stage()) + lane * kPlaceBytes;
      if (coded) {
        load_bytes(from + first_byte / 2, to, bytes / 2, full);
        load_bytes(from + kShape.hidden, to + kPieceBytes / 2, kScalesBytes, full);
      } else {
        load_bytes(from + first_byte, to, bytes, full);
      }
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
/// sum += weight times eight codes of a piece, from its `nth` one on, which are a row's from
/// `column` on: a piece may reach beyond its row.
inline void add_weighted_codes(float (&sum)[8], float weight, const u8* piece, u32 nth,
                               u32 column) {
  const auto* scales = reinterpret_cast<const float*>(piece + kPieceBytes / 2);
  weight *= scales[minimum(column, kShape.hidden - 1) / kResultGroup];
  const uint2 value = *reinterpret_cast<const uint2*>(piece + nth);
  const u32 packed[4] = {value.x, value.x >> 16, value.y, value.y >> 16};
#pragma unroll
  for (u32 n = 0; n < 4; ++n) {
    const float2 pair = from_e4m3(packed[n]);
    sum[2 * n] += weight * pair.x;
    sum[2 * n + 1] += weight * pair.y;
  }
}
inline uint4 packed(const float (&sum)[8]) {
  return make_uint4(Element::pack(sum[0], sum[1]), Element::pack(sum[2], sum[3]),
                    Element::pack(sum[4], sum[5]), Element::pack(sum[6], sum[7]));
}

/// Bytes of the output of a token that no expert took: zeros, or what zero and shared experts
/// return for it. The list of these tokens was made after an acquire of all blocks' routing and of
/// the shared results, and the stage's barrier passes both on to this warp.
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
      add_weighted(sum, weight, own_row(arguments, token) + byte);
    }
  }
  if constexpr (kShares) {
    const PairRow shared = shared_summand_of(rank_of(arguments, nullptr), token);
    const u64 at = result_at(Layout(kGeometry, arguments.place), kGeometry.top_k, shared.row);
    add_weighted(sum, shared.weight, arguments.heap + at + byte);
  }
  return packed(sum);
}

/// Where a byte of the sum of a token without rows goes.
inline uint4* unsent_at(const RankArguments& arguments, const Call& call, u32 token, u32 byte) {
  if (adds_slices(kGeometry, call)) {
    const Rank<Machine> rank = rank_of(arguments, nullptr);
    u8* row = outgoing_partial(rank, place_of_partial(rank, call, token));
    return reinterpret_cast<uint4*>(row + byte);
  }
  return output_at(arguments, token, byte);
}

/// Stores some bytes of the sum of a part's nth token where they go.
inline void store_sum(const RankArguments& arguments, const Task& task, const CombineRows& rows,
                      u32 nth, u32 byte, uint4 sum) {
  if constexpr (kSliced) {
    const Summands summands = summands_of(kGeometry, task);
    const Rank<Machine> rank = rank_of(arguments, nullptr);
    if (summands == Summands::pairs && arguments.leaves_partials == 0) {
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

/// Whether gradients of some weights are made where the token is: the products of x and the
/// gradient that the weight multiplies, or of x and gradients of what was sent instead of it.
inline constexpr bool kMultipliesTokens =
    kGradients && (kShape.zero_experts > 0 || kShape.weight_on_input);

/// <x, row>, the gradient of a pair's weight. By a warp, all of whose lanes have it.
inline float multiply_token(const RankArguments& arguments, u32 token, const u8* row) {
  const auto* const one =
      reinterpret_cast<const u32*>(arguments.x_rows + u64{token} * kOutputBytes);
  const auto* const other = reinterpret_cast<const u32*>(row);
  float sum = 0.0F;
#pragma unroll 1
  for (u32 i = Machine::lane(); i < kOutputBytes / sizeof(u32); i += Machine::kLanes) {
    sum += Element::low(one[i]) * Element::low(other[i]) +
           Element::high(one[i]) * Element::high(other[i]);
  }
  return sum_of_lanes(sum);
}

/// Where a token's sums of gradients go: a row of its owner's.
inline float* sums_at(const RankArguments& arguments, const Call& call, u32 token) {
  const Rank<Machine> rank = rank_of(arguments, nullptr);
  return reinterpret_cast<float*>(outgoing_partial(rank, place_of_partial(rank, call, token)));
}
/// Where the gradient of a choice's weight goes.
inline float* d_weight_at(const RankArguments& arguments, const Call& call, u32 token, u32 nth) {
  if constexpr (kSumsGradients) {
    return sums_at(arguments, call, token) + kShape.hidden + nth;
  }
  return of_gradients(arguments).d_topk_weights + u64{token} * kGeometry.choices() + nth;
}

/// Begins the sum of a token's rows with some bytes of this slice's shared experts' result.
inline void begin_sum(float (&sum)[8], const RankArguments& arguments, u32 token, u32 byte) {
  const float* const added = of_gradients(arguments).d_x_added;
  if (added != nullptr) {
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      sum[n] = added[u64{token} * kShape.hidden + byte / 2 + n];
    }
  }
}
/// Stores some bytes of a token's gradient of x to its row of sums.
inline void store_unrounded(float* sums, u32 byte, const float (&sum)[8]) {
  auto* const to = reinterpret_cast<uint4*>(sums + byte / 2);
  const auto four = [&](u32 n) {
    return make_uint4(__builtin_bit_cast(u32, sum[n]), __builtin_bit_cast(u32, sum[n + 1]),
                      __builtin_bit_cast(u32, sum[n + 2]), __builtin_bit_cast(u32, sum[n + 3]));
  };
  to[0] = four(0);
  to[1] = four(4);
}
/// Stores this slice's gradient of the shared experts' weight to a token's row of sums.
inline void store_shared(const RankArguments& arguments, const Call& call, u32 token) {
  const float* const d_shared = of_gradients(arguments).d_shared;
  sums_at(arguments, call, token)[kSums - 1] = d_shared == nullptr ? 0.0F : d_shared[token];
}

/// The consumers' side of a gradient call of slices, for tokens that have no rows here.
inline void sum_unsent(const RankArguments& arguments, const Call& call, const Unsent& list) {
  constexpr u32 kVectors = kOutputBytes / kVectorBytes;
  const u32 first = threadIdx.x - kFirstConsumerWarp * 32;
#pragma unroll 1
  for (u32 i = first; i < list.count * kVectors; i += kConsumerThreads) {
    const u32 token = list.token[i / kVectors];
    const u32 byte = i % kVectors * kVectorBytes;
    float sum[8] = {};
    begin_sum(sum, arguments, token, byte);
    store_unrounded(sums_at(arguments, call, token), byte, sum);
  }
#pragma unroll 1
  for (u32 i = first; i < list.count * kSumsOfWeights; i += kConsumerThreads) {
    const u32 token = list.token[i / kSumsOfWeights];
    const u32 nth = i % kSumsOfWeights;
    if (nth < kGeometry.choices()) {
      *d_weight_at(arguments, call, token, nth) = 0.0F;
    } else {
      store_shared(arguments, call, token);
    }
  }
}

/// The consumers' side of a gradient call, for tokens whose sums of slices are here: adds them up,
/// in the slices' order, and stores the results where gradients are written and, if this rank is
/// the tokens' owner, at all other slices. The part's word was acquired, and the slot's barrier
/// passes that on.
inline void add_slices_of_gradients(const RankArguments& arguments, const Call& call,
                                    const Task& task, const CombineRows& rows) {
  constexpr u32 kVectors = kOutputBytes / kVectorBytes;
  constexpr u32 kOfToken = kVectors + kSumsOfWeights;  // of a token: eight columns, or one number
  const GradientArguments& its = of_gradients(arguments);
  const Rank<Machine> rank = rank_of(arguments, nullptr);
  const Summands summands = summands_of(kGeometry, task);
  const u32 others = summands == Summands::slices ? kGeometry.slices : 1;
#pragma unroll 1
  for (u32 i = threadIdx.x - kFirstConsumerWarp * 32; i < task.rows * kOfToken;
       i += kConsumerThreads) {
    const u32 token = rows.token[i / kOfToken];
    const u32 share = i % kOfToken;
    const u32 nth = share < kVectors ? 0 : share - kVectors;  // of the numbers after d_x
    const u32 at = share < kVectors ? share * 8 : kShape.hidden + nth;
    const u32 count = share < kVectors ? 8 : 1;
    float sum[8] = {};
#pragma unroll 1
    for (u32 one = 0; one < sums_of(kGeometry, summands); ++one) {
      const u64 row = rank.layout.sum_at(sum_row(rank, call, summands, token, one));
      const auto* const from = reinterpret_cast<const float*>(rank.heap + row) + at;
#pragma unroll
      for (u32 n = 0; n < 8; ++n) {
        sum[n] += n < count ? from[n] : 0.0F;
      }
    }
#pragma unroll 1
    for (u32 other = 1; other < others; ++other) {
      float* const to = reinterpret_cast<float*>(outgoing_total(rank, other, token)) + at;
#pragma unroll
      for (u32 n = 0; n < 8; ++n) {
        if (n < count) {
          to[n] = sum[n];
        }
      }
    }
    if (share < kVectors) {
      *output_at(arguments, token, share * kVectorBytes) = packed(sum);
    } else if (nth < kGeometry.choices()) {
      its.d_topk_weights[u64{token} * kGeometry.choices() + nth] = sum[0];
    } else if (its.d_shared != nullptr) {
      its.d_shared[token] = sum[0];
    }
  }
}

/// The consumers' side of a gradient call, for tokens that have no rows: what zero experts give
/// them. A warp has one token and adds its weights up once.
inline void derive_unsent(const RankArguments& arguments, const Call& call, const Unsent& list) {
  const RankMemory memory = rank_memory(arguments);
  const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
#pragma unroll 1
  for (u32 i = warp; i < list.count; i += kConsumerWarps) {
    const u32 token = list.token[i];
    const u8* const d_out = own_row(arguments, token);
    float weight = 0.0F;
#pragma unroll 1
    for (u32 nth = 0; nth < kGeometry.top_k; ++nth) {
      const u32 pair = token * kGeometry.top_k + nth;
      if (has_zero_expert(memory, pair)) {
        weight += memory.pair_weight[pair];
        const float sum = multiply_token(arguments, token, d_out);
        if (Machine::lane() == 0) {
          *d_weight_at(arguments, call, token, nth) = sum;
        }
      }
    }
#pragma unroll 1
    for (u32 byte = Machine::lane() * kVectorBytes; byte < kOutputBytes;
         byte += Machine::kLanes * kVectorBytes) {
      float sum[8] = {};
      if (weight != 0.0F) {
        add_weighted(sum, weight, d_out + byte);
      }
      *output_at(arguments, token, byte) = packed(sum);
    }
  }
}

/// The consumers' side, for tokens that have no rows.
inline void write_unsent(const RankArguments& arguments, const Call& call, Shared& shared,
                         RingPosition<kStages>& stage) {
  constexpr u32 kVectors = kOutputBytes / kVectorBytes;
  shared.stage_full[stage.index].wait(stage.parity);
  const Unsent& list = unsent_of(shared.stages[stage.index]);
  const u32 vectors = kMultipliesTokens || kSumsGradients ? 0 : list.count * kVectors;
  for (u32 i = threadIdx.x - kFirstConsumerWarp * 32; i < vectors; i += kConsumerThreads) {
    const u32 token = list.token[i / kVectors];
    const u32 byte = i % kVectors * kVectorBytes;
    *unsent_at(arguments, call, token, byte) = unsent_output(arguments, token, byte);
  }
  if constexpr (kSumsGradients) {
    sum_unsent(arguments, call, list);
  } else if constexpr (kMultipliesTokens) {
    derive_unsent(arguments, call, list);
  }
  release_read_stage(shared, stage.index);
  stage.advance();
}

/// The consumers' side of a gradient call: the number after each row is its weight's gradient, if
/// the weight multiplied the expert's output. A choice's gradient is the sum over all its pairs.
inline void take_weight_gradients(const RankArguments& arguments, const Call& call,
                                  const Task& task, const CombineRows& rows) {
  constexpr u32 kPairs = kGeometry.pairs_of_choice();
  const Layout layout(kGeometry, arguments.place);
  const u32 choices = task.rows * kGeometry.choices();
  if constexpr (kMultipliesTokens) {
    const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
#pragma unroll 1
    for (u32 i = warp; i < choices; i += kConsumerWarps) {
      const u32 token = rows.token[i / kGeometry.choices()];
      float sum = 0.0F;
      bool some = kSumsGradients && kShape.weight_on_input;
#pragma unroll 1
      for (u32 pair = i * kPairs; pair < (i + 1) * kPairs; ++pair) {
        const u32 row = rows.row[pair].row;
        const bool own = kShape.zero_experts > 0 && row == kOwnRow;
        if (own || (kShape.weight_on_input && row != kNone)) {
          some = true;
          sum +=
              multiply_token(arguments, token,
                             own ? own_row(arguments, token) : arguments.heap + layout.result(row));
        }
      }
      if (some && Machine::lane() == 0) {
        *d_weight_at(arguments, call, token, i % kGeometry.choices()) = sum;
      }
    }
  }
  const u32 first = threadIdx.x - kFirstConsumerWarp * 32;
  if constexpr (kSumsGradients) {
    for (u32 i = first; i < task.rows; i += kConsumerThreads) {
      store_shared(arguments, call, rows.token[i]);
    }
  }
  if constexpr (kShape.weight_on_input) {
    return;
  }
  for (u32 i = first; i < choices; i += kConsumerThreads) {
    float sum = 0.0F;
    bool some = kSumsGradients;
#pragma unroll 1
    for (u32 pair = i * kPairs; pair < (i + 1) * kPairs; ++pair) {
      const u32 row = rows.row[pair].row;
      if (row != kNone && !(kMultipliesTokens && row == kOwnRow)) {
        some = true;
        sum += *reinterpret_cast<const float*>(arguments.heap + layout.result(row) + kDWeightAt);
      }
    }
    if (some) {
      const u32 token = rows.token[i / kGeometry.choices()];
      *d_weight_at(arguments, call, token, i % kGeometry.choices()) = sum;
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
  if constexpr (kSumsGradients) {
    if (summands_of(kGeometry, task) != Summands::pairs) {
      add_slices_of_gradients(arguments, call, task, rows);
      return;
    }
  }
  if constexpr (kGradients) {
    static_assert(!kGradients || kSummands == kGeometry.top_k);
    take_weight_gradients(arguments, call, task, rows);
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
                       nth * kSummands * kPlaceBytes + at;
      const u32 byte = (first + nth) % kPieces * kPieceBytes + at;
      float sum[8] = {};
      if (kSumsGradients && byte < kOutputBytes) {
        begin_sum(sum, arguments, rows.token[token], byte);
      }
#pragma unroll
      for (u32 j = 0; j < kSummands; ++j) {
        const PairRow summand = summands[j];
        if (summand.row != kNone) {
          if (is_of_codes(j, summand.row)) {
            const u32 column = ((first + nth) % kPieces * kPieceBytes + at) / 2;
            add_weighted_codes(sum, summand.weight, from + j * kPlaceBytes - at, at / 2, column);
          } else {
            add_weighted(sum, summand.weight, from + j * kPlaceBytes);
          }
        }
      }
      if (kSumsGradients && byte < kOutputBytes) {
        store_unrounded(sums_at(arguments, call, rows.token[token]), byte, sum);
      } else if (byte < kOutputBytes) {
        store_sum(arguments, task, rows, token, byte, packed(sum));
      }
    }
    release_read_stage(shared, stage.index);
  }
}

}  // namespace moeos::sm90
