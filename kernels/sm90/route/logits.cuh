// SPDX-License-Identifier: Apache-2.0
// The gate logits of a block's tokens: sums over the slices of the depth, from the consumers'
// accumulators or kept by the parts of the block, in shared memory, some tokens at a time.
//
// Must not depend on: what is chosen by logits.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/route/fp32_router.cuh"

namespace moeos::sm90 {

/// Tokens whose logits Route's memory holds at once.
constexpr u32 round_of(u32 tokens) {
  return tokens * kLogits * sizeof(float) <= kRouteMemory ? tokens : round_of(tokens / 2);
}
inline constexpr u32 kRoundTokens = round_of(kRouteTokens);
static_assert(kRouteTokens % kRoundTokens == 0);

/// The gate logits of a block's tokens, some of them at a time in shared memory. Each warpgroup has
/// half of every step of the depth; a logit is the sum of one warpgroup, slice by slice, plus the
/// sum of the other. With an fp32 router each warpgroup has half of the experts, and alone sums up
/// their logits. So a logit is the same, bit for bit, whether one part multiplies all slices and
/// has the sums in its accumulators, or several parts keep the sums of each slice, and the last one
/// adds them up.
///
/// The parts keep a token's sums in its row of the output, which is not written before the call has
/// routed all of its tokens; or, where the row is too short, in the rank's memory. Every function
/// is called by all consumers; sync() is their barrier.
class Logits {
 public:
  /// Whether a part that multiplies all slices has registers for their sums, in addition to the
  /// accumulators; otherwise it keeps them as other parts do.
  static constexpr bool kInRegisters = kGeometry.route_slices == 1 || kRouteColumns <= 128;

  /// `memory` is Route's. `kept`: the slices' sums are kept, and not in the accumulators.
  Logits(const RankArguments& arguments, u8* memory, u32 warp, TokenRange tokens, bool kept)
      : arguments_(arguments),
        sums_(reinterpret_cast<float*>(memory)),
        warp_(warp),
        first_token_(tokens.first),
        end_(tokens.end),
        kept_(kept) {}

  u32 warp() const { return warp_; }
  u32 group() const { return warp_ / (kConsumerWarps / kConsumers); }
  bool kept() const { return kept_; }
  /// The number of the block's tokens from `first` on that are brought into shared memory together.
  u32 tokens_from(u32 first) const {
    return first_token_ + first < end_ ? minimum(kRoundTokens, end_ - first_token_ - first) : 0;
  }
  u32 token(u32 place) const { return first_token_ + place; }
  float at(u32 token, u32 expert) const { return sums_[sum_place(token, expert)]; }

  /// Brings the block's tokens from `first` on into shared memory.
  template <class Sync>
  void bring(const float (&d)[kRouteSums], u32 first, Sync sync) {
    if constexpr (!kInRegisters) {
      add_up_kept(first);
    } else if (kGeometry.route_slices > 1 && kept_) {
      add_up_kept(first);
    } else if constexpr (kShape.fp32_router) {
      store_all(d, first);
    } else {
      if (group() == 0) {
        store<false>(d, first);
      }
      sync();
      if (group() != 0) {
        store<true>(d, first);
      }
    }
    sync();
  }

  /// Keeps a slice's sums for the part that adds them up.
  void keep(const float (&d)[kRouteSums], u32 slice) {
    if constexpr (kShape.fp32_router) {
      for_each_logit(d, [&](u32 place, u32 expert, float sum) {
        if (token(place) < end_) {
          kept_sums(place, slice)[expert] = sum;
        }
      });
    } else {
      for_each_pair(d, [&](u32 place, u32 column, float2 pair) {
        if (token(place) < end_) {
          *reinterpret_cast<float2*>(kept_sums(place, slice * kConsumers + group()) + column) =
              pair;
        }
      });
    }
  }

 private:
  static constexpr u32 kKeptTogether = kShape.fp32_router ? 1 : kConsumers;  // of a slice
  static constexpr u32 kKept = kBankSlices * kKeptTogether;                  // sums of a logit
  static constexpr u32 kKeptBytes = kKept * kLogits * sizeof(float);
  static_assert(kGeometry.route_slices == 1 || kGeometry.kept_bytes == kKeptBytes ||
                    (kGeometry.kept_bytes == 0 && kKeptBytes <= kGeometry.row_bytes),
                "there is room for a token's sums");

  /// The index of a sum. Groups of eight columns are permuted, so that what the lanes of a warp
  /// store or load at once lies in different banks.
  static u32 sum_place(u32 token, u32 column) { return token * kLogits + (column ^ token % 4 * 8); }
  /// The sums of a token for one bank of experts: those of one slice, or of one warpgroup of a
  /// slice.
  float* kept_sums(u32 place, u32 which) const {
    u8* const kept =
        kGeometry.kept_bytes == 0
            ? arguments_.out + u64{token(place)} * kGeometry.row_bytes
            : rank_memory(arguments_).kept_sums + u64{token(place)} * kGeometry.kept_bytes;
    return reinterpret_cast<float*>(kept) + which * kRouteColumns;
  }

  /// Visits a thread's sums of an fp32 router: visit(token of the block, expert, sum).
  template <class Visit>
  void for_each_logit(const float (&d)[kRouteSums], Visit visit) {
    if (group() >= kRouteGroups) {
      return;
    }
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (u32 tile = 0; tile < kGroupTiles; ++tile) {
#pragma unroll
      for (u32 i = 0; i < kTileSums; ++i) {
        const u32 expert = (group() * kGroupTiles + tile) * kExpertsOfTile + row + i / 2 % 2 * 8;
        visit(i / 4 * 8 + lane % 4 * 2 + i % 2, expert, d[tile * kTileSums + i]);
      }
    }
  }
  /// Stores a warpgroup's logits of the tokens from `first` on.
  void store_all(const float (&d)[kRouteSums], u32 first) {
    for_each_logit(d, [&](u32 place, u32 expert, float sum) {
      const u32 token = place - first;
      if (token < kRoundTokens) {
        sums_[sum_place(token, expert)] = sum;
      }
    });
  }

  /// Visits a thread's sums, in its accumulators (see accumulators.cuh): visit(token of the block,
  /// first of two columns, their sums).
  template <class Visit>
  void for_each_pair(const float (&d)[kRouteSums], Visit visit) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const u32 place = threadIdx.x / 32 % 4 * 16 + lower * 8 + lane / 4;
#pragma unroll
      for (u32 j = 0; j < kRouteColumns / 8; ++j) {
        visit(place, 8 * j + lane % 4 * 2,
              make_float2(d[4 * j + 2 * lower], d[4 * j + 2 * lower + 1]));
      }
    }
  }

  /// Stores a warpgroup's sums of the tokens from `first` on, or adds them to what is there.
  template <bool kAdd>
  void store(const float (&d)[kRouteSums], u32 first) {
    for_each_pair(d, [&](u32 place, u32 column, float2 pair) {
      const u32 token = place - first;
      if (token < kRoundTokens) {
        float2* at = reinterpret_cast<float2*>(&sums_[sum_place(token, column)]);
        const float2 before = kAdd ? *at : make_float2(0.0F, 0.0F);
        *at = make_float2(before.x + pair.x, before.y + pair.y);
      }
    });
  }

  static void add(float4& to, const float4& more) {
    to.x += more.x;
    to.y += more.y;
    to.z += more.z;
    to.w += more.w;
  }
  void add_up_kept(u32 first) {
    constexpr u32 kWidth = sizeof(float4) / sizeof(float);
    constexpr u32 kOfToken = kLogits / kWidth;
#pragma unroll 1
    for (u32 i = threadIdx.x % kConsumerThreads; i < tokens_from(first) * kOfToken;
         i += kConsumerThreads) {
      const u32 place = i / kOfToken;
      const u32 column = i % kOfToken * kWidth;
      const u32 bank = column / kRouteColumns;
      const float* const kept = kept_sums(first + place, bank * kKept) + column % kRouteColumns;
      float4 sums[kKept];  // asked for together
#pragma unroll
      for (u32 which = 0; which < kKept; ++which) {
        sums[which] = *reinterpret_cast<const float4*>(kept + which * kRouteColumns);
      }
#pragma unroll
      for (u32 which = kKeptTogether; which < kKept; ++which) {
        add(sums[which % kKeptTogether], sums[which]);
      }
#pragma unroll
      for (u32 which = 1; which < kKeptTogether; ++which) {
        add(sums[0], sums[which]);
      }
      *reinterpret_cast<float4*>(&sums_[sum_place(place, column)]) = sums[0];
    }
  }

  const RankArguments& arguments_;
  float* sums_;
  u32 warp_;
  u32 first_token_;
  u32 end_;
  bool kept_;
};

}  // namespace moeos::sm90
