// SPDX-License-Identifier: Apache-2.0
// Parts of Dispatch that couriers keep until slots of a cell are free: which rank they wait for.
//
// A rank that dies stops the couriers of others from sending to any rank, so of everything that is
// late, what couriers wait for is the most telling. Must not depend on: the subscribers that ask.
#pragma once

#include "runtime/memory/os_memory.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/sealed.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Links of a chain of waits (GraceTime) that end at a rank for which couriers keep parts: where
/// rows are late, such a chain may end at another rank.
constexpr u32 kept_links(const Geometry& geometry) { return geometry.rings_cells() ? 1 : 0; }

/// If couriers have sent all parts that they have taken except those that they keep: returns the
/// chunk whose slots the first of these waits for, as a number among all peers' chunks. That chunk
/// has been sent, and its peer needs nothing else to return it. Otherwise returns a chunk without
/// rows. One lane, when nothing has moved for a deadline.
template <Platform P>
SentChunk first_before_kept(const Rank<P>& rank, const Call& call) {
  const Geometry& geometry = rank.geometry();
  if (!geometry.rings_cells() || geometry.dispatches_tokens(call.tokens)) {
    return {};
  }
  const CallState& state = rank.memory.call(call.epoch);
  // Pairs with finish_routing: the list of Dispatch.
  const u32 routed = P::template load_acquire<Scope::device>(&state.routed.value);
  // Relaxed: numbers that are compared.
  const u32 done = P::template load_relaxed<Scope::device>(&state.dispatch_parts_done.value);
  const u32 tickets = P::template load_relaxed<Scope::device>(&state.dispatch_parts_taken.value);
  const u32 taken = routed == 0 ? 0 : minimum(tickets, routed - 1);
  SentChunk first(0, 0);
  u32 kept = 0;
  for (u32 ticket = 0; ticket < taken; ++ticket) {
    const CourierPart part = courier_part(geometry, ReadyWord(rank.memory.dispatch_list[ticket]));
    const u32 chunk = part.chunk(geometry);
    if (part.peer >= geometry.world || chunk >= geometry.chunks() ||
        !geometry.replaces_rows(chunk)) {
      continue;  // (a courier rejects a damaged word)
    }
    const u32 before = chunk - geometry.ring_chunks();
    // Relaxed: only compared.
    const u32* const back = rank.memory.chunk_back(part.peer, before);
    if (P::template load_relaxed<Scope::device>(back) != seal(call.epoch)) {
      const SentChunk its(part.peer * geometry.chunks() + before, geometry.chunk_rows);
      first = kept == 0 ? its : first;
      ++kept;
    }
  }
  return done + kept == taken ? first : SentChunk();
}

}  // namespace moeos
