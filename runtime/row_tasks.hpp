// Dispatch and Combine: which row carries which token, and which tokens a part writes.
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
  const Geometry& geometry = rank.geometry();
  rank.memory.row_pair[u64{peer} * geometry.chunks() * geometry.chunk_rows + row] = found.pair;
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

/// Counts the rows of a block of tokens for the returns subscriber, and calls visit(token, unsent)
/// with one token a lane, by all lanes; `unsent`: it has none.
template <Platform P, class Visit>
void find_unsent(const Rank<P>& rank, const Call& call, const RoutingMap& map, u32 block,
                 Visit visit) {
  const Geometry& geometry = rank.geometry();
  const u32 end = minimum(call.tokens, (block + 1) * geometry.route_tokens);
  for (u32 first = block * geometry.route_tokens; first < end; first += P::kLanes) {
    const u32 token = first + P::lane();
    u32 rows = kNone;
    if (token < end) {
      rows = map.rows_of(token);
      // A plain store: the part's end publishes it (Processor::complete).
      rank.memory.token_rows[token] = rows;
    }
    visit(token, rows == 0);
  }
}

/// Calls visit(token, exists) for the tokens that a Combine part writes, one a lane, by all lanes.
template <Platform P, class Visit>
void for_each_token(const Rank<P>& rank, const Call& call, const RoutingMap& map, const Task& task,
                    Visit visit) {
  if (task.rows == 0) {
    find_unsent(rank, call, map, task.first_ready, visit);
    return;
  }
  for (u32 first = 0; first < task.rows; first += P::kLanes) {
    const u32 place = first + P::lane();
    const bool exists = place < task.rows;
    // Acquired with the part's word.
    visit(exists ? rank.memory.ready_tokens[task.first_ready + place] : 0, exists);
  }
}

}  // namespace moeos
