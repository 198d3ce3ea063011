// What the last Route part does: slots for every pair, counts to every peer, and the Dispatch
// tasks.
//
// Run by one warp. Every rank sends its counts to every peer, zeros too: they are what lets a peer
// know that it has received everything (invariants 3 and 4). May not know: how routing was
// computed.
#pragma once

#include "runtime/base.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"

namespace moeos {

/// Turns the pairs per (block, expert) into pairs before the block, in place, and the rows sent to
/// each expert.
template <Platform P>
void assign_slots(const Rank<P>& rank, const Call& call, Tally& tally) {
  const Geometry& geometry = rank.geometry();
  const u32 blocks = ceil_div(call.tokens, geometry.route_tokens);
  const u32 experts = geometry.local_experts();
  u32 dropped = 0;
  for (u32 expert = P::lane(); expert < geometry.experts; expert += P::kLanes) {
    u32 pairs = 0;
    for (u32 block = 0; block < blocks; ++block) {
      u32& base = rank.memory.block_base[u64{block} * geometry.experts + expert];
      const u32 in_block = base;
      base = pairs;
      pairs += in_block;
    }
    const u32 sent = minimum(pairs, call.pair_limit);
    dropped += pairs - sent;
    rank.memory.send_starts(geometry.owner_of(expert))[expert % experts + 1] = sent;
  }
  P::sync_lanes();
  for (u32 peer = P::lane(); peer < geometry.world; peer += P::kLanes) {
    u32* starts = rank.memory.send_starts(peer);
    starts[0] = 0;
    for (u32 expert = 0; expert < experts; ++expert) {
      starts[expert + 1] += starts[expert];
    }
  }
  P::sync_lanes();
  const u32 all_dropped = P::broadcast(P::inclusive_scan(dropped), P::kLanes - 1);
  if (P::lane() == 0) {
    tally.dropped_pairs += all_dropped;
  }
}

/// Sends the counts, beginning with the next rank so that no peer is everyone's first.
template <Platform P>
void send_counts(const Rank<P>& rank, const Call& call, Tally& tally) {
  const Geometry& geometry = rank.geometry();
  for (u32 step = 1; step <= geometry.world; ++step) {
    const u32 peer = (rank.rank + step) % geometry.world;
    const u32* starts = rank.memory.send_starts(peer);
    for (u32 expert = P::lane(); expert < geometry.local_experts(); expert += P::kLanes) {
      send_count(rank, call, peer, expert, starts[expert + 1] - starts[expert], tally);
    }
  }
}

/// Posts the Dispatch tasks: chunks in order, peers in turn, so that all links are busy and every
/// peer's first tiles are complete early.
template <Platform P>
void post_dispatch(const Rank<P>& rank, const Call& call) {
  const Geometry& geometry = rank.geometry();
  u32 posted = 0;
  for (u32 group = 0; group * Geometry::kChunksPerDispatch < geometry.chunks(); ++group) {
    const u32 first_chunk = group * Geometry::kChunksPerDispatch;
    for (u32 first = 1; first <= geometry.world; first += P::kLanes) {
      const u32 step = first + P::lane();
      const u32 peer = (rank.rank + step) % geometry.world;
      const u32 chunks = ceil_div(rank.memory.rows_sent(peer), geometry.chunk_rows);
      const bool any = step <= geometry.world && first_chunk < chunks;
      const u32 place = P::inclusive_scan(any ? 1 : 0);
      if (any) {
        const u32 index = rank.memory.first_task(TaskKind::dispatch) + posted + place - 1;
        Task task{};
        task.kind = TaskKind::dispatch;
        task.parts = static_cast<u16>(minimum(Geometry::kChunksPerDispatch, chunks - first_chunk));
        task.epoch = call.epoch;
        task.peer = peer;
        task.first_chunk = first_chunk;
        rank.memory.tasks[index] = task;
        fill_slot(rank, call, TaskKind::dispatch, posted + place - 1, index, task.parts);
      }
      posted += P::broadcast(place, P::kLanes - 1);
    }
  }
}

/// Posts one Combine that writes zeros for tokens that sent no row: they would otherwise never be
/// counted.
template <Platform P>
void post_unsent(const Rank<P>& rank, const Call& call) {
  const u32 blocks = ceil_div(call.tokens, rank.geometry().route_tokens);
  if (P::lane() == 0 && call.may_be_unsent != 0 && blocks > 0) {
    const u32 index = rank.memory.combine_unsent_task();
    Task task{};
    task.kind = TaskKind::combine;
    task.parts = static_cast<u16>(blocks);
    task.epoch = call.epoch;
    task.peer = kNone;
    rank.memory.tasks[index] = task;
    post(rank, call, TaskKind::combine, index, task.parts, Actor::processor);
  }
}

template <Platform P>
void finish_routing(const Rank<P>& rank, const Call& call, Tally& tally) {
  assign_slots(rank, call, tally);
  send_counts(rank, call, tally);
  post_dispatch(rank, call);
  post_unsent(rank, call);
  P::sync_lanes();
  if (P::lane() == 0) {
    // Publishes the routing map and the rows sent to each peer to the returns subscriber and the
    // scheduler.
    P::template store_release<Scope::device>(&rank.memory.call(call.epoch).routed.value, 1U);
  }
}

}  // namespace moeos
