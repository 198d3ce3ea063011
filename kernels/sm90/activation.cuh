// Element-wise functions between the two products, in fp32.
#pragma once

#include "kernels/shape.hpp"

namespace moeos::sm90 {

inline float silu(float x) { return __fdividef(x, 1.0F + __expf(-x)); }

/// Comparisons, because fminf would turn a NaN into the limit.
inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }

/// gate and up of one hidden unit; a limit clamps gate from above and up on both sides.
template <bool kLimited>
inline float swiglu(float gate, float up, float limit) {
  if constexpr (kLimited) {
    return silu(clamp_above(gate, limit)) * -clamp_above(-clamp_above(up, limit), limit);
  } else {
    return silu(gate) * up;
  }
}

/// The error function to 1.5e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions,
/// 7.1.26. The library's is longer, and takes the registers that accumulators need.
inline float error_function(float x) {
  const float size = fabsf(x);
  const float t = __fdividef(1.0F, 1.0F + 0.3275911F * size);
  float sum = 1.061405429F;
  sum = sum * t - 1.453152027F;
  sum = sum * t + 1.421413741F;
  sum = sum * t - 0.284496736F;
  sum = sum * t + 0.254829592F;
  return copysignf(1.0F - sum * t * __expf(-size * size), x);
}

template <Activation kActivation>
inline float activate(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  if constexpr (kActivation == Activation::gelu) {
    return 0.5F * x * (1.0F + error_function(x * kSqrtHalf));
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    // x (1 + tanh u) / 2 = x / (1 + exp(-2u))
    return __fdividef(x, 1.0F + __expf(-2.0F * kSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
  } else if constexpr (kActivation == Activation::silu) {
    return silu(x);
  } else if constexpr (kActivation == Activation::relu) {
    return x > 0.0F || x != x ? x : 0.0F;
  } else {
    return x;
  }
}

}  // namespace moeos::sm90
