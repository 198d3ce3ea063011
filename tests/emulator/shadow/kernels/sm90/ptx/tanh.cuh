// SPDX-License-Identifier: Apache-2.0
// The emulator's hyperbolic tangent, in place of kernels/sm90/ptx/tanh.cuh.
#pragma once

#include <cmath>

namespace moeos::sm90 {

inline float rough_tanh(float x) { return std::tanh(x); }

}  // namespace moeos::sm90
