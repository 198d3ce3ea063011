// SPDX-License-Identifier: Apache-2.0
// What the last Route part does: assigns slots to all assignments (token-expert pairs), sends
// counts to every peer, and lists Dispatch; and what replaces it in a call without tokens, which
// has no Route.
//
// Run by the warps of one processor, or of the OS block. Every rank sends its counts to every peer,
// zeros included: from them a peer knows that it has received everything (invariants 3 and 4). Must
// not depend on: how routing was computed.
#pragma once

#include "runtime/health/faults.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

/// Where a block's assignments to an expert are counted.
template <Platform P>
u32* block_base(const Rank<P>& rank, u32 block, u32 expert) {
  return rank.memory.block_base + u64{block} * rank.geometry().experts + expert;
}

/// Bytes of a rank's counts for its peers, and of the words that say which call it makes and, if it
/// sends rows, where their results begin.
constexpr u64 count_bytes(const Geometry& geometry, bool sends_rows) {
  const u32 words = sends_rows && geometry.tells_bases() ? 2 : 1;
  return (geometry.local_experts() + words) * (geometry.world - 1) * sizeof(u64);
}

/// Turns the assignments per (block, expert) into those before the block, in place, sends every
/// peer the number of rows that its experts get, and notes where these start. Returns how many
/// assignments this lane has dropped.
///
/// Each lane has one expert and goes through its blocks; neighbouring lanes have neighbouring
/// experts. It loads several blocks at once, so that loads are under way together. Counts leave
/// first: peers wait for them.
template <Platform P, class Sync>
u32 assign_slots(const Rank<P>& rank, const Call& call, Team team, Sync sync) {
  const Geometry& geometry = rank.geometry();
  const u32 blocks = route_blocks(geometry, call);
  MOEOS_CHECK(blocks > 0);
  const u32 experts = geometry.local_experts();
  // Then all experts of a peer are in one warp, whose lanes can add up their counts.
  const bool side_by_side = P::kLanes % experts == 0;
  constexpr u32 kAtOnce = 16;
  u32 dropped = 0;
  for (u32 first = team.index * P::kLanes; first < geometry.expert_places();
       first += team.count * P::kLanes) {
    const bool there = first + P::lane() < geometry.experts;
    const u32 expert = minimum(first + P::lane(), geometry.experts - 1);
    u32 pairs = 0;
    for (u32 block = 0; block < blocks; block += kAtOnce) {
      u32 in_block[kAtOnce];
      for (u32 i = 0; i < kAtOnce; ++i) {  // no conditions: one would wait for each load
        in_block[i] = *block_base(rank, minimum(block + i, blocks - 1), expert);
      }
      for (u32 i = 0; i < kAtOnce && block + i < blocks; ++i) {
        if (there) {
          *block_base(rank, block + i, expert) = pairs;
        }
        pairs += in_block[i];
      }
    }
    const u32 sent = there ? minimum(pairs, call.pair_limit) : 0;
    dropped += there ? pairs - sent : 0;
    const bool told = MOEOS_PLANTED(empty_places_have_no_counts)
                          ? there
                          : first + P::lane() < geometry.expert_places();
    const u32 place = minimum(first + P::lane(), geometry.expert_places() - 1);
    const u32 peer = geometry.owner_of(place);
    const u32 local = place % experts;
    if (told) {
      send_count(rank, call, peer, local, sent);
    }
    u32 end = sent;  // where the next expert's rows start
    if (side_by_side) {
      const u32 ends = P::inclusive_scan(sent);
      const u32 before = P::broadcast(ends, maximum(1U, P::lane() - local) - 1);
      end = ends - (P::lane() == local ? 0 : before);
    }
    if (told) {
      rank.memory.send_starts(peer)[local + 1] = end;
    }
    if (told && local == 0) {
      rank.memory.send_starts(peer)[0] = 0;
    }
  }
  P::sync_lanes();
  sync();
  if (side_by_side) {
    return dropped;
  }
  for (u32 peer = team.index; peer < geometry.world; peer += team.count) {
    u32* starts = rank.memory.send_starts(peer);
    u32 start = 0;
    for (u32 first = 0; first < experts; first += P::kLanes) {
      const u32 expert = first + P::lane();
      const u32 inclusive = P::inclusive_scan(expert < experts ? starts[expert + 1] : 0);
      if (expert < experts) {
        starts[expert + 1] = start + inclusive;
      }
      start += P::broadcast(inclusive, P::kLanes - 1);
    }
  }
  P::sync_lanes();
  sync();
  return dropped;
}

/// Gives each peer its range of this rank's results: as many rows as it gets, contiguous. One warp,
/// after assign_slots.
template <Platform P>
void place_results(const Rank<P>& rank) {
  const Geometry& geometry = rank.geometry();
  u32 placed = 0;
  for (u32 first = 0; first < geometry.world; first += P::kLanes) {
    const u32 peer = first + P::lane();
    const u32 rows = peer < geometry.world ? rank.memory.rows_sent(peer) : 0;
    const u32 ends = P::inclusive_scan(rows);
    if (peer < geometry.world) {
      rank.memory.result_first[peer] = placed + ends - rows;
    }
    placed += MOEOS_PLANTED(peers_results_share_a_place) ? 0 : P::broadcast(ends, P::kLanes - 1);
  }
}

/// Sends each peer the beginning of its range. By the warp of place_results.
template <Platform P>
void send_bases(const Rank<P>& rank, const Call& call) {
  for (u32 peer = P::lane(); peer < rank.geometry().world; peer += P::kLanes) {
    send_base(rank, call, peer, rank.memory.result_first[peer]);
  }
}

/// Lists the parts of Dispatch for the couriers that acquire `routed`. Returns how many there are.
///
/// Chunks go in groups, and groups in rounds: each round has one group for every peer that has one
/// left, the next rank first and this one last. Tiles have rows of all sources, so they are
/// complete early if all peers' rows leave side by side. With this rank's own rows first,
/// processors were idle for 60 % of the first 80 us of a call.
template <Platform P>
u32 list_dispatch(const Rank<P>& rank, const Call& call, Team team) {
  const Geometry& geometry = rank.geometry();
  // Lane i keeps the number of rows for the i-th peer from the next rank on, unless there are more
  // peers than lanes: a look at memory for each turn would take most of this function's time.
  const bool kept = geometry.world <= P::kLanes;
  const auto rows_from_memory = [&](u32 order) {
    return rank.memory.rows_sent((rank.rank + 1 + order) % geometry.world);
  };
  const u32 mine = P::lane() < geometry.world ? rows_from_memory(P::lane()) : 0;
  const auto rows_of = [&](u32 order) {
    const u32 rows = P::broadcast(mine, kept ? order : 0);
    return kept ? rows : rows_from_memory(order);
  };
  u32 chunks = 0;
  u32 turns = 0;  // rounds
  const u32 group_rows = Geometry::kChunksPerTurn * geometry.chunk_rows;
  for (u32 order = 0; order < geometry.world; ++order) {
    const u32 rows = rows_of(order);
    chunks += ceil_div(rows, geometry.chunk_rows);
    turns = maximum(turns, ceil_div(rows, group_rows));
  }
  const u32 in_quarters = geometry.rows_in_quarters(chunks);
  u32 all = 0;
  for (u32 order = 0; order < geometry.world; ++order) {
    all += geometry.dispatch_parts(in_quarters, rows_of(order));
  }
  for (u32 first = 0; first < turns * geometry.world; first += team.count * P::kLanes) {
    const u32 turn = first + team.index * P::kLanes + P::lane();
    const u32 row = turn / geometry.world;
    const u32 order = turn % geometry.world;
    u32 part = 0;  // index after the parts of the turns before this one
    for (u32 other = 0; other < geometry.world; ++other) {
      const u32 before = row + (other < order ? 1 : 0);
      part += geometry.dispatch_parts(in_quarters, minimum(rows_of(other), before * group_rows));
    }
    const u32 end = minimum((row + 1) * group_rows, rows_of(order));
    const u32 peer = (rank.rank + 1 + order) % geometry.world;
    const u32 part_rows =
        row * group_rows < in_quarters ? geometry.quarter_rows() : geometry.chunk_rows;
    for (u32 at = row * group_rows; at < end; at += part_rows, ++part) {
      MOEOS_CHECK(part < geometry.dispatch_parts_max());
      rank.memory.dispatch_list[part] =
          dispatch_word(geometry, call.epoch, peer, at, part_rows).sealed();
    }
  }
  return all;
}

/// Called by every warp of the processor that has run the last Route part; sync() is a barrier of
/// these warps: what one wrote before it the others may read after it.
template <Platform P, class Sync>
void finish_routing(const Rank<P>& rank, const Call& call, Tally& tally, Team team, Sync sync) {
  const u32 dropped = assign_slots(rank, call, team, sync);
  const Geometry& geometry = rank.geometry();
  const bool is_last = team.index == team.count - 1;
  if (geometry.tells_bases() && is_last) {
    place_results(rank);
  }
  const u32 parts = geometry.reads_in_place(call.tokens)      ? 0
                    : geometry.dispatches_tokens(call.tokens) ? geometry.token_parts(call.tokens)
                                                              : list_dispatch(rank, call, team);
  P::sync_lanes();
  sync();
  // The last warp, which has sent the fewest counts, or none: its fence waits for all that it has
  // sent.
  if (is_last && P::lane() == 0) {
    // Publishes the routing map, the rows sent to each peer, where their results lie and the list
    // of Dispatch, if there is one, to the returns subscribers and the couriers (the team has
    // synchronised on them).
    P::template store_release<Scope::device>(&rank.memory.call(call.epoch).routed.value, parts + 1);
    note<P>(tally.count_bytes_to_peers, count_bytes(geometry, true));
  }
  if (geometry.tells_bases() && is_last) {
    send_bases(rank, call);  // after `routed`, whose fence would wait for them
  }
  const u32 all_dropped = P::broadcast(P::inclusive_scan(dropped), P::kLanes - 1);
  if (P::lane() == 0) {
    note<P>(tally.dropped_pairs, all_dropped);  // the tally sums over the warps
  }
}

/// Replaces Route in a call without tokens; by a warp of the OS block. Sends every peer counts of
/// zero, and lets this rank's actors know that there is nothing to dispatch. Peers wait for these
/// counts, and no processor need claim a part to send them. False: a fault plan holds the rank
/// back, for now.
template <Platform P>
bool route_nothing(const Rank<P>& rank, const Call& call) {
  const Geometry& geometry = rank.geometry();
  MOEOS_CHECK(call.tokens == 0);
  if (is_held_back(rank, stage_of(TaskKind::route))) {
    return false;
  }
  for (u32 place = P::lane(); place < geometry.expert_places(); place += P::kLanes) {
    const u32 peer = geometry.owner_of(place);
    const u32 local = place % geometry.local_experts();
    if (!MOEOS_PLANTED(no_tokens_send_no_counts)) {
      send_count(rank, call, peer, local, 0);
    }
    u32* const starts = rank.memory.send_starts(peer);
    starts[local + 1] = 0;
    if (local == 0) {
      starts[0] = 0;
    }
  }
  P::sync_lanes();
  if (P::lane() == 0) {
    // Publishes the rows sent to each peer, none, as finish_routing does; there is no part of
    // Dispatch.
    P::template store_release<Scope::device>(&rank.memory.call(call.epoch).routed.value, 1U);
    rank.memory.os_tally().count_bytes_to_peers = count_bytes(geometry, false);
  }
  return true;
}

}  // namespace moeos
