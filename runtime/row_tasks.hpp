// Dispatch and Combine: the tasks that move rows, as loops over the routing map.
//
// Shared by one or more warps (a team): each takes an equal run of the chunk's rows, and each lane
// looks up one row at a time, because a look-up is a chain of dependent loads. The rows themselves
// are moved by the kernels, a whole warp for one row. May not know: queues; element types.
#pragma once

#include "runtime/base.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"

namespace moeos {

/// One of the warps that share a part.
struct Team {
  u32 index;
  u32 count;
};

/// What a warp does with one row; called by all its lanes.
template <class K>
concept RowKernels = requires(K& kernels, u32 token, u8* destination) {
  kernels.copy_row(token, destination);  // the token's row of x, to its place in a cell
  kernels.combine(token);  // a token whose rows are all back, or that sent none, to its output row
};

/// Copies the rows of one chunk to the cell of the rank that owns their experts (or to the staging
/// copy).
template <Platform P, RowKernels K>
void copy_chunk(const Rank<P>& rank, const RoutingMap& map, K& kernels, u32 peer, u32 chunk,
                Team team) {
  const Geometry& geometry = rank.geometry();
  const u32 rows = rows_in_chunk(geometry, rank.memory.rows_sent(peer), chunk);
  const u32 share = ceil_div(rows, team.count);
  const u32 end = minimum(rows, (team.index + 1) * share);
  for (u32 first = team.index * share; first < end; first += P::kLanes) {
    u32 token = 0;
    u64 destination = 0;
    if (first + P::lane() < end) {
      const u32 row = chunk * geometry.chunk_rows + first + P::lane();
      const RoutingMap::Place place = map.place_at(peer, row);
      token = map.pair_at(place) / geometry.top_k;
      destination = reinterpret_cast<u64>(
          outgoing_row(rank, peer, Round::dispatch,
                       rank.layout.row(place.local_expert, place.slot, place.row - place.slot)));
    }
    for (u32 i = 0; i < minimum(P::kLanes, end - first); ++i) {
      kernels.copy_row(P::broadcast(token, i), reinterpret_cast<u8*>(P::broadcast(destination, i)));
    }
  }
}

/// Combines the tokens of the lanes whose `ready` is set; returns how many there were.
template <Platform P, RowKernels K>
u32 combine_ready(K& kernels, u32 token, bool ready) {
  P::sync_lanes();  // what the lanes have acquired, all lanes may read
  const u32 lanes = P::ballot(ready);
  u32 combined = 0;
  for (u32 i = 0; i < P::kLanes; ++i) {
    if ((lanes >> i & 1U) != 0) {
      kernels.combine(P::broadcast(token, i));
      ++combined;
    }
  }
  return combined;
}

/// Counts every row of a returned chunk for its token; whoever counts a token's last row sums it.
/// Returns the number of tokens combined by this warp.
template <Platform P, RowKernels K>
u32 combine_chunk(const Rank<P>& rank, const RoutingMap& map, K& kernels, u32 peer, u32 chunk,
                  Team team) {
  const Geometry& geometry = rank.geometry();
  const u32 rows = rows_in_chunk(geometry, rank.memory.rows_sent(peer), chunk);
  const u32 share = ceil_div(rows, team.count);
  const u32 end = minimum(rows, (team.index + 1) * share);
  u32 combined = 0;
  for (u32 first = team.index * share; first < end; first += P::kLanes) {
    u32 token = 0;
    bool last = false;
    if (first + P::lane() < end) {
      const u32 row = chunk * geometry.chunk_rows + first + P::lane();
      token = map.pair_at(map.place_at(peer, row)) / geometry.top_k;
      u32* seen = &rank.memory.rows_seen[token];
      // Acquire-release: publishes that this row is here (acquired through the ring), and gives the
      // one who counts the last row all of the token's rows.
      last = P::template add_acquire_release<Scope::device>(seen, 1U) + 1 == map.rows_of(token);
      if (last) {
        // For the next call; nobody else counts this token in this one.
        P::template store_relaxed<Scope::device>(seen, 0U);
      }
    }
    combined += combine_ready<P>(kernels, token, last);
  }
  return combined;
}

/// Combines the tokens of a block that sent no row at all: their output is zero.
template <Platform P, RowKernels K>
u32 combine_unsent(const Rank<P>& rank, const Call& call, const RoutingMap& map, K& kernels,
                   u32 block, Team team) {
  const Geometry& geometry = rank.geometry();
  const u32 end = minimum(call.tokens, (block + 1) * geometry.route_tokens);
  u32 combined = 0;
  for (u32 first = block * geometry.route_tokens + team.index * P::kLanes; first < end;
       first += team.count * P::kLanes) {
    const u32 token = first + P::lane();
    combined += combine_ready<P>(kernels, token, token < end && map.rows_of(token) == 0);
  }
  return combined;
}

}  // namespace moeos
