// SPDX-License-Identifier: Apache-2.0
// Words of the protocol as they lie in memory: multiplied by an odd number, so that a damaged word
// is not mistaken for another valid one.
//
// A word that has a call's number and something else, or a plain count, has neighbours one bit away
// that are valid: the call before, a row more. Multiplied words lie far apart, and a flip of any
// bits opens to a number that no actor writes (a call that has not been made; the odds of anything
// else are about 1 in 2^32). Multiplication by an odd number loses nothing, leaves 0 as it is, and
// keeps sums: a credit is added to in sealed form. It costs one multiplication an access. Must not
// depend on: what a word means.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos {

inline constexpr u64 kSealFactor = 0x9E3779B97F4A7C15ULL;

/// The number that undoes a multiplication by an odd number, modulo 2^64 (Newton's iteration: each
/// round doubles the correct bits, of which there are three at first).
constexpr u64 inverse_of_odd(u64 odd) {
  u64 inverse = odd;
  for (u32 round = 0; round < 5; ++round) {
    inverse *= 2 - odd * inverse;
  }
  return inverse;
}
inline constexpr u64 kOpenFactor = inverse_of_odd(kSealFactor);
static_assert(kSealFactor * kOpenFactor == 1);

constexpr u64 seal(u64 word) { return word * kSealFactor; }
constexpr u64 open(u64 sealed) { return sealed * kOpenFactor; }
constexpr u32 seal(u32 word) { return word * static_cast<u32>(kSealFactor); }
constexpr u32 open(u32 sealed) { return sealed * static_cast<u32>(kOpenFactor); }

}  // namespace moeos
