// Route on tensor cores: products of 64 tokens with the router's weights, then each token's choice
// by eight lanes.
//
// Each warpgroup has multiplied half of the depth. The halves are added up in shared memory, some
// tokens at a time, from where eight lanes take a token's logits: a lane has every eighth expert.
// Scores and top-k are loops over registers with shuffles among the eight. More lanes would need
// more shuffles for each choice and take fewer tokens at once; fewer lanes have longer unrolled
// loops, which a processor runs once a call and so waits for as instructions. Ties go to the lower
// expert. May not know: slots, flags.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "runtime/memory.hpp"
#include "runtime/processor.hpp"
#include "runtime/routing_map.hpp"

namespace moeos::sm90 {

inline constexpr float kExcluded = -kInfinity;
inline constexpr float kLeast = -1e30F;  // two of them are above kExcluded

/// Lanes of a token, and tokens of a warp.
inline constexpr u32 kTokenLanes = 8;
inline constexpr u32 kTokensAtOnce = Machine::kLanes / kTokenLanes;
inline u32 token_lane() { return threadIdx.x % kTokenLanes; }

/// Logits of a token that one lane has: those of experts token_lane(), token_lane() + 8, ...
inline constexpr u32 kLogitsEach = kRouteColumns / kTokenLanes;
inline u32 expert_of(u32 i) { return i * kTokenLanes + token_lane(); }

template <class Join>
inline float join_lanes(float value, Join join) {
#pragma unroll
  for (u32 distance = 1; distance < kTokenLanes; distance *= 2) {
    value = join(value, __shfl_xor_sync(~0U, value, distance));
  }
  return value;
}

/// The largest value of a token's lanes and its expert; the lower expert among equals.
struct Best {
  float value;
  u32 expert;
  void join(float other, u32 other_expert) {
    if (other > value || (other == value && other_expert < expert)) {
      value = other;
      expert = other_expert;
    }
  }
};
inline Best best_of_lanes(Best best) {
#pragma unroll
  for (u32 distance = 1; distance < kTokenLanes; distance *= 2) {
    const float value = __shfl_xor_sync(~0U, best.value, distance);
    const u32 expert = __shfl_xor_sync(~0U, best.expert, distance);
    best.join(value, expert);
  }
  return best;
}

/// The routing rules (thesis section 5.1; DeepSeek-V3's groups), applied to one token's logits.
/// What experts are selected by stays where it is: a bit for each of the lane's says whether it can
/// still be chosen.
class Token {
 public:
  /// Chooses the experts of `token`, whose logits logit_of(expert) has; false when they are not
  /// finite. The lanes write, unless they lie beyond the last token (`exists` false) and only take
  /// part in the warp's shuffles.
  template <class LogitOf>
  static bool choose(LogitOf logit_of, const RankArguments& arguments, const RankMemory& memory,
                     u32 token, bool exists) {
    float choices[kLogitsEach];  // the logits, first
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      choices[i] = logit_of(expert_of(i));
    }
    float top = kExcluded;
    bool finite = true;
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      if (expert_of(i) < kGeometry.experts) {
        finite = finite && isfinite(choices[i]);
        top = fmaxf(top, choices[i]);
      }
    }
    constexpr u32 kMask = (1U << kTokenLanes) - 1;
    const u32 first_lane = Machine::lane() / kTokenLanes * kTokenLanes;
    if (__all_sync(~0U, finite || !exists) == 0) {
      return (Machine::ballot(finite) >> first_lane & kMask) == kMask || !exists;
    }
    Rule rule{join_lanes(top, [](float a, float b) { return fmaxf(a, b); }), 1.0F,
              arguments.selection_bias};
    if constexpr (kShape.scoring == Scoring::softmax) {
      float sum = 0.0F;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        sum += expert_of(i) < kGeometry.experts ? __expf(choices[i] - rule.top) : 0.0F;
      }
      rule.inverse_sum = 1.0F / join_lanes(sum, [](float a, float b) { return a + b; });
    }
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      choices[i] = rule.choice(choices[i], expert_of(i));
    }
    u32 open = open_choices(choices);
    float weight_sum = 0.0F;
    // Each lane keeps every eighth weight, until their sum is known.
    constexpr u32 kKept = ceil_div(kGeometry.top_k, kTokenLanes);
    float kept[kKept] = {};
#pragma unroll 1
    for (u32 j = 0; j < kGeometry.top_k; ++j) {
      float value = kExcluded;
      u32 place = 0;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        // Selects, not branches. `place` ascends like the experts.
        const bool better = (open >> i & 1) != 0 && choices[i] > value;
        value = better ? choices[i] : value;
        place = better ? i : place;
      }
      const Best best = best_of_lanes(Best{value, expert_of(place)});
      const u32 owner = best.expert % kTokenLanes;
      if (token_lane() == owner) {
        open &= ~(1U << best.expert / kTokenLanes);
      }
      const float weight = rule.score(logit_of(best.expert));
      weight_sum += weight;
#pragma unroll
      for (u32 n = 0; n < kKept; ++n) {
        kept[n] = j == kTokenLanes * n + token_lane() ? weight : kept[n];
      }
      if (exists && token_lane() == 0) {
        memory.pair_expert[token * kGeometry.top_k + j] = best.expert;
      }
    }
    const float factor = (kShape.renormalize && weight_sum > 0.0F ? 1.0F / weight_sum : 1.0F) *
                         kShape.routed_scaling;
#pragma unroll
    for (u32 n = 0; n < kKept; ++n) {
      const u32 j = kTokenLanes * n + token_lane();
      if (exists && j < kGeometry.top_k) {
        memory.pair_weight[token * kGeometry.top_k + j] = kept[n] * factor;
      }
    }
    return true;
  }

 private:
  static_assert(kLogitsEach <= 32, "a bit for each logit");

  struct Rule {
    float top;          // of the token's logits
    float inverse_sum;  // of exp(logit - top)
    const float* selection_bias;

    float score(float logit) const {
      return kShape.scoring == Scoring::softmax ? __expf(logit - top) * inverse_sum
                                                : 1.0F / (1.0F + __expf(-logit));
    }
    /// What experts are selected by. Scores are monotonic in the logits, and fp32 scores saturate:
    /// without bias and groups the logits decide.
    float choice(float logit, u32 expert) const {
      if constexpr (kSelectionBias) {
        // A bias of NaN or −∞ makes an expert the last choice, but a choice: k different experts
        // are chosen whatever the biases are.
        const float bias = expert < kGeometry.experts ? selection_bias[expert] : 0.0F;
        return fmaxf(score(logit) + bias, kLeast);
      } else if constexpr (kShape.expert_groups > 1) {
        return score(logit);
      } else {
        return logit;
      }
    }
  };

  /// Which can be chosen: those of the best groups (DeepSeek-V3; a group's score is the sum of its
  /// two best choices), or all.
  static u32 open_choices(const float (&choices)[kLogitsEach]) {
    if constexpr (kShape.expert_groups == 1) {
      u32 open = 0;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        open |= expert_of(i) < kGeometry.experts ? 1U << i : 0;
      }
      return open;
    } else {
      constexpr u32 kSize = kGeometry.experts / kShape.expert_groups;
      static_assert(
          kShape.expert_groups == 1 || (kSize % kTokenLanes == 0 && kShape.expert_groups <= 32),
          "each lane of a token holds as much of each group");
      constexpr u32 kPerLane = kSize / kTokenLanes;
      // Each lane keeps the scores of every eighth group.
      constexpr u32 kKept = ceil_div(kShape.expert_groups, kTokenLanes);
      float scores[kKept] = {};
#pragma unroll
      for (u32 g = 0; g < kShape.expert_groups; ++g) {
        float first = kExcluded;
        float second = kExcluded;
#pragma unroll
        for (u32 i = g * kPerLane; i < (g + 1) * kPerLane; ++i) {
          second = fmaxf(second, fminf(first, choices[i]));
          first = fmaxf(first, choices[i]);
        }
#pragma unroll
        for (u32 distance = 1; distance < kTokenLanes; distance *= 2) {
          const float other_first = __shfl_xor_sync(~0U, first, distance);
          const float other_second = __shfl_xor_sync(~0U, second, distance);
          second = fmaxf(fmaxf(second, other_second), fminf(first, other_first));
          first = fmaxf(first, other_first);
        }
        scores[g / kTokenLanes] =
            g % kTokenLanes == token_lane() ? first + second : scores[g / kTokenLanes];
      }
      u32 kept = 0;
#pragma unroll 1
      for (u32 n = 0; n < kShape.top_groups; ++n) {
        Best best{kExcluded, kNone};
#pragma unroll
        for (u32 s = 0; s < kKept; ++s) {
          const u32 g = kTokenLanes * s + token_lane();
          if (g < kShape.expert_groups && (kept >> g & 1U) == 0 && scores[s] > best.value) {
            best = Best{scores[s], g};
          }
        }
        kept |= 1U << best_of_lanes(best).expert;
      }
      u32 open = 0;
#pragma unroll
      for (u32 g = 0; g < kShape.expert_groups; ++g) {
        open |= (kept >> g & 1U) != 0 ? ((1U << kPerLane) - 1) << (g * kPerLane) : 0;
      }
      return open;
    }
  }
};

/// Tokens whose logits Route's memory holds at once.
inline constexpr u32 kRoundTokens =
    minimum(kRouteTokens, kRouteMemory / static_cast<u32>(kRouteColumns * sizeof(float)));
static_assert(kRouteTokens % kRoundTokens == 0 && kRoundTokens % kTokensAtOnce == 0);

/// The logits of a block's tokens, some of them at a time in shared memory: out of the accumulators
/// of both warpgroups, of which each has half of the depth; or, where a block has several slices,
/// out of the sums that the warpgroups of all of them have kept, added up in the order of the
/// depth.
///
/// They keep a token's sums in its row of the output, which is not written before the call has
/// routed all of its tokens. Every function by all consumers; sync() is their barrier.
class Logits {
 public:
  /// Of the tokens [first_token, end); `memory` is Route's.
  Logits(const RankArguments& arguments, u8* memory, u32 warp, u32 first_token, u32 end)
      : arguments_(arguments),
        sums_(reinterpret_cast<float*>(memory)),
        warp_(warp),
        first_token_(first_token),
        end_(end) {}

  u32 warp() const { return warp_; }
  /// Tokens from `first` of the block on that are brought into shared memory together.
  u32 tokens_from(u32 first) const {
    return first_token_ + first < end_ ? minimum(kRoundTokens, end_ - first_token_ - first) : 0;
  }
  u32 token(u32 place) const { return first_token_ + place; }
  float at(u32 token, u32 expert) const { return sums_[sum_place(token, expert)]; }

  /// Brings the tokens from `first` of the block on into shared memory.
  template <class Sync>
  void bring(const float (&d)[kRouteColumns / 2], u32 first, Sync sync) {
    if constexpr (kGeometry.route_slices > 1) {
      add_up_kept(first);
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

  /// Keeps a slice's sums for the one that adds them up.
  void keep(const float (&d)[kRouteColumns / 2], u32 slice) {
    for_each_pair(d, [&](u32 place, u32 column, float2 pair) {
      if (token(place) < end_) {
        *reinterpret_cast<float2*>(kept(place, slice * kConsumers + group()) + column) = pair;
      }
    });
  }

 private:
  static constexpr u32 kKept = kGeometry.route_slices * kConsumers;  // sums of a logit
  static_assert(kGeometry.route_slices == 1 ||
                    kKept * kRouteColumns * sizeof(float) <= kGeometry.row_bytes,
                "a token's sums fit its row");

  u32 group() const { return warp_ / (kConsumerWarps / kConsumers); }
  /// Where a sum lies. Groups of eight columns change places, so that what the lanes of a warp
  /// store or load at once lies in different banks.
  static u32 sum_place(u32 token, u32 column) {
    return token * kRouteColumns + (column ^ token % 4 * 8);
  }
  float* kept(u32 place, u32 which) const {
    u8* row = arguments_.out + u64{token(place)} * kGeometry.row_bytes;
    return reinterpret_cast<float*>(row) + which * kRouteColumns;
  }

  /// Visits a thread's sums, in its accumulators (see epilogue.cuh): visit(token of the block,
  /// first of two columns, their sums).
  template <class Visit>
  void for_each_pair(const float (&d)[kRouteColumns / 2], Visit visit) {
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

  /// A warpgroup's sums of the tokens from `first` on, as they are or added to what is there.
  template <bool kAdd>
  void store(const float (&d)[kRouteColumns / 2], u32 first) {
    for_each_pair(d, [&](u32 place, u32 column, float2 pair) {
      const u32 token = place - first;
      if (token < kRoundTokens) {
        float2* at = reinterpret_cast<float2*>(&sums_[sum_place(token, column)]);
        const float2 before = kAdd ? *at : make_float2(0.0F, 0.0F);
        *at = make_float2(before.x + pair.x, before.y + pair.y);
      }
    });
  }

  void add_up_kept(u32 first) {
    constexpr u32 kWidth = sizeof(float4) / sizeof(float);
    constexpr u32 kOfToken = kRouteColumns / kWidth;
#pragma unroll 1
    for (u32 i = threadIdx.x % kConsumerThreads; i < tokens_from(first) * kOfToken;
         i += kConsumerThreads) {
      const u32 place = i / kOfToken;
      const u32 column = i % kOfToken * kWidth;
      float4 sums[kKept];  // asked for together
#pragma unroll
      for (u32 which = 0; which < kKept; ++which) {
        sums[which] = *reinterpret_cast<const float4*>(kept(first + place, which) + column);
      }
#pragma unroll
      for (u32 which = 1; which < kKept; ++which) {
        sums[0].x += sums[which].x;
        sums[0].y += sums[which].y;
        sums[0].z += sums[which].z;
        sums[0].w += sums[which].w;
      }
      *reinterpret_cast<float4*>(&sums_[sum_place(place, column)]) = sums[0];
    }
  }

  const RankArguments& arguments_;
  float* sums_;
  u32 warp_;
  u32 first_token_;
  u32 end_;
};

/// Routes the tokens of a block, whose products lie in d or are kept. Sets bad_token to a token
/// whose logits are not finite. By all consumers; sync() is their barrier.
template <class Sync>
inline void choose_experts(const float (&d)[kRouteColumns / 2], Logits& logits,
                           const RankArguments& arguments, const RankMemory& memory, u32* bad_token,
                           Sync sync) {
#pragma unroll 1
  for (u32 first = 0; logits.tokens_from(first) > 0; first += kRoundTokens) {
    if (first > 0) {
      sync();  // all have read the logits before
    }
    logits.bring(d, first, sync);
    const u32 tokens = logits.tokens_from(first);
#pragma unroll 1
    for (u32 begin = logits.warp() * kTokensAtOnce; begin < tokens;
         begin += kConsumerWarps * kTokensAtOnce) {
      const u32 place = begin + Machine::lane() / kTokenLanes;
      const auto logit_of = [&](u32 expert) { return logits.at(place, expert); };
      const u32 token = logits.token(first + place);
      if (!Token::choose(logit_of, arguments, memory, token, place < tokens) && token_lane() == 0) {
        atomicMin(bad_token, token);
      }
    }
  }
}

/// The id that the caller gave a pair; -1 means an unused slot.
inline i64 given_id(const RankArguments& arguments, u32 pair) {
  return arguments.ids_wide != 0 ? static_cast<const i64*>(arguments.topk_ids)[pair]
                                 : static_cast<const i32*>(arguments.topk_ids)[pair];
}

inline float given_weight(const RankArguments& arguments, u32 pair) {
  if (arguments.weight_type == WeightType::float32) {
    return static_cast<const float*>(arguments.topk_weights)[pair];
  }
  const u32 bits = static_cast<const u16*>(arguments.topk_weights)[pair];
  return arguments.weight_type == WeightType::bfloat16 ? Bfloat16::low(bits) : Float16::low(bits);
}

/// What is wrong with a pair's id: it is no expert, or the token has it in an earlier slot.
inline FailureKind given_fault(const RankArguments& arguments, u32 pair, i64 id) {
  if (id < -1 || id >= i64{kGeometry.experts}) {
    return FailureKind::id_no_expert;
  }
  bool repeated = false;
  for (u32 before = pair / kGeometry.top_k * kGeometry.top_k; id >= 0 && before < pair; ++before) {
    repeated = repeated || given_id(arguments, before) == id;
  }
  return repeated ? FailureKind::id_repeated : FailureKind::none;
}

/// The caller's routing of a block of tokens. Called by all consumer threads. The only place where
/// ids come in: a wrong one is an unused slot, and sets bad_token to its token.
inline void copy_given_routing(const RankArguments& arguments, const RankMemory& memory, u32 first,
                               u32 end, u32* bad_token) {
  for (u32 pair = first * kGeometry.top_k + threadIdx.x % kConsumerThreads;
       pair < end * kGeometry.top_k; pair += kConsumerThreads) {
    const i64 id = given_id(arguments, pair);
    const bool wrong = given_fault(arguments, pair, id) != FailureKind::none;
    memory.pair_expert[pair] = wrong || id < 0 ? kNone : static_cast<u32>(id);
    memory.pair_weight[pair] = given_weight(arguments, pair);
    if (wrong) {
      atomicMin(bad_token, pair / kGeometry.top_k);
    }
  }
}

/// Ends the call because of a token's ids, and names the first slot that is wrong. One warp.
inline void reject_given_routing(const RankArguments& arguments, Processor<Machine>& processor,
                                 u32 token) {
  const u32 lane = Machine::lane();
  const u32 pair = token * kGeometry.top_k + lane;
  i64 id = 0;
  FailureKind fault = FailureKind::none;
  if (lane < kGeometry.top_k) {
    id = given_id(arguments, pair);
    fault = given_fault(arguments, pair, id);
  }
  const u32 wrong = Machine::ballot(fault != FailureKind::none);
  if (wrong != 0 && lane == Machine::first_lane(wrong)) {
    processor.reject_id(fault, token, lane, static_cast<u64>(id));
  }
  Machine::sync_lanes();
}

/// Brings the experts that this block has chosen into shared memory. Called by all consumer
/// threads, between two barriers.
inline void gather_choices(const RankMemory& memory, RouteScratch& scratch, u32 first_pair,
                           u32 pairs) {
  for (u32 i = threadIdx.x % kConsumerThreads; i < pairs; i += kConsumerThreads) {
    scratch.expert[i] = static_cast<u16>(memory.pair_expert[first_pair + i]);
  }
}
static_assert(static_cast<u16>(kNone) == kNoExpert);

/// Sorts a block's pairs by expert, as runtime/routing_map.hpp's sort_block does on one thread. By
/// all consumer warps, each with a share of the pairs; sync() is their barrier. A pair's rank is
/// the earlier pairs of its expert in the shares before, in its own share, and in the lanes before.
template <class Sync>
inline void sort_block_by_warps(const RankMemory& memory, RouteScratch& scratch, u32 block,
                                u32 pairs, u32 warp, Sync sync) {
  const u32 lane = threadIdx.x % 32;
  const u32 first_pair = block * kGeometry.route_tokens * kGeometry.top_k;
  const u32 share = align_up(ceil_div(pairs, kConsumerWarps), 32U);
  const u32 begin = minimum(pairs, warp * share);
  const u32 end = minimum(pairs, begin + share);
  u16(&mine)[kRouteColumns] = scratch.of_warp[warp];
  for (u32 expert = lane; expert < kGeometry.experts; expert += 32) {
    mine[expert] = 0;
  }
  __syncwarp();
  for (u32 first = begin; first < end; first += 32) {
    const u32 i = first + lane;
    const u32 expert = i < end ? scratch.expert[i] : kNoExpert;
    const u32 same = __match_any_sync(~0U, expert);
    const u32 before = Machine::lanes_before(same);
    const u32 rank = expert != kNoExpert ? mine[expert] + before : 0;
    __syncwarp();
    if (expert != kNoExpert) {
      scratch.rank[i] = static_cast<u16>(rank);
      if (before == 0) {
        mine[expert] = static_cast<u16>(rank + Machine::count(same));
      }
    }
    __syncwarp();
  }
  sync();
  if (warp == 0) {
    u32 start = 0;
    u32* firsts = memory.block_first + u64{block} * kGeometry.experts;
    u32* counts = memory.block_base + u64{block} * kGeometry.experts;
    for (u32 base = 0; base < kGeometry.experts; base += 32) {
      const u32 expert = base + lane;
      u32 count = 0;
      if (expert < kGeometry.experts) {
#pragma unroll
        for (auto& of_warp : scratch.of_warp) {
          const u32 in_share = of_warp[expert];
          of_warp[expert] = static_cast<u16>(count);
          count += in_share;
        }
      }
      const u32 inclusive = Machine::inclusive_scan(count);
      if (expert < kGeometry.experts) {
        counts[expert] = count;
        firsts[expert] = start + inclusive - count;
        scratch.first[expert] = static_cast<u16>(start + inclusive - count);
      }
      start += Machine::broadcast(inclusive, 31);
    }
  }
  sync();
  u32* sorted = memory.block_pairs + u64{block} * kGeometry.route_tokens * kGeometry.top_k;
  for (u32 i = begin + lane; i < end; i += 32) {
    const u32 expert = scratch.expert[i];
    if (expert != kNoExpert) {
      const u32 rank = mine[expert] + scratch.rank[i];
      memory.pair_rank[first_pair + i] = rank;
      sorted[scratch.first[expert] + rank] = first_pair + i;
    }
  }
}

}  // namespace moeos::sm90
