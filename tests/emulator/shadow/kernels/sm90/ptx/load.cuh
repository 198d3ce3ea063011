// SPDX-License-Identifier: Apache-2.0
// The emulator's loads, in place of kernels/sm90/ptx/load.cuh.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

inline uint4 load_vector(bool wanted, const u8* from) {
  return wanted ? *reinterpret_cast<const uint4*>(from) : uint4{};
}
inline u32 load_number(bool wanted, const u8* from) {
  return wanted ? *reinterpret_cast<const u32*>(from) : 0;
}

}  // namespace moeos::sm90
