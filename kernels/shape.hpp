// What a layer computes, as opposed to how its rows travel: the numbers that only kernels/ may
// know.
//
// The enumerators are the values that the host passes; host/config.py has the names.
#pragma once

#include "runtime/base.hpp"

namespace moeos {

/// Also "no limit". NVRTC has no <limits>.
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000U);

enum class Activation : u32 {
  swiglu = 0,
  gelu = 1,
  gelu_tanh = 2,
  silu = 3,
  relu = 4,
  identity = 5
};
enum class Scoring : u32 { softmax = 0, sigmoid = 1 };
/// Of its experts' selection scores: the sum of the two best (DeepSeek-V3), the best (DeepSeek-V2).
enum class GroupScore : u32 { top2_sum = 0, max = 1 };

struct LayerShape {
  u32 hidden;
  u32 intermediate;
  Activation activation;
  float swiglu_limit;  // clamp of gate (above) and up (both sides); infinite when there is none
  Scoring scoring;
  bool renormalize;  // divide the k weights by their sum (thesis eq. 5.1, 5.2)
  float routed_scaling;
  u32 expert_groups;  // group-limited top-k: experts are chosen from top_groups groups
  u32 top_groups;
  GroupScore group_score;
  bool fp32_router;  // its weight is fp32, whatever else is, and its logits are as float64's

  /// Whether experts are chosen by their logits, where selection scores have no bias: scores are
  /// monotonic in the logits, and fp32 scores saturate. Sums of scores are not.
  constexpr bool chooses_by_logit() const {
    return expert_groups == 1 || group_score == GroupScore::max;
  }
  constexpr bool gated() const { return activation == Activation::swiglu; }
  /// Rows of w1: gate rows, then up rows, when gated.
  constexpr u32 w1_rows() const { return gated() ? 2 * intermediate : intermediate; }
};

}  // namespace moeos
