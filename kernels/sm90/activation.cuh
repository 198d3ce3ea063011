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

/// GELU to 5e-6: x over 1 + exp(-p(x)), where p is close to the logarithm of Phi(x) / Phi(-x). It
/// is an odd polynomial, fitted by least squares, weighted until the largest error of GELU was
/// smallest, up to where Phi(-x) is 3e-7. The library's error function is twice as long, and takes
/// the registers that accumulators need.
inline float gelu(float x) {
  constexpr float kEnd = 5.0F;
  const float near = fminf(fmaxf(x, -kEnd), kEnd);  // of a NaN a number, but x below remains one
  const float square = near * near;
  float sum = 1.7511896430733032e-6F;
  sum = sum * square - 5.2244420658098534e-5F;
  sum = sum * square - 2.993922389578074e-4F;
  sum = sum * square + 7.303213328123093e-2F;
  sum = sum * square + 1.5956088304519653F;
  return __fdividef(x, 1.0F + __expf(-near * sum));
}

template <Activation kActivation>
inline float activate(float x) {
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  if constexpr (kActivation == Activation::gelu) {
    return gelu(x);
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
