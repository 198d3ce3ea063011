// SPDX-License-Identifier: Apache-2.0
// The routing rules: which experts a token goes to, and with what weights, from its gate logits. A
// warp routes one token; each lane has consecutive experts.
//
// A choice is a reduction over the warp, which is one instruction for integers, and a ballot: the
// largest remaining value, and the first lane that has it. So the values by which experts are
// selected become integers in the same order. Must not depend on: where logits come from.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/placement.hpp"
#include "runtime/plan/counted_rows.hpp"
#include "runtime/rows/packet.hpp"

namespace moeos::sm90 {

static_assert(kGeometry.top_k <= Machine::kLanes, "each choice of a token has a lane");

inline constexpr u32 kPairsOfChoice = kGeometry.pairs_of_choice();
inline constexpr float kLeast = -1e30F;  // two of them are above minus infinity

/// The logits of a token that one lane has.
inline constexpr u32 kLogitsEach = kLogits / Machine::kLanes;
inline u32 expert_of(u32 i) { return Machine::lane() * kLogitsEach + i; }

/// Except for Combine, a pair with a zero expert is an unused slot; its weight, which is not 0,
/// distinguishes it.
inline u32 real_expert(u32 expert) {
  return kShape.zero_experts > 0 && expert >= kGeometry.routed_experts() ? kNone : expert;
}

/// The place of a pair with an expert (placement.hpp).
inline u32 place_of(const RankArguments& arguments, const RankMemory& memory, u32 pair,
                    u32 expert) {
  if constexpr (kGeometry.placed()) {
    return place_of_pair(kGeometry, memory, arguments.rank, pair, expert);
  }
  return real_expert(expert);
}

/// Notes which zero expert a pair has, or that it has none, where a pair with a place has its row:
/// a pair without a place has no row that comes back. For readers of the routing after the call,
/// and for gradients.
inline void note_placeless(const RankMemory& memory, u32 pair, u32 place, u32 expert) {
  if constexpr (kShape.zero_experts > 0) {
    if (place == kNone) {
      memory.pair_row[pair] = expert;
    }
  }
}
/// Whether a pair has a zero expert.
inline bool has_zero_expert(const RankMemory& memory, u32 pair) {
  return kShape.zero_experts > 0 && memory.pair_expert[pair] == kNone &&
         memory.pair_row[pair] != kNone;
}

/// A number in the order of floats, equal for both zeros; kChosen is below that of every float.
inline u32 ordered(float value) {
  const u32 bits = __builtin_bit_cast(u32, value + 0.0F);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000U);
}
inline float from_ordered(u32 number) {
  return __builtin_bit_cast(
      float, number ^ (~static_cast<u32>(static_cast<i32>(number) >> 31) | 0x80000000U));
}
inline constexpr u32 kChosen = 0;

/// As exact as fp32 for an fp32 router, since scores decide like logits.
inline float exponential(float value) { return kShape.fp32_router ? expf(value) : __expf(value); }

inline float sum_of_lanes(float value) {
#pragma unroll
  for (u32 distance = 1; distance < Machine::kLanes; distance *= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

/// The routing rules (thesis section 5.1; DeepSeek-V3's groups), applied to one token's logits.
/// Every function is called by the whole warp.
class Token {
 public:
  /// Chooses the experts of `token`, whose logits logit_of(expert) has; false when they are not
  /// finite. `told`: the epoch of a call whose processors get each choice at once, or 0. Lane n
  /// writes the token's nth pair.
  template <class LogitOf>
  static bool choose(LogitOf logit_of, const RankArguments& arguments, const RankMemory& memory,
                     u32 token, u32 told) {
    float logits[kLogitsEach];
    if (!gather_logits(logit_of, arguments, logits)) {
      return false;
    }
    const Rule rule = rule_of(logits, arguments);
    u32 choices[kLogitsEach];
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      const float choice = rule.choice(logits[i], expert_of(i));
      choices[i] = expert_of(i) < kRouterRows ? ordered(choice) : kChosen;
    }
    if constexpr (kShape.expert_groups > 1) {
      close_groups(choices);
    }
    const u32 lane = Machine::lane();
    u32 expert = 0;  // of this lane's pair
#pragma unroll 1
    for (u32 nth = 0; nth < kGeometry.choices(); ++nth) {
      const u32 best = take_best(choices);
      expert = lane / kPairsOfChoice == nth ? best : expert;
    }
    const bool has_one = lane < kGeometry.top_k;
    const u32 pair = token * kGeometry.top_k + lane;
    if (kGeometry.plans_itself() && told != 0 && has_one) {
      tell_choice<Machine>(memory, told, pair, place_of(arguments, memory, pair, expert));
    }
    write_weights(logit_of, arguments, memory, pair, has_one, expert, rule);
    return true;
  }

  /// Weighs the experts that the caller chose, whose ids pair_expert has: zero experts', too. False
  /// when the token's logits are not finite.
  template <class LogitOf>
  static bool weigh(LogitOf logit_of, const RankArguments& arguments, const RankMemory& memory,
                    u32 token) {
    float logits[kLogitsEach];
    if (!gather_logits(logit_of, arguments, logits)) {
      return false;
    }
    const Rule rule = rule_of(logits, arguments);
    const u32 pair = token * kGeometry.top_k + Machine::lane();
    const u32 expert = Machine::lane() < kGeometry.top_k ? memory.pair_expert[pair] : kNone;
    const bool used = expert != kNone;
    write_weights(logit_of, arguments, memory, pair, used, expert, rule);
    if (Machine::lane() < kGeometry.top_k && !used) {
      memory.pair_weight[pair] = 0.0F;
    }
    return true;
  }

 private:
  /// Whether a lane has another pair of the previous lane's choice.
  static bool lane_repeats() { return Machine::lane() % kPairsOfChoice != 0; }

  /// Whether scores need the sum of all exponentials: not where logits choose, and weights are
  /// shares.
  static constexpr bool kSumsExponentials =
      kShape.scoring == Scoring::softmax &&
      !(kShape.renormalize && !kSelectionBias && kShape.chooses_by_logit());

  template <class LogitOf>
  static float biased(LogitOf logit_of, const RankArguments& arguments, u32 expert) {
    const float logit = logit_of(expert);
    if constexpr (kRouterBias) {
      return logit + (expert < kRouterRows ? arguments.router_bias[expert] : 0.0F);
    }
    return logit;
  }

  /// A lane's logits of a token; false when some lane's are not finite.
  template <class LogitOf>
  static bool gather_logits(LogitOf logit_of, const RankArguments& arguments,
                            float (&logits)[kLogitsEach]) {
    bool finite = true;
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      logits[i] = biased(logit_of, arguments, expert_of(i));
      finite = finite && (isfinite(logits[i]) || expert_of(i) >= kRouterRows);
    }
    return __all_sync(~0U, finite) != 0;
  }

  struct Rule {
    float top;          // largest of the token's logits
    float inverse_sum;  // of exp(logit - top)
    const float* selection_bias;

    float score(float logit) const {
      if constexpr (kShape.scoring == Scoring::sqrtsoftplus) {
        return logit < kSoftplusTail ? expf(0.5F * logit)
                                     : sqrtf(logit > kSoftplusLinear ? logit : log1pf(expf(logit)));
      }
      return kShape.scoring == Scoring::softmax ? exponential(logit - top) * inverse_sum
                                                : 1.0F / (1.0F + exponential(-logit));
    }
    /// A score in proportion to the others of its token, `top` being the largest logit among these.
    /// All scores may be too small for fp32; the share of the largest is not.
    float share(float logit, float top) const {
      if constexpr (kShape.scoring == Scoring::softmax) {
        return exponential(logit - top);
      }
      const float low = fminf(top, 0.0F);  // below 0, scores fall as exponentials do
      if constexpr (kShape.scoring == Scoring::sigmoid) {
        return exponential(fminf(logit, 0.0F) - low) / (1.0F + exponential(-fabsf(logit)));
      }
      return logit < kSoftplusTail ? expf(0.5F * (logit - low)) : score(logit) * expf(-0.5F * low);
    }
    /// The value by which experts are selected.
    float choice(float logit, u32 expert) const {
      if constexpr (kSelectionBias) {
        // A bias of NaN or −∞ makes an expert the last choice, but a choice: k different experts
        // are chosen whatever the biases are.
        const float bias = expert < kRouterRows ? selection_bias[expert] : 0.0F;
        return fmaxf(score(logit) + bias, kLeast);
      } else if constexpr (kShape.chooses_by_logit()) {
        return logit;
      } else {
        return score(logit);
      }
    }
  };

  static Rule rule_of(const float (&logits)[kLogitsEach], const RankArguments& arguments) {
    Rule rule{0.0F, 1.0F, arguments.selection_bias};
    if constexpr (kSumsExponentials) {
      u32 top = kChosen;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        top = maximum(top, expert_of(i) < kRouterRows ? ordered(logits[i]) : kChosen);
      }
      rule.top = from_ordered(__reduce_max_sync(~0U, top));
      float sum = 0.0F;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        sum += expert_of(i) < kRouterRows ? exponential(logits[i] - rule.top) : 0.0F;
      }
      rule.inverse_sum = 1.0F / sum_of_lanes(sum);
    }
    return rule;
  }

  /// Writes the lanes' pairs that are used: each lane its own.
  template <class LogitOf>
  static void write_weights(LogitOf logit_of, const RankArguments& arguments,
                            const RankMemory& memory, u32 pair, bool used, u32 expert,
                            const Rule& rule) {
    const float logit = used ? biased(logit_of, arguments, expert) : 0.0F;
    float weight = 0.0F;
    float factor = kShape.routed_scaling;
    if constexpr (kShape.renormalize) {
      const float top = from_ordered(__reduce_max_sync(~0U, used ? ordered(logit) : kChosen));
      weight = used ? rule.share(logit, top) : 0.0F;
      const float sum = sum_of_lanes(kPairsOfChoice > 1 && lane_repeats() ? 0.0F : weight);
      factor *= sum > 0.0F ? 1.0F / sum : 1.0F;  // 0: no pair is used
    } else {
      weight = used ? rule.score(logit) : 0.0F;
    }
    if (used) {
      if constexpr (kExpertScale) {
        factor *= arguments.expert_scale[expert];
      }
      const u32 place = place_of(arguments, memory, pair, expert);
      memory.pair_expert[pair] = place;
      note_placeless(memory, pair, place, expert);
      memory.pair_weight[pair] = weight * factor;
    }
  }

  /// Takes the largest remaining choice, and returns its expert: the lower one among equals. The
  /// next choice depends only on the lane that has it, so it need not wait for the expert.
  static u32 take_best(u32 (&choices)[kLogitsEach]) {
    u32 mine = choices[0];
    u32 at = 0;
#pragma unroll
    for (u32 i = 1; i < kLogitsEach; ++i) {
      at = choices[i] > mine ? i : at;
      mine = maximum(mine, choices[i]);
    }
    const u32 best = __reduce_max_sync(~0U, mine);
    const u32 have_it = Machine::ballot(mine == best);
    const u32 here = 1U << Machine::lane();
    const bool wins = (have_it & (here | (here - 1))) == here;  // no lane before has it
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      choices[i] = wins && at == i ? kChosen : choices[i];
    }
    return Machine::broadcast(expert_of(at), Machine::first_lane(have_it));
  }

  static constexpr u32 kGroupSize = kGeometry.routed_experts() / kShape.expert_groups;
  /// Whether all of a lane's experts are in one group.
  static constexpr bool kOneGroupEach = kGroupSize % kLogitsEach == 0;

  /// The two best choices so far among this lane's choices in a group.
  struct BestTwo {
    u32 first = kChosen;
    u32 second = kChosen;

    void add(u32 choice) {
      second = maximum(second, minimum(first, choice));
      first = maximum(first, choice);
    }
  };

  /// Keeps only the choices of the best groups.
  static void close_groups(u32 (&choices)[kLogitsEach]) {
    static_assert(kShape.expert_groups <= Machine::kLanes, "a lane keeps a group's score");
    const auto group_of = [](u32 i) { return expert_of(kOneGroupEach ? 0 : i) / kGroupSize; };
    BestTwo of_lane;
#pragma unroll
    for (u32 i = 0; kOneGroupEach && i < kLogitsEach; ++i) {
      of_lane.add(choices[i]);
    }
    u32 score = kChosen;
#pragma unroll
    for (u32 group = 0; group < kShape.expert_groups; ++group) {
      BestTwo mine;
      if constexpr (kOneGroupEach) {
        mine = group_of(0) == group ? of_lane : BestTwo{};
      } else {
#pragma unroll
        for (u32 i = 0; i < kLogitsEach; ++i) {
          mine.add(group_of(i) == group ? choices[i] : kChosen);
        }
      }
      u32 of_group = __reduce_max_sync(~0U, mine.first);
      if constexpr (kShape.group_score == GroupScore::top2_sum && kGroupSize > 1) {
        const u32 winner = Machine::first_lane(Machine::ballot(mine.first == of_group));
        const u32 left = Machine::lane() == winner ? mine.second : mine.first;
        const u32 next = __reduce_max_sync(~0U, left);
        of_group = ordered(from_ordered(of_group) + from_ordered(next));
      }
      score = Machine::lane() == group ? of_group : score;
    }
    u32 open = 0;  // a bit for each group
#pragma unroll 1
    for (u32 n = 0; n < kShape.top_groups; ++n) {
      const u32 best = __reduce_max_sync(~0U, score);
      const u32 group = Machine::first_lane(Machine::ballot(score == best));
      open |= 1U << group;
      score = Machine::lane() == group ? kChosen : score;
    }
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      choices[i] = (open >> group_of(i) % 32 & 1) != 0 ? choices[i] : kChosen;
    }
  }
};

}  // namespace moeos::sm90
