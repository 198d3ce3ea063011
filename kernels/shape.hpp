// SPDX-License-Identifier: Apache-2.0
// What a layer computes, as opposed to how its rows travel: the numbers that only kernels/ may
// depend on. The fields are in shape.def and activation.def.
//
// The enumerators are the values that the host passes; host/moeos/config/config.py and
// host/moeos/config/activations.py have the names.
#pragma once

#include "kernels/element_formats.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// Also stands for "no limit". NVRTC has no <limits>.
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000U);

/// Functions of one number z: z sigmoid(alpha z), GELU, GELU with tanh, max(z, 0), its square, z.
enum class Curve : u32 { swish = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4, identity = 5 };
/// The function between the two GEMMs; host/moeos/config/activations.py has the values of those in
/// use. Ungated, of one number: its curve. Gated, of two: curve(gate) * (up + up_offset), with both
/// clamped.
struct Activation {
#define FIELD(type, name) type name;
#include "kernels/activation.def"
};
/// The score of a logit l: softmax over the experts, 1 / (1 + exp(-l)), sqrt(log(1 + exp(l)))
/// (DeepSeek-V4).
enum class Scoring : u32 { softmax = 0, sigmoid = 1, sqrtsoftplus = 2 };
/// Below this, log(1 + exp(l)) is exp(l) in fp32.
inline constexpr float kSoftplusTail = -17.0F;
/// Above this, it is l.
inline constexpr float kSoftplusLinear = 17.0F;
/// The score of a group, from its experts' selection scores: the sum of the two best (DeepSeek-V3),
/// the best (DeepSeek-V2).
enum class GroupScore : u32 { top2_sum = 0, max = 1 };

/// Where an expert's gate rows and up rows lie: all gate rows of w1, then all up rows; gate row i
/// and up row i as rows 2i and 2i + 1 of w1; or gate rows in w1, and up rows in w3.
enum class GateUp : u32 { concatenated = 0, interleaved = 1, separate = 2 };

struct LayerShape {
#define FIELD(type, name) type name;
#include "kernels/shape.def"

  /// Whether experts are chosen by their logits, where selection scores have no bias: scores are
  /// monotonic in the logits, and fp32 scores saturate. Sums of scores are not.
  constexpr bool chooses_by_logit() const {
    return expert_groups == 1 || group_score == GroupScore::max;
  }
  constexpr bool gated() const { return activation.is_gated; }
  /// Whether rows are quantized where they are sent, and between the two products.
  constexpr bool codes_rows() const { return activation_format != ActivationFormat::plain; }
  /// Whether experts' results are quantized where they return; rows are then quantized, too.
  constexpr bool codes_results() const { return result_format != ActivationFormat::plain; }
  /// Rows of w1: gate rows, then up rows, when gated.
  constexpr u32 w1_rows() const { return w1_rows_of(intermediate); }
  /// Rows of w1 of an MLP with `values` values between its two products.
  constexpr u32 w1_rows_of(u32 values) const { return gated() ? 2 * values : values; }
};

}  // namespace moeos
