// The routing rules: which experts a token goes to, and with what weights, out of its logits. By a
// warp a token, whose lanes have every 32nd expert each.
//
// A choice is two reductions over the warp, of one instruction each: the largest of what is left,
// and the lowest expert that has it. They compare integers, so what experts are selected by becomes
// one that is in the same order. May not know: where logits come from.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "runtime/memory.hpp"

namespace moeos::sm90 {

inline constexpr float kLeast = -1e30F;  // two of them are above minus infinity

/// Logits of a token that one lane has: those of experts lane, lane + 32, ...
inline constexpr u32 kLogitsEach = kRouteColumns / Machine::kLanes;
inline u32 expert_of(u32 i) { return i * Machine::kLanes + Machine::lane(); }

/// A number in the order of floats, of both zeros the same; kChosen is below that of every float.
inline u32 ordered(float value) {
  const u32 bits = __builtin_bit_cast(u32, value + 0.0F);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000U);
}
inline float from_ordered(u32 number) {
  return __builtin_bit_cast(
      float, number ^ (~static_cast<u32>(static_cast<i32>(number) >> 31) | 0x80000000U));
}
inline constexpr u32 kChosen = 0;

inline float sum_of_lanes(float value) {
#pragma unroll
  for (u32 distance = 1; distance < Machine::kLanes; distance *= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

/// The routing rules (thesis section 5.1; DeepSeek-V3's groups), applied to one token's logits.
/// Every function by the whole warp.
class Token {
 public:
  /// Chooses the experts of `token`, whose logits logit_of(expert) has; false when they are not
  /// finite.
  template <class LogitOf>
  static bool choose(LogitOf logit_of, const RankArguments& arguments, const RankMemory& memory,
                     u32 token) {
    float logits[kLogitsEach];
    bool finite = true;
    u32 top = kChosen;
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      logits[i] = logit_of(expert_of(i));
      if (expert_of(i) < kGeometry.experts) {
        finite = finite && isfinite(logits[i]);
        top = maximum(top, ordered(logits[i]));
      }
    }
    if (__all_sync(~0U, finite) == 0) {
      return false;
    }
    Rule rule{0.0F, 1.0F, arguments.selection_bias};
    if constexpr (kShape.scoring == Scoring::softmax) {
      rule.top = from_ordered(__reduce_max_sync(~0U, top));
    }
    if constexpr (kSumsExponentials) {
      float sum = 0.0F;
#pragma unroll
      for (u32 i = 0; i < kLogitsEach; ++i) {
        sum += expert_of(i) < kGeometry.experts ? __expf(logits[i] - rule.top) : 0.0F;
      }
      rule.inverse_sum = 1.0F / sum_of_lanes(sum);
    }
    u32 choices[kLogitsEach];
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      const float choice = rule.choice(logits[i], expert_of(i));
      choices[i] = expert_of(i) < kGeometry.experts ? ordered(choice) : kChosen;
    }
    if constexpr (kShape.expert_groups > 1) {
      close_groups(choices);
    }
    // Lane j keeps the choices j, j + 32, ...
    constexpr u32 kKept = ceil_div(kGeometry.top_k, Machine::kLanes);
    const auto place = [](u32 n) { return n * Machine::kLanes + Machine::lane(); };
    u32 chosen[kKept] = {};
#pragma unroll 1
    for (u32 j = 0; j < kGeometry.top_k; ++j) {
      const u32 expert = take_best(choices);
#pragma unroll
      for (u32 n = 0; n < kKept; ++n) {
        chosen[n] = j == place(n) ? expert : chosen[n];
      }
    }
    float scores[kKept];
    float sum = 0.0F;
#pragma unroll
    for (u32 n = 0; n < kKept; ++n) {
      scores[n] = rule.score(logit_of(chosen[n]));
      sum += place(n) < kGeometry.top_k ? scores[n] : 0.0F;
    }
    float factor = kShape.routed_scaling;
    if constexpr (kShape.renormalize) {
      sum = sum_of_lanes(sum);
      factor *= sum > 0.0F ? 1.0F / sum : 1.0F;
    }
#pragma unroll
    for (u32 n = 0; n < kKept; ++n) {
      if (place(n) < kGeometry.top_k) {
        const u32 pair = token * kGeometry.top_k + place(n);
        memory.pair_expert[pair] = chosen[n];
        memory.pair_weight[pair] = scores[n] * factor;
      }
    }
    return true;
  }

 private:
  /// Whether scores need the sum of all exponentials: not where they are only compared with each
  /// other, and divided by their own sum.
  static constexpr bool kSumsExponentials =
      kShape.scoring == Scoring::softmax &&
      !(kShape.renormalize && !kSelectionBias && kShape.expert_groups == 1);

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

  /// The expert with the largest choice, the lower one among equals, which then is taken.
  static u32 take_best(u32 (&choices)[kLogitsEach]) {
    u32 best = choices[0];
#pragma unroll
    for (u32 i = 1; i < kLogitsEach; ++i) {
      best = maximum(best, choices[i]);
    }
    best = __reduce_max_sync(~0U, best);
    u32 expert = kNone;
#pragma unroll
    for (u32 i = kLogitsEach; i > 0; --i) {
      expert = choices[i - 1] == best ? expert_of(i - 1) : expert;
    }
    expert = __reduce_min_sync(~0U, expert);
#pragma unroll
    for (u32 i = 0; i < kLogitsEach; ++i) {
      choices[i] = expert_of(i) == expert ? kChosen : choices[i];
    }
    return expert;
  }

  /// Leaves the choices of the best groups (DeepSeek-V3; a group's score is the sum of its two best
  /// choices).
  static void close_groups(u32 (&choices)[kLogitsEach]) {
    constexpr u32 kSize = kGeometry.experts / kShape.expert_groups;
    static_assert(kShape.expert_groups <= Machine::kLanes, "a lane keeps a group's score");
    static_assert(kShape.expert_groups == 1 || kSize >= 2);
    u32 score = kChosen;
#pragma unroll
    for (u32 group = 0; group < kShape.expert_groups; ++group) {
      u32 first = kChosen;  // of this lane's
      u32 second = kChosen;
#pragma unroll
      for (u32 i = group * kSize / Machine::kLanes;
           i <= ((group + 1) * kSize - 1) / Machine::kLanes; ++i) {
        const u32 choice = expert_of(i) / kSize == group ? choices[i] : kChosen;
        second = maximum(second, minimum(first, choice));
        first = maximum(first, choice);
      }
      const u32 best = __reduce_max_sync(~0U, first);
      const bool has_best = Machine::lane() == Machine::first_lane(Machine::ballot(first == best));
      const u32 next = __reduce_max_sync(~0U, has_best ? second : first);
      const u32 sum = ordered(from_ordered(best) + from_ordered(next));
      score = Machine::lane() == group ? sum : score;
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
      choices[i] = (open >> expert_of(i) / kSize & 1) != 0 ? choices[i] : kChosen;
    }
  }
};

}  // namespace moeos::sm90
