// SPDX-License-Identifier: Apache-2.0
// The ready ring: words that tell processors which part each of their tickets stands for.
//
// A part has its own slot, and no slot is used twice in a call. The OS block's actors that hand
// parts out take the next slots and write their words there: the scheduler for parts of tiles,
// which it puts in an order; the arrivals subscriber for parts of tiles that processors wait for;
// the returns subscribers for tokens that are complete, which so precede everything that has not
// been handed out. Slots of parts that processors find themselves (Route's; those of a rank alone)
// stay unwritten; they only take up numbers of the ring (counted_rows.hpp). Must not depend on:
// what a task computes.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Takes the next `parts` slots of the ring; returns the first, or kNone when the ring has no more.
/// One warp.
template <Platform P>
u32 take_ring_slots(const Rank<P>& rank, const Call& call, Actor actor, u32 parts) {
  return by_one_lane<P>([&] {
    return take_slots<P, Scope::block>(rank, call, actor, rank.os.published,
                                       static_cast<u32>(rank.geometry().parts_max()), parts);
  });
}

/// Fills a slot, after a fence of this lane (publish_fence, or the scheduler's relay_fence).
template <Platform P>
void fill_ring_slot(const Rank<P>& rank, u32 slot, ReadyWord word) {
  // Publishes, with that fence, the part's descriptor and inputs, and all that this lane has
  // acquired, to the processor whose ticket the slot is; pairs with the poll and the fence in
  // Processor::claim.
  P::template publish<Scope::device>(&rank.memory.ring[slot], word.sealed());
}

}  // namespace moeos
