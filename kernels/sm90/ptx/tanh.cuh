// SPDX-License-Identifier: Apache-2.0
// The hyperbolic tangent of the special function unit, with a relative error of 2^-11. Source: PTX
// ISA, "tanh".
#pragma once

namespace moeos::sm90 {

inline float rough_tanh(float x) {
  float value;
  asm("tanh.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

}  // namespace moeos::sm90
