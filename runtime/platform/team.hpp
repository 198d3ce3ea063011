// SPDX-License-Identifier: Apache-2.0
// Actors that decide together: the lanes of a warp, the warps of a processor that share one part,
// and the actors that run the parts of one whole.
//
// Must not depend on: what they do.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

/// What the first lane has seen, for all of its warp. Lanes that look at a word that other actors
/// change may see different values, since nothing makes them look at once; then some would take a
/// branch after which they wait for the rest. So a warp bases every decision about such a word on
/// this value.
template <Platform P, class T>
T agreed(T seen) {
  return MOEOS_PLANTED(lanes_decide_alone) ? seen : P::broadcast(seen, 0);
}

/// An atomic done once for the warp, after everything that its lanes did before, and before
/// anything that they do after. Returns the atomic's result.
template <Platform P, class Atomic>
u32 by_one_lane(Atomic atomic) {
  P::sync_lanes();
  const u32 before = P::lane() == 0 ? atomic() : 0;
  P::sync_lanes();
  return P::broadcast(before, 0);
}

/// For shares that follow each other, lane i's up to `ends` (an inclusive scan): the lane whose
/// share contains `number`, which is below the last share's end. `L`: a platform's lanes, or
/// others.
template <class L>
constexpr u32 lane_with(u32 ends, u32 number) {
  u32 lane = 0;  // all before it end at or before the number
  for (u32 step = L::kLanes / 2; step > 0; step /= 2) {
    const u32 end = L::broadcast(ends, lane + step - 1);
    lane += (MOEOS_PLANTED(shares_end_a_number_late) ? end < number : end <= number) ? step : 0;
  }
  return lane;
}

/// One lane: counts `share` of the `all` shares of a whole (a tile, a chunk, a block) in its
/// counter, which is zero before the first; true for the lane that completes the whole, which has
/// what the others wrote.
template <Platform P>
bool lane_completes(u32* done, u32 share, u32 all) {
  if (share == all) {
    return true;
  }
  // Acquire-release: publishes this share, and gives the last lane all other shares before it
  // announces them.
  const u32 before = MOEOS_PLANTED(shares_are_not_ordered)
                         ? P::template add_relaxed<Scope::device>(done, share)
                         : P::template add_acquire_release<Scope::device>(done, share);
  if (before + share != all) {
    return false;
  }
  // For the next call. Relaxed: no actor counts shares of this whole again in this call.
  P::template store_relaxed<Scope::device>(done, 0U);
  return true;
}

/// lane_completes for one of `parts` parts, by a warp, for all that its lanes wrote.
template <Platform P>
bool completes(u32* done, u32 parts) {
  return by_one_lane<P>([=] { return lane_completes<P>(done, 1, parts) ? 1U : 0U; }) != 0;
}

/// One of the warps that share a part.
struct Team {
  u32 index;
  u32 count;
};

/// The barrier of a team of one warp.
struct NobodyElse {
  void operator()() const {}
};

}  // namespace moeos
