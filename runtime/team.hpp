// Who decides together: the lanes of a warp, and the warps of a processor that share one part.
//
// May not know: what they do.
#pragma once

#include "runtime/base.hpp"
#include "runtime/platform/concept.hpp"

namespace moeos {

/// What the first lane has seen, for all of its warp. Lanes that look at a word that others change
/// may see different values, since nothing makes them look at once; then some would take a branch
/// behind which they wait for the rest. So whatever a warp does because of such a word, it does
/// because of this.
template <Platform P, class T>
T agreed(T seen) {
  return P::broadcast(seen, 0);
}

/// One of the warps that share a part.
struct Team {
  u32 index;
  u32 count;
};

/// How the warps of a team wait for each other when a processor has one warp.
struct NobodyElse {
  void operator()() const {}
};

}  // namespace moeos
