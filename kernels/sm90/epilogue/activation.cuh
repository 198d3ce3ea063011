// SPDX-License-Identifier: Apache-2.0
// Element-wise functions between the two products, in fp32, two values at a time.
//
// The smooth functions are all x sigmoid(2u) for some u(x). An SM computes an eighth as many
// hyperbolic tangents, powers and reciprocals as products, and a tile has 128 x 128 or 128 x 256 of
// these values with nothing else to do. So a type with 8 significant bits uses one rough tanh a
// value, whose 11 bits suffice; the other type uses a power a value and a reciprocal for two. The
// rough tanh takes 0.6 to 1.6 % off large calls.
#pragma once

#include "kernels/shape.hpp"
#include "kernels/sm90/ptx/element.cuh"
#include "kernels/sm90/ptx/tanh.cuh"

namespace moeos::sm90 {

inline constexpr float kLog2E = 1.4426950408889634F;

/// Whether rough_tanh is exact enough for results of this type: it is off by |x| / 4096 at most,
/// which is an eighth to a quarter of the type's rounding where x is positive
/// (tests/gpu/test_activation.py).
template <class Type>
inline constexpr bool kRoughTanhSuffices = Type::kDigits <= 8;

/// 1 + exp(-2u), limited so that the product of two is finite, and no NaN.
inline float divisor(float u) {
  constexpr float kMost = 60.0F;
  return 1.0F + exp2f(fminf(-2.0F * kLog2E * u, kMost));
}

/// sigmoid(2u) of both.
inline float2 shares(float2 u) {
  const float first = divisor(u.x);
  const float second = divisor(u.y);
  const float inverse = __fdividef(1.0F, first * second);
  return make_float2(second * inverse, first * inverse);
}

/// x sigmoid(2u) of both. If one x is a NaN, so is its result, and the other's is not.
template <class Type>
inline float2 damp(float2 x, float2 u) {
  if constexpr (kRoughTanhSuffices<Type>) {
    const float2 half = make_float2(0.5F * x.x, 0.5F * x.y);
    return make_float2(half.x * rough_tanh(u.x) + half.x, half.y * rough_tanh(u.y) + half.y);
  } else {
    const float2 s = shares(u);
    return make_float2(x.x * s.x, x.y * s.y);
  }
}

template <class Type>
inline float2 swish(float2 x, float alpha) {
  return damp<Type>(x, make_float2(0.5F * alpha * x.x, 0.5F * alpha * x.y));
}

/// Comparisons, because fminf would turn a NaN into the limit.
inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }
inline float2 clamp_above(float2 x, float limit) {
  return make_float2(clamp_above(x.x, limit), clamp_above(x.y, limit));
}

/// u of GELU, to 5e-6 of the result: half of p(x), which is close to the logarithm of Phi(x) /
/// Phi(-x). It is an odd polynomial, fitted by least squares, weighted until the largest error of
/// GELU was smallest, up to where Phi(-x) is 3e-7; beyond, it still ascends. The library's error
/// function is twice as long, and takes registers that accumulators need.
inline float gelu_argument(float x) {
  const float square = x * x;
  float sum = 0.5F * 1.7511896430733032e-6F;
  sum = sum * square + 0.5F * -5.2244420658098534e-5F;
  sum = sum * square + 0.5F * -2.993922389578074e-4F;
  sum = sum * square + 0.5F * 7.303213328123093e-2F;
  sum = sum * square + 0.5F * 1.5956088304519653F;
  return x * sum;
}

/// u of GELU with tanh.
inline float gelu_tanh_argument(float x) {
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  return kSqrtTwoOverPi * (x + 0.044715F * x * x * x);
}

inline float relu(float x) { return x > 0.0F || x != x ? x : 0.0F; }

/// The activation's curve, before its result is converted to `Type`.
template <class Type, const Activation& kActivation>
inline float2 curve_of(float2 x) {
  if constexpr (kActivation.curve == Curve::swish) {
    return swish<Type>(x, kActivation.alpha);
  } else if constexpr (kActivation.curve == Curve::gelu) {
    return damp<Type>(x, make_float2(gelu_argument(x.x), gelu_argument(x.y)));
  } else if constexpr (kActivation.curve == Curve::gelu_tanh) {
    return damp<Type>(x, make_float2(gelu_tanh_argument(x.x), gelu_tanh_argument(x.y)));
  } else if constexpr (kActivation.curve == Curve::relu) {
    return make_float2(relu(x.x), relu(x.y));
  } else if constexpr (kActivation.curve == Curve::relu2) {
    return make_float2(relu(x.x) * relu(x.x), relu(x.y) * relu(x.y));
  } else {
    return x;
  }
}

/// A gated activation of gate and up of two hidden units, before its results are converted to
/// `Type`.
template <class Type, const Activation& kActivation>
inline float2 gated(float2 gate, float2 up) {
  constexpr float kLimit = kActivation.limit;
  if constexpr (kLimit < kInfinity) {
    gate = kActivation.clamps_after ? gate : clamp_above(gate, kLimit);
    up = clamp_above(up, kLimit);
    up = make_float2(-clamp_above(-up.x, kLimit), -clamp_above(-up.y, kLimit));
  }
  float2 factor = curve_of<Type, kActivation>(gate);
  if constexpr (kActivation.clamps_after) {
    factor = clamp_above(factor, kLimit);
  }
  if constexpr (kActivation.up_offset != 0.0F) {
    up = make_float2(up.x + kActivation.up_offset, up.y + kActivation.up_offset);
  }
  return make_float2(factor.x * up.x, factor.y * up.y);
}

}  // namespace moeos::sm90
