// SPDX-License-Identifier: Apache-2.0
// The emulator's stores, in place of kernels/sm90/ptx/store.cuh.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

template <class Vector>
void store_vector(bool wanted, u8* to, Vector value) {
  if (wanted) {
    *reinterpret_cast<Vector*>(to) = value;
  }
}
inline void store_number(bool wanted, u8* to, float value) { store_vector(wanted, to, value); }

}  // namespace moeos::sm90
