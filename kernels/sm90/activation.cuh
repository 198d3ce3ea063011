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
