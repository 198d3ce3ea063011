// The routing rules: which experts a token goes to, and with what weights, out of its logits. By
// eight lanes a token, each of which has every eighth expert.
//
// Scores and top-k are loops over registers with shuffles among the eight. More lanes would need
// more shuffles for each choice and take fewer tokens at once; fewer lanes have longer unrolled
// loops, which a processor runs once a call and so waits for as instructions. Ties go to the lower
// expert. May not know: where logits come from.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "runtime/memory.hpp"

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

}  // namespace moeos::sm90
