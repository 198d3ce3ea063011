// Dispatch and Combine: which row carries which token, and which tokens are complete.
//
// Each lane looks up one row; what is then done with rows and tokens is the kernels' affair. May
// not know: queues; element types.
#pragma once

#include "runtime/base.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// A row on its way out: the pair that it carries, and its number in the cell.
struct OutgoingRow {
  u32 pair;
  u32 number;
};

/// Finds row `row`, in the order of sending to `peer`, and notes both directions for Combine.
///
/// The notes are plain stores: what announces the chunk releases them along with the rows, and
/// Combine runs because the results of these very rows came back.
template <Platform P>
OutgoingRow look_up_row(const Rank<P>& rank, const RoutingMap& map, u32 peer, u32 row) {
  const RoutingMap::Place place = map.place_at(peer, row);
  const OutgoingRow found{map.pair_at(place),
                          rank.layout.row(place.local_expert, place.slot, place.row - place.slot)};
  rank.memory.row_pair[u64{peer} * rank.geometry().cell_rows_used() + row] = found.pair;
  rank.memory.pair_row[found.pair] =
      rank.layout.row_index(peer, Round::combine, Buffer::arrival, found.number);
  return found;
}

/// The number in its cell of row `row` in the order of sending to `peer`.
template <Platform P>
u32 row_number(const Rank<P>& rank, const RoutingMap& map, u32 peer, u32 row) {
  if (rank.geometry().row_map == RowMap::ragged) {
    return row;
  }
  const RoutingMap::Place place = map.place_at(peer, row);
  return rank.layout.row(place.local_expert, place.slot, place.row - place.slot);
}

/// The pairs that the rows of a chunk carry, in their order.
template <Platform P>
const u32* pairs_of_chunk(const Rank<P>& rank, u32 peer, u32 chunk) {
  return rank.memory.row_pair + u64{peer} * rank.geometry().cell_rows_used() +
         u64{chunk} * rank.geometry().chunk_rows;
}

/// Counts every row of a returned chunk for its token: calls visit(token, ready) with one row a
/// lane until all rows have been counted, by all lanes; ready says that it was the token's last
/// row.
template <Platform P, class Visit>
void count_returned(const Rank<P>& rank, const RoutingMap& map, u32 peer, u32 chunk, Visit visit) {
  const Geometry& geometry = rank.geometry();
  const u32 rows = rows_in_chunk(geometry, rank.memory.rows_sent(peer), chunk);
  const u32* pairs = pairs_of_chunk(rank, peer, chunk);
  for (u32 first = 0; first < rows; first += P::kLanes) {
    u32 token = 0;
    bool last = false;
    if (first + P::lane() < rows) {
      token = pairs[first + P::lane()] / geometry.top_k;
      u32* seen = &rank.memory.rows_seen[token];
      // Publishes that this row is here: acquired through the ring, by a fence that stands before
      // this add as well as behind that word.
      last = P::template publish_add<Scope::device>(seen, 1U) + 1 == map.rows_of(token);
      if (last) {
        // For the next call; nobody else counts this token in this one.
        P::template store_relaxed<Scope::device>(seen, 0U);
      }
    }
    if (P::ballot(last) != 0) {
      // Gives those who counted a last row all of the token's rows, which others have counted.
      P::template acquire_fence<Scope::device>();
    }
    P::sync_lanes();  // what a lane has acquired, all lanes may read
    visit(token, last);
  }
}

/// The same for the tokens of a block that sent no row at all: nothing returns for them.
template <Platform P, class Visit>
void find_unsent(const Rank<P>& rank, const Call& call, const RoutingMap& map, u32 block,
                 Visit visit) {
  const Geometry& geometry = rank.geometry();
  const u32 end = minimum(call.tokens, (block + 1) * geometry.route_tokens);
  for (u32 first = block * geometry.route_tokens; first < end; first += P::kLanes) {
    const u32 token = first + P::lane();
    visit(token, token < end && map.rows_of(token) == 0);
  }
}

/// Calls visit(token, ready) for all candidates of a Combine part; the ready ones are combined.
template <Platform P, class Visit>
void for_each_candidate(const Rank<P>& rank, const Call& call, const RoutingMap& map,
                        const Task& task, u32 part, Visit visit) {
  if (task.peer != kNone) {
    count_returned(rank, map, task.peer, task.first_chunk, visit);
  } else {
    find_unsent(rank, call, map, part, visit);
  }
}

}  // namespace moeos
