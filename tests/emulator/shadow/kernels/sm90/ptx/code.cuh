// SPDX-License-Identifier: Apache-2.0
// In place of kernels/sm90/ptx/code.cuh: a host's processor fetches its instructions by itself.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

inline void prefetch_bytes(u64, u32) {}

}  // namespace moeos::sm90
