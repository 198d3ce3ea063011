// SPDX-License-Identifier: Apache-2.0
// Four lanes that have columns of the same rows exchange them, so that each has eight adjacent
// columns: one store. Must not depend on: the meaning of columns, and where they go.
#pragma once

#include "kernels/sm90/block/config.cuh"
#include "kernels/sm90/ptx/decode.cuh"

namespace moeos::sm90 {

/// The low and the high halves of two words, as permute_bytes selects them.
inline constexpr u32 kLowHalves = 0x5410U;
inline constexpr u32 kHighHalves = 0x7632U;

/// The eight columns of one of four eights, where each lane's four words have columns 2l + {0, 1}
/// (l = lane % 4) of the four eights.
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

/// The eight columns of one of four eights, where each lane's words have columns l and l + 4.
inline uint4 eight_of_halves(u32 (&words)[4]) {
  eight_columns(words);
  return make_uint4(permute_bytes(words[0], words[1], kLowHalves),
                    permute_bytes(words[2], words[3], kLowHalves),
                    permute_bytes(words[0], words[1], kHighHalves),
                    permute_bytes(words[2], words[3], kHighHalves));
}

/// The inverse of eight_of_halves: from eight columns, words that have columns l and l + 4 of four
/// eights.
inline void halves_of_eight(u32 (&words)[4], const uint4& eight) {
  words[0] = permute_bytes(eight.x, eight.z, kLowHalves);
  words[1] = permute_bytes(eight.x, eight.z, kHighHalves);
  words[2] = permute_bytes(eight.y, eight.w, kLowHalves);
  words[3] = permute_bytes(eight.y, eight.w, kHighHalves);
  eight_columns(words);
}

}  // namespace moeos::sm90
