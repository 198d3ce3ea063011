// SPDX-License-Identifier: Apache-2.0
// What codes of weights mean, from their definitions and in double precision: what
// kernels/element_formats.hpp is compared with. Must not depend on: how that computes it.
#pragma once

#include <array>
#include <cmath>
#include <limits>

namespace codes {

/// A sign, 4 bits of exponent and 3 of mantissa. The lowest exponent is that of subnormal numbers.
inline double e4m3(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15);
  const int mantissa = static_cast<int>(code & 7);
  const double sign = code < 128 ? 1.0 : -1.0;
  if (exponent == 15 && mantissa == 7) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * mantissa / 512.0
                       : sign * std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
}

/// Of any number the nearest e4m3 code, of two the even one, by looking at all of them; beyond the
/// largest that one.
inline unsigned nearest_e4m3(double value) {
  constexpr unsigned kLargest = 0x7E;
  if (std::isnan(value)) {
    return kLargest + 1;
  }
  const double magnitude = std::fabs(value);
  unsigned best = 0;
  for (unsigned code = 1; code <= kLargest; ++code) {
    const double before = std::fabs(e4m3(best) - magnitude);
    const double here = std::fabs(e4m3(code) - magnitude);
    best = here < before || (here == before && code % 2 == 0) ? code : best;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

inline double e2m1(unsigned code) {
  constexpr std::array<double, 8> kMagnitudes = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return (code & 8) == 0 ? kMagnitudes[code & 7] : -kMagnitudes[code & 7];
}

inline double e8m0(unsigned code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN()
                     : std::ldexp(1.0, static_cast<int>(code) - 127);
}

inline double int4(unsigned code) { return static_cast<int>(code) - 8; }

/// Of a finite number that is not subnormal, the nearest with 8 bits of mantissa, ties to even.
inline double nearest_bf16(double value) {
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

}  // namespace codes
