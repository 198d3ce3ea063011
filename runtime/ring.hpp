// The ready ring: words that tell processors which part is whose.
//
// A part has its own slot, and no slot is used twice in a call. Whoever of the OS block hands parts
// out takes the next slots and writes its words there: the scheduler those of tiles, which it puts
// in an order; the arrivals subscriber those of tiles that processors wait for; the returns
// subscribers those of tokens that are complete, which so go before all that has not been handed
// out. May not know: what a task computes.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"

namespace moeos {

/// Takes the next slots of the ring, as many as parts are handed out; the first of them, or kNone
/// when the ring has no more. One warp.
template <Platform P>
u32 take_ring_slots(const Rank<P>& rank, const Call& call, Actor actor, u32 parts) {
  return by_one_lane<P>([&] {
    return take_slots<P, Scope::block>(rank, call, actor, rank.os->published,
                                       static_cast<u32>(rank.geometry().parts_max()), parts);
  });
}

/// Hands out all parts of a task. One warp, behind a publish_fence of each lane: what they have
/// written and acquired is known to the processors that acquire the words (Processor::claim).
template <Platform P>
void hand_out_task(const Rank<P>& rank, const Call& call, Actor actor, TaskKind kind, u32 task,
                   u32 parts) {
  const u32 first = take_ring_slots(rank, call, actor, parts);
  for (u32 part = P::lane(); first != kNone && part < parts; part += P::kLanes) {
    // Publishes, with the fence before it, the descriptor and the part's inputs; pairs with the
    // poll and the fence in Processor::claim.
    P::template publish<Scope::device>(&rank.memory.ring[first + part],
                                       ReadyWord(call.epoch, kind, task, part).sealed());
  }
}

}  // namespace moeos
