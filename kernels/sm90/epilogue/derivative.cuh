// SPDX-License-Identifier: Apache-2.0
// Element-wise functions between the two products with their derivatives, in fp32, two at a time.
//
// The smooth functions are x s for a share s = sigmoid(2u). Their derivatives contain a difference
// 1 - s, for which a rough tanh is too rough: so a power a value and a reciprocal for two, whatever
// the type. Must not depend on: rows, weights.
#pragma once

#include "kernels/sm90/epilogue/activation.cuh"

namespace moeos::sm90 {

/// The values of a curve at two numbers, and its derivatives there.
struct Slopes {
  float2 value;
  float2 slope;
};

/// x s, and s + x s', for a share s = sigmoid(2u(x)) and twice the derivative of u.
inline Slopes damped(float2 x, float2 u, float2 twice) {
  const float2 s = shares(u);
  return {make_float2(x.x * s.x, x.y * s.y), make_float2(s.x + x.x * s.x * (1.0F - s.x) * twice.x,
                                                         s.y + x.y * s.y * (1.0F - s.y) * twice.y)};
}

inline float gelu_tanh_slope(float x) {  // derivative of twice its argument
  constexpr float kTwice = 2.0F * 0.79788456080286536F;
  return kTwice * (1.0F + 3.0F * 0.044715F * x * x);
}

/// x phi(x), of the normal distribution.
inline float times_density(float x) {
  constexpr float kOneOverSqrtTwoPi = 0.39894228040143268F;
  return x * kOneOverSqrtTwoPi * exp2f(-0.5F * kLog2E * x * x);
}

/// At a corner the derivative is that of the side on which the curve is constant.
template <const Activation& kActivation>
inline Slopes slopes_of(float2 x) {
  if constexpr (kActivation.curve == Curve::swish) {
    constexpr float kAlpha = kActivation.alpha;
    return damped(x, make_float2(0.5F * kAlpha * x.x, 0.5F * kAlpha * x.y),
                  make_float2(kAlpha, kAlpha));
  } else if constexpr (kActivation.curve == Curve::gelu) {
    const float2 s = shares(make_float2(gelu_argument(x.x), gelu_argument(x.y)));
    return {make_float2(x.x * s.x, x.y * s.y),
            make_float2(s.x + times_density(x.x), s.y + times_density(x.y))};
  } else if constexpr (kActivation.curve == Curve::gelu_tanh) {
    return damped(x, make_float2(gelu_tanh_argument(x.x), gelu_tanh_argument(x.y)),
                  make_float2(gelu_tanh_slope(x.x), gelu_tanh_slope(x.y)));
  } else if constexpr (kActivation.curve == Curve::relu) {
    const auto slope = [](float of) { return of > 0.0F ? 1.0F : of != of ? of : 0.0F; };
    return {make_float2(relu(x.x), relu(x.y)), make_float2(slope(x.x), slope(x.y))};
  } else if constexpr (kActivation.curve == Curve::relu2) {
    const float2 positive = make_float2(relu(x.x), relu(x.y));
    return {make_float2(positive.x * positive.x, positive.y * positive.y),
            make_float2(2.0F * positive.x, 2.0F * positive.y)};
  } else {
    return {x, make_float2(1.0F, 1.0F)};
  }
}

/// The values of an activation for two hidden units, and its derivatives.
struct Derived {
  float2 value;
  float2 by_gate;  // or by the only argument
  float2 by_up;    // if gated
};

/// Clamps `up` to both sides of the limit, and adds the offset.
template <const Activation& kActivation>
inline float other_factor(float up) {
  constexpr float kLimit = kActivation.limit;
  if constexpr (kLimit < kInfinity) {
    up = clamp_above(up, kLimit);
    up = -clamp_above(-up, kLimit);
  }
  return up + kActivation.up_offset;
}

struct OneDerived {
  float value;
  float by_gate;
  float by_up;
};
/// For a gate and an up: `value` and `slope` are the curve's at the gate, as it is clamped before.
template <const Activation& kActivation>
inline OneDerived gated_slopes(float gate, float up, float value, float slope) {
  constexpr float kLimit = kActivation.limit;
  float moves = value;
  if constexpr (kLimit < kInfinity) {
    const float above = kActivation.clamps_after ? value : gate;
    slope = above > kLimit ? 0.0F : slope;
    value = kActivation.clamps_after ? clamp_above(value, kLimit) : value;
    moves = up > kLimit || up < -kLimit ? 0.0F : value;
  }
  const float other = other_factor<kActivation>(up);
  return {value * other, slope * other, moves};
}

template <const Activation& kActivation>
inline Derived derive(float2 gate, float2 up) {
  constexpr float kLimit = kActivation.limit;
  if constexpr (!kActivation.is_gated) {
    const Slopes of = slopes_of<kActivation>(gate);
    return {of.value, of.slope, make_float2(0.0F, 0.0F)};
  } else {
    constexpr bool kBefore = kLimit < kInfinity && !kActivation.clamps_after;
    const Slopes of = slopes_of<kActivation>(kBefore ? clamp_above(gate, kLimit) : gate);
    const OneDerived x = gated_slopes<kActivation>(gate.x, up.x, of.value.x, of.slope.x);
    const OneDerived y = gated_slopes<kActivation>(gate.y, up.y, of.value.y, of.slope.y);
    return {make_float2(x.value, y.value), make_float2(x.by_gate, y.by_gate),
            make_float2(x.by_up, y.by_up)};
  }
}

}  // namespace moeos::sm90
