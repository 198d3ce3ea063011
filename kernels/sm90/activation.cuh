// Element-wise functions between the two products, in fp32.
#pragma once

#include "kernels/shape.hpp"

namespace moeos::sm90 {

inline float silu(float x) { return __fdividef(x, 1.0F + __expf(-x)); }

/// gate and up of one hidden unit; the limit clamps gate from above and up on both sides.
/// Written with comparisons, because fminf would turn a NaN into the limit.
inline float swiglu(float gate, float up, float limit) {
  const float gate_below = gate > limit ? limit : gate;
  const float up_below = up > limit ? limit : up;
  return silu(gate_below) * (up_below < -limit ? -limit : up_below);
}

template <Activation kActivation>
inline float activate(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  if constexpr (kActivation == Activation::gelu) {
    return 0.5F * x * (1.0F + erff(x * kSqrtHalf));
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    return 0.5F * x * (1.0F + tanhf(kSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
  } else if constexpr (kActivation == Activation::silu) {
    return silu(x);
  } else if constexpr (kActivation == Activation::relu) {
    return x > 0.0F || x != x ? x : 0.0F;
  } else {
    return x;
  }
}

}  // namespace moeos::sm90
