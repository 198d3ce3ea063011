// SPDX-License-Identifier: Apache-2.0
// The emulator's stores, in place of kernels/sm90/ptx/store.cuh.
#pragma once

#include "runtime/base.hpp"

namespace moeos::sm90 {

inline void store_vector(bool wanted, u8* to, uint4 value) {
  if (wanted) {
    *reinterpret_cast<uint4*>(to) = value;
  }
}

}  // namespace moeos::sm90
