// SPDX-License-Identifier: Apache-2.0
// Random numbers that a run draws from its seed.
#pragma once

#include <random>

#include "runtime/words/base.hpp"

namespace moeos::twin {

using Random = std::mt19937_64;

/// A number from low to high, both included.
inline u32 draw(Random& random, u32 low, u32 high) {
  return std::uniform_int_distribution<u32>(low, high)(random);
}

}  // namespace moeos::twin
