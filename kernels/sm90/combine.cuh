// Combine: the weighted sums of tokens whose rows are all back.
//
// The load warp brings the rows of complete tokens into the stages, and the consumers sum them from
// there. A stage carries several tokens when their rows are short, or a piece of one token's rows
// when they are long; a stage without tokens ends the part. May not know: who counts the tokens.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/row_tasks.hpp"

namespace moeos::sm90 {

inline constexpr u32 kVectorBytes = 16;

/// What a stage carries, at its end.
struct CombineHeader {
  static constexpr u32 kPairs = 32;
  u32 tokens;            // 0: the part has no more
  u32 first_byte;        // of the rows' pieces
  u32 present;           // bit i: pair i has a row
  u32 token[kPairs];     // [token of the stage]
  float weight[kPairs];  // [token of the stage * top_k + j]
};

// What fits into a stage: pieces of this many bytes, of all rows of so many tokens.
inline constexpr u32 kCombineBytes =
    static_cast<u32>(sizeof(Stage) - sizeof(CombineHeader)) / kVectorBytes * kVectorBytes;
inline constexpr u32 kPieceLimit = kCombineBytes / kGeometry.top_k / kVectorBytes * kVectorBytes;
inline constexpr u32 kPieces = ceil_div(kGeometry.row_bytes, kPieceLimit);
inline constexpr u32 kPieceBytes = align_up(ceil_div(kGeometry.row_bytes, kPieces), kVectorBytes);
inline constexpr u32 kCombineTokens =
    kPieces > 1 ? 1
                : minimum(CombineHeader::kPairs / kGeometry.top_k,
                          kCombineBytes / (kGeometry.top_k * kPieceBytes));
static_assert(kPieceBytes <= kPieceLimit && kCombineTokens > 0);
static_assert(kGeometry.top_k <= CombineHeader::kPairs, "a lane looks up one pair");
static_assert(CombineHeader::kPairs <= Machine::kLanes);

inline CombineHeader& header_of(Stage& stage) {
  return *reinterpret_cast<CombineHeader*>(reinterpret_cast<u8*>(&stage) + kCombineBytes);
}

/// The load warp: fills one stage with pieces, from `first_byte` on, of the rows that the lanes
/// name (0: none).
inline void load_pieces(Loader& loader, u32 tokens, u32 first_byte, u32 token, u64 row,
                        float weight) {
  const u32 lane = Machine::lane();
  Barrier& full = loader.full();
  if (lane == 0) {
    loader.wait();
  }
  __syncwarp();
  CombineHeader& header = header_of(loader.stage());
  const u32 present = Machine::ballot(row != 0);
  header.weight[lane] = weight;
  if (lane % kGeometry.top_k == 0) {
    header.token[lane / kGeometry.top_k] = token;
  }
  const u32 bytes = minimum(kPieceBytes, kGeometry.row_bytes - first_byte);
  __syncwarp();
  if (lane == 0) {
    header.tokens = tokens;
    header.first_byte = first_byte;
    header.present = present;
    full.arrive_expecting(Machine::count(present) * bytes);
  }
  __syncwarp();
  if (row != 0) {
    u8* to = reinterpret_cast<u8*>(&loader.stage()) + lane * kPieceBytes;
    load_bytes(reinterpret_cast<const void*>(row + first_byte), to, bytes, full);
  }
  loader.advance();
}

/// The load warp's side of a Combine part; notes in the slot how many tokens there are.
inline void load_tokens(const Rank<Machine>& rank, const Call& call, const RoutingMap& map,
                        const Task& task, Slot& slot, Loader& loader) {
  const u32 lane = Machine::lane();
  u32 combined = 0;
  for_each_token(rank, call, map, task, [&](u32 token, bool exists) {
    for (u32 open = Machine::ballot(exists); open != 0;) {
      u32 mine = kNone;
      u32 tokens = 0;
      for (; tokens < kCombineTokens && open != 0; ++tokens, open &= open - 1) {
        const u32 next = Machine::broadcast(token, Machine::first_lane(open));
        mine = lane / kGeometry.top_k == tokens ? next : mine;
      }
      u64 row = 0;
      float weight = 0.0F;
      if (mine != kNone) {
        const u32 pair = mine * kGeometry.top_k + lane % kGeometry.top_k;
        if (map.sent(pair)) {
          row = reinterpret_cast<u64>(rank.heap + rank.layout.row_at(rank.memory.pair_row[pair]));
          weight = rank.memory.pair_weight[pair];
        }
      }
      for (u32 first_byte = 0; first_byte < kGeometry.row_bytes; first_byte += kPieceBytes) {
        load_pieces(loader, tokens, first_byte, mine, row, weight);
      }
      combined += tokens;
    }
  });
  if (lane == 0) {
    slot.combined = combined;
  }
  load_pieces(loader, 0, 0, kNone, 0, 0.0F);
}

/// The consumers' side: each token's rows, weighted and summed in the order j = 0 ... k-1 in fp32
/// (thesis eq. 5.2), rounded once.
inline void sum_tokens(const RankArguments& arguments, Shared& shared,
                       RingPosition<kStages>& stage) {
  constexpr u32 kVectors = kPieceBytes / kVectorBytes;
  const u32 thread = threadIdx.x - kFirstConsumerWarp * 32;
  for (u32 tokens = kNone; tokens != 0; stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    const CombineHeader& header = header_of(shared.stages[stage.index]);
    tokens = header.tokens;
    for (u32 i = thread; i < tokens * kVectors; i += kConsumerThreads) {
      const u32 t = i / kVectors;
      const u32 at = i % kVectors * kVectorBytes;
      const u8* rows = reinterpret_cast<const u8*>(&shared.stages[stage.index]) +
                       t * kGeometry.top_k * kPieceBytes + at;
      float sum[8] = {};
#pragma unroll
      for (u32 j = 0; j < kGeometry.top_k; ++j) {
        if ((header.present >> (t * kGeometry.top_k + j) & 1U) != 0) {
          const float scale = header.weight[t * kGeometry.top_k + j];
          const uint4 value = *reinterpret_cast<const uint4*>(rows + j * kPieceBytes);
          const u32 pairs[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
          for (u32 n = 0; n < 4; ++n) {
            sum[2 * n] += scale * Element::low(pairs[n]);
            sum[2 * n + 1] += scale * Element::high(pairs[n]);
          }
        }
      }
      const u32 byte = header.first_byte + at;
      if (byte < kGeometry.row_bytes) {
        *reinterpret_cast<uint4*>(arguments.out + u64{header.token[t]} * kGeometry.row_bytes +
                                  byte) =
            make_uint4(Element::pack(sum[0], sum[1]), Element::pack(sum[2], sum[3]),
                       Element::pack(sum[4], sum[5]), Element::pack(sum[6], sum[7]));
      }
    }
    release_stage(shared, stage.index);
  }
}

}  // namespace moeos::sm90
