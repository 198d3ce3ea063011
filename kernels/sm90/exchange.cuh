// SPDX-License-Identifier: Apache-2.0
// Four lanes that have columns of the same rows exchange them, so that each has eight columns next
// to each other: one store. May not know: what the columns are of, and where they go.
#pragma once

#include "kernels/sm90/config.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// Of four words, columns 2l + {0, 1} of four eights (l = lane % 4): the eight columns of one.
inline uint4 eight_columns(u32 (&words)[4]) {
  const bool odd = (Machine::lane() & 1) != 0;
  const bool high = (Machine::lane() & 2) != 0;
  const auto exchange = [](u32& one, u32& other, bool second, u32 distance) {
    const u32 got = __shfl_xor_sync(~0U, second ? one : other, distance);
    one = second ? got : one;
    other = second ? other : got;
  };
  exchange(words[0], words[1], odd, 1);
  exchange(words[2], words[3], odd, 1);
  exchange(words[0], words[2], high, 2);
  exchange(words[1], words[3], high, 2);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// The same of columns l and l + 4 of four eights.
inline uint4 eight_of_halves(u32 (&words)[4]) {
  eight_columns(words);
  constexpr u32 kLow = 0x5410U;
  constexpr u32 kHigh = 0x7632U;
  return make_uint4(
      permute_bytes(words[0], words[1], kLow), permute_bytes(words[2], words[3], kLow),
      permute_bytes(words[0], words[1], kHigh), permute_bytes(words[2], words[3], kHigh));
}

/// Its inverse, of eight columns: words that have columns l and l + 4 of four eights.
inline void halves_of_eight(u32 (&words)[4], const uint4& eight) {
  constexpr u32 kLow = 0x5410U;
  constexpr u32 kHigh = 0x7632U;
  words[0] = permute_bytes(eight.x, eight.z, kLow);
  words[1] = permute_bytes(eight.x, eight.z, kHigh);
  words[2] = permute_bytes(eight.y, eight.w, kLow);
  words[3] = permute_bytes(eight.y, eight.w, kHigh);
  eight_columns(words);
}

}  // namespace moeos::sm90
