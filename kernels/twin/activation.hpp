// Element-wise functions between the two GEMMs, in fp32.
#pragma once

#include <cmath>

#include "kernels/shape.hpp"

namespace moeos::twin {

inline float silu(float x) { return x / (1.0F + std::exp(-x)); }

/// gate and up of one hidden unit. The limit clamps as in DeepGEMM's MegaMoE: gate from above, up
/// on both sides.
/// Written with comparisons, because std::fmin would turn a NaN into the limit.
inline float swiglu(float gate, float up, float limit) {
  const float gate_below = gate > limit ? limit : gate;
  const float up_below = up > limit ? limit : up;
  return silu(gate_below) * (up_below < -limit ? -limit : up_below);
}

/// The activations without a gate.
inline float activate(Activation activation, float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  switch (activation) {
    case Activation::gelu:
      return 0.5F * x * (1.0F + std::erf(x * kSqrtHalf));
    case Activation::gelu_tanh:
      return 0.5F * x * (1.0F + std::tanh(kSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
    case Activation::silu:
      return silu(x);
    case Activation::relu:
      return x > 0.0F || std::isnan(x) ? x : 0.0F;
    default:
      return x;
  }
}

}  // namespace moeos::twin
