// Element-wise functions between the two products, in fp32, two values at a time.
//
// The smooth ones are all x / (1 + 2^t) for some t(x). An SM computes an eighth as many powers and
// reciprocals as products, and a tile has 128 x 128 or 128 x 256 of these values with nothing else
// to do: so two values share a reciprocal (docs/performance.md, "One reciprocal for two").
#pragma once

#include "kernels/shape.hpp"

namespace moeos::sm90 {

inline constexpr float kLog2E = 1.4426950408889634F;

/// So much counts as t at most: then the product of two divisors is finite.
inline constexpr float kMostDamping = 60.0F;

/// x / (1 + 2^t) of both. Where an x is a NaN so is its result, and the other's is not, because
/// neither t is.
inline float2 damp(float2 x, float2 t) {
  const float first = 1.0F + exp2f(t.x);
  const float second = 1.0F + exp2f(t.y);
  const float inverse = __fdividef(1.0F, first * second);
  return make_float2(x.x * (second * inverse), x.y * (first * inverse));
}

inline float silu_exponent(float x) { return fminf(-kLog2E * x, kMostDamping); }
inline float2 silu(float2 x) {
  return damp(x, make_float2(silu_exponent(x.x), silu_exponent(x.y)));
}

/// Comparisons, because fminf would turn a NaN into the limit.
inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }
inline float2 clamp_above(float2 x, float limit) {
  return make_float2(clamp_above(x.x, limit), clamp_above(x.y, limit));
}

/// gate and up of two hidden units; a limit clamps gate from above and up on both sides.
template <bool kLimited>
inline float2 swiglu(float2 gate, float2 up, float limit) {
  if constexpr (kLimited) {
    gate = clamp_above(gate, limit);
    up = clamp_above(up, limit);
    up = make_float2(-clamp_above(-up.x, limit), -clamp_above(-up.y, limit));
  }
  const float2 factor = silu(gate);
  return make_float2(factor.x * up.x, factor.y * up.y);
}

/// GELU to 5e-6: x over 1 + exp(-p(x)), where p is close to the logarithm of Phi(x) / Phi(-x). It
/// is an odd polynomial, fitted by least squares, weighted until the largest error of GELU was
/// smallest, up to where Phi(-x) is 3e-7; beyond, it still ascends. The library's error function is
/// twice as long, and takes the registers that accumulators need.
inline float gelu_exponent(float x) {
  const float square = x * x;
  float sum = -kLog2E * 1.7511896430733032e-6F;
  sum = sum * square + -kLog2E * -5.2244420658098534e-5F;
  sum = sum * square + -kLog2E * -2.993922389578074e-4F;
  sum = sum * square + -kLog2E * 7.303213328123093e-2F;
  sum = sum * square + -kLog2E * 1.5956088304519653F;
  return fminf(x * sum, kMostDamping);
}

/// And with tanh: x (1 + tanh u) / 2 = x / (1 + exp(-2u)).
inline float gelu_tanh_exponent(float x) {
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  return fminf(-2.0F * kLog2E * kSqrtTwoOverPi * (x + 0.044715F * x * x * x), kMostDamping);
}

inline float relu(float x) { return x > 0.0F || x != x ? x : 0.0F; }

template <Activation kActivation>
inline float2 activate(float2 x) {
  if constexpr (kActivation == Activation::gelu) {
    return damp(x, make_float2(gelu_exponent(x.x), gelu_exponent(x.y)));
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    return damp(x, make_float2(gelu_tanh_exponent(x.x), gelu_tanh_exponent(x.y)));
  } else if constexpr (kActivation == Activation::silu) {
    return silu(x);
  } else if constexpr (kActivation == Activation::relu) {
    return make_float2(relu(x.x), relu(x.y));
  } else {
    return x;
  }
}

}  // namespace moeos::sm90
