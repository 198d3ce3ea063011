// Whether a descriptor is what its poster has written, looked at by a warp at once (task.hpp has
// the same for one thread). May not know: what it describes.
#pragma once

#include "runtime/base.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Each lane holds one word of the descriptor.
template <Platform P>
bool is_whole(u32 word, u32 segments) {
  static_assert(P::kLanes == kTaskWords);
  return P::exclusive_or(share_of(P::lane(), word, segments)) == kWhole;
}

}  // namespace moeos
