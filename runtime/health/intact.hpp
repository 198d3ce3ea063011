// SPDX-License-Identifier: Apache-2.0
// Copies of descriptors, and checks that they are what their posters have written, by a whole warp
// (task.hpp has the check for one thread). Must not depend on: what descriptors describe.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Each lane holds one word of the descriptor.
template <Platform P>
bool is_intact(u32 word, u32 segments) {
  static_assert(P::kLanes == kTaskWords);
  return P::exclusive_or(share_of(P::lane(), word, segments)) == kIntact;
}

/// Copies a descriptor to memory that all lanes see; false if it is damaged. What has been checked
/// is what was copied.
template <Platform P>
bool copy_intact(const Task& from, Task& to) {
  if constexpr (P::kLanes == 1) {
    to = from;
    return is_intact(to);
  } else {
    const u32 mine = reinterpret_cast<const u32*>(&from)[P::lane()];
    reinterpret_cast<u32*>(&to)[P::lane()] = mine;
    P::sync_lanes();
    return is_intact<P>(mine, to.segment_count);
  }
}

}  // namespace moeos
