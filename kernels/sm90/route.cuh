// Route on tensor cores: the logits of 64 tokens lie in the accumulators of two warpgroups, and
// leave registers only to be added up.
//
// Each warpgroup has multiplied half of the depth; they exchange halves of their sums, so that the
// four lanes of a quad hold one token's logits, up to 64 each (see epilogue.cuh). Scores and top-k
// are loops over registers with shuffles inside the quad. Ties go to the lower expert. May not
// know: slots, flags.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "runtime/memory.hpp"
#include "runtime/processor.hpp"
#include "runtime/routing_map.hpp"

namespace moeos::sm90 {

inline constexpr float kExcluded = -kInfinity;
inline constexpr float kLeast = -1e30F;  // two of them are above kExcluded
inline constexpr u32 kColumnsPerLane = align_up(kGeometry.experts, 8U) / 4;

using Logits = float[kRouteColumns / 4];

/// Adds the two warpgroups' sums: warpgroup 0 gets the first token of each quad, 1 the second.
/// `memory` holds 32 KB. Called by all consumer threads.
inline void exchange_logits(const float (&d)[kRouteColumns / 2], Logits& logits, u32 group,
                            u8* memory) {
  constexpr u32 kCount = kRouteColumns / 4;
  constexpr u32 kAtOnce = minimum(kCount, 32U);
  static_assert(kConsumerThreads * kAtOnce * sizeof(float) <= kConsumerWarps * kStagingBytes);
  float* sums = reinterpret_cast<float*>(memory) + threadIdx.x % 128;
  const auto place = [&](u32 of_group, u32 i) { return (of_group * kAtOnce + i) * 128; };
#pragma unroll
  for (u32 first = 0; first < kCount; first += kAtOnce) {
    if (first > 0) {
      named_barrier(kConsumersBarrier, kConsumerThreads);  // all have read the sums before
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = (first + i) / 2 * 4 + i % 2;
      sums[place(group, i)] = group == 0 ? d[at + 2] : d[at];
      logits[first + i] = group == 0 ? d[at] : d[at + 2];
    }
    named_barrier(kConsumersBarrier, kConsumerThreads);
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      logits[first + i] += sums[place(1 - group, i)];
    }
  }
}

/// The expert of a lane's i-th logit.
inline u32 expert_of(u32 i) { return 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2; }

inline float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0U, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0U, value, 2));
}
inline float quad_sum(float value) {
  value += __shfl_xor_sync(~0U, value, 1);
  return value + __shfl_xor_sync(~0U, value, 2);
}

/// The largest value of a quad and its expert; the lower expert among equals.
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
inline Best quad_best(Best best) {
  for (u32 distance = 1; distance <= 2; distance *= 2) {
    const float value = __shfl_xor_sync(~0U, best.value, distance);
    const u32 expert = __shfl_xor_sync(~0U, best.expert, distance);
    best.join(value, expert);
  }
  return best;
}

/// The routing rules applied to one token's logits, which stay where they are: a bit for each logit
/// of the lane says whether it can still be chosen.
class Token {
 public:
  /// Chooses the experts of `token`; false when its logits are not finite. The quad's first lane
  /// writes, unless the quad lies beyond the last token (`exists` false) and only takes part in the
  /// warp's shuffles.
  static bool choose(const Logits& logits, const RankArguments& arguments, const RankMemory& memory,
                     u32 token, bool exists) {
    const bool writer = exists && threadIdx.x % 4 == 0;
    float top = kExcluded;
    bool finite = true;
#pragma unroll
    for (u32 i = 0; i < kColumnsPerLane; ++i) {
      if (expert_of(i) < kGeometry.experts) {
        finite = finite && isfinite(logits[i]);
        top = fmaxf(top, logits[i]);
      }
    }
    const u32 quad_lanes = 0xFU << (threadIdx.x % 32 / 4 * 4);
    if (__all_sync(~0U, finite || !exists) == 0) {
      const bool all_finite = (__ballot_sync(~0U, finite) & quad_lanes) == quad_lanes;
      return all_finite || !exists;
    }
    Rule rule{quad_maximum(top), 1.0F, arguments.selection_bias};
    if constexpr (kShape.scoring == Scoring::softmax) {
      float sum = 0.0F;
#pragma unroll
      for (u32 i = 0; i < kColumnsPerLane; ++i) {
        sum += expert_of(i) < kGeometry.experts ? __expf(logits[i] - rule.top) : 0.0F;
      }
      rule.inverse_sum = 1.0F / quad_sum(sum);
    }
    float choices[kColumnsPerLane];
#pragma unroll
    for (u32 i = 0; i < kColumnsPerLane; ++i) {
      choices[i] = rule.choice(logits[i], expert_of(i));
    }
    u64 open = open_choices(choices);
    float weight_sum = 0.0F;
    // Each lane of the quad keeps every fourth weight, until their sum is known.
    constexpr u32 kKept = ceil_div(kGeometry.top_k, 4U);
    float kept[kKept] = {};
#pragma unroll 1
    for (u32 j = 0; j < kGeometry.top_k; ++j) {
      float value = kExcluded;
      float chosen_logit = 0.0F;
      u32 place = 0;
#pragma unroll
      for (u32 i = 0; i < kColumnsPerLane; ++i) {
        // Selects, not branches. `place` ascends like the experts and is a constant in each step:
        // 64 expert numbers would not fit into registers.
        const bool better = (open >> i & 1) != 0 && choices[i] > value;
        value = better ? choices[i] : value;
        chosen_logit = better ? logits[i] : chosen_logit;
        place = better ? i : place;
      }
      Best best{value, expert_of(place)};
      best = quad_best(best);
      const u32 owner = best.expert % 8 / 2;  // the lane of the quad that holds it
      if (threadIdx.x % 4 == owner) {
        open &= ~(u64{1} << (best.expert / 8 * 2 + best.expert % 2));
      }
      const float weight =
          rule.score(__shfl_sync(~0U, chosen_logit, threadIdx.x % 32 / 4 * 4 + owner));
      weight_sum += weight;
#pragma unroll
      for (u32 n = 0; n < kKept; ++n) {
        kept[n] = j == 4 * n + threadIdx.x % 4 ? weight : kept[n];
      }
      if (writer) {
        memory.pair_expert[token * kGeometry.top_k + j] = best.expert;
      }
    }
    const float factor = (kShape.renormalize && weight_sum > 0.0F ? 1.0F / weight_sum : 1.0F) *
                         kShape.routed_scaling;
#pragma unroll
    for (u32 n = 0; n < kKept; ++n) {
      const u32 j = 4 * n + threadIdx.x % 4;
      if (exists && j < kGeometry.top_k) {
        memory.pair_weight[token * kGeometry.top_k + j] = kept[n] * factor;
      }
    }
    return true;
  }

 private:
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
  static u64 open_choices(const float (&choices)[kColumnsPerLane]) {
    if constexpr (kShape.expert_groups == 1) {
      u64 open = 0;
#pragma unroll
      for (u32 i = 0; i < kColumnsPerLane; ++i) {
        open |= expert_of(i) < kGeometry.experts ? u64{1} << i : 0;
      }
      return open;
    } else {
      constexpr u32 kSize = kGeometry.experts / kShape.expert_groups;
      static_assert(kShape.expert_groups == 1 || (kSize % 8 == 0 && kShape.expert_groups <= 32),
                    "each lane of a quad holds a quarter of each group");
      constexpr u32 kPerLane = kSize / 4;
      // Each lane of the quad keeps the scores of every fourth group: all of them would not fit
      // into registers beside the logits.
      constexpr u32 kKept = ceil_div(kShape.expert_groups, 4U);
      const u32 lane = threadIdx.x % 4;
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
        for (u32 distance = 1; distance <= 2; distance *= 2) {
          const float other_first = __shfl_xor_sync(~0U, first, distance);
          const float other_second = __shfl_xor_sync(~0U, second, distance);
          second = fmaxf(fmaxf(second, other_second), fminf(first, other_first));
          first = fmaxf(first, other_first);
        }
        scores[g / 4] = g % 4 == lane ? first + second : scores[g / 4];
      }
      u32 kept = 0;
#pragma unroll 1
      for (u32 n = 0; n < kShape.top_groups; ++n) {
        Best best{kExcluded, kNone};
#pragma unroll
        for (u32 s = 0; s < kKept; ++s) {
          const u32 g = 4 * s + lane;
          if (g < kShape.expert_groups && (kept >> g & 1U) == 0 && scores[s] > best.value) {
            best = Best{scores[s], g};
          }
        }
        kept |= 1U << quad_best(best).expert;
      }
      u64 open = 0;
#pragma unroll
      for (u32 g = 0; g < kShape.expert_groups; ++g) {
        open |= (kept >> g & 1U) != 0 ? ((u64{1} << kPerLane) - 1) << (g * kPerLane) : 0;
      }
      return open;
    }
  }
};

/// Routes the token of each quad of a consumer warpgroup. Sets bad_token to a token whose logits
/// are not finite.
inline void route_rows(const Logits& logits, const RankArguments& arguments,
                       const RankMemory& memory, u32 group, u32 first_token, u32 end,
                       u32* bad_token) {
  const u32 lane = threadIdx.x % 32;
  const u32 token = first_token + threadIdx.x / 32 % 4 * 16 + group * 8 + lane / 4;
  if (!Token::choose(logits, arguments, memory, token, token < end) && lane % 4 == 0) {
    atomicMin(bad_token, token);
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
