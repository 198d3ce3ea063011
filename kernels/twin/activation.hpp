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

/// A gated activation of gate and up of one hidden unit.
inline float gated(const Activation& activation, float gate, float up) {
  const float limit = activation.limit;
  const float factor = activation.clamps_after ? clamp_above(curve_of(activation, gate), limit)
                                               : curve_of(activation, clamp_above(gate, limit));
  const float clamped = clamp_above(up, limit);
  return factor * ((clamped < -limit ? -limit : clamped) + activation.up_offset);
}

/// The derivative of a curve. At a corner it is that of the side on which the curve is constant.
inline float slope_of(const Activation& activation, float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  constexpr float kOneOverSqrtTwoPi = 0.39894228040143268F;
  switch (activation.curve) {
    case Curve::swish: {
      const float share = 1.0F / (1.0F + std::exp(-activation.alpha * x));
      return share + activation.alpha * x * share * (1.0F - share);
    }
    case Curve::gelu:
      return 0.5F * (1.0F + std::erf(x * kSqrtHalf)) +
             x * kOneOverSqrtTwoPi * std::exp(-0.5F * x * x);
    case Curve::gelu_tanh: {
      const float tanh = std::tanh(kSqrtTwoOverPi * (x + 0.044715F * x * x * x));
      return 0.5F * (1.0F + tanh) +
             0.5F * x * (1.0F - tanh * tanh) * kSqrtTwoOverPi * (1.0F + 3.0F * 0.044715F * x * x);
    }
    case Curve::relu:
      return x > 0.0F ? 1.0F : std::isnan(x) ? x : 0.0F;
    case Curve::relu2:
      return x > 0.0F || std::isnan(x) ? 2.0F * x : 0.0F;
    default:
      return 1.0F;
  }
}

/// The value of an activation for one hidden unit, and its derivatives.
struct Activated {
  float value;
  float by_gate;  // or by the only argument
  float by_up;    // if gated
};

inline Activated activated(const Activation& activation, float gate, float up) {
  if (!activation.is_gated) {
    return {curve_of(activation, gate), slope_of(activation, gate), 0.0F};
  }
  const float limit = activation.limit;
  const float above = activation.clamps_after ? curve_of(activation, gate) : gate;
  const float factor = activation.clamps_after ? clamp_above(above, limit)
                                               : curve_of(activation, clamp_above(gate, limit));
  const float slope = above > limit ? 0.0F : slope_of(activation, gate);
  const float clamped = clamp_above(up, limit);
  const float other = (clamped < -limit ? -limit : clamped) + activation.up_offset;
  const bool moves = !(up > limit) && !(up < -limit);
  return {factor * other, slope * other, moves ? factor : 0.0F};
}

}  // namespace moeos::twin
