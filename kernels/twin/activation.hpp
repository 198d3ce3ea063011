// SPDX-License-Identifier: Apache-2.0
// Element-wise functions between the two GEMMs, in fp32.
#pragma once

#include <cmath>

#include "kernels/shape.hpp"

namespace moeos::twin {

inline float curve_of(const Activation& activation, float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  switch (activation.curve) {
    case Curve::swish:
      return x / (1.0F + std::exp(-activation.alpha * x));
    case Curve::gelu:
      return 0.5F * x * (1.0F + std::erf(x * kSqrtHalf));
    case Curve::gelu_tanh:
      return 0.5F * x * (1.0F + std::tanh(kSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
    case Curve::relu:
      return x > 0.0F || std::isnan(x) ? x : 0.0F;
    case Curve::relu2:
      return x > 0.0F || std::isnan(x) ? x * x : 0.0F;
    default:
      return x;
  }
}

/// Comparisons, because std::fmin would turn a NaN into the limit.
inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }

/// Of gate and up of one hidden unit.
inline float gated(const Activation& activation, float gate, float up) {
  const float limit = activation.limit;
  const float factor = activation.clamps_after ? clamp_above(curve_of(activation, gate), limit)
                                               : curve_of(activation, clamp_above(gate, limit));
  const float clamped = clamp_above(up, limit);
  return factor * ((clamped < -limit ? -limit : clamped) + activation.up_offset);
}

}  // namespace moeos::twin
