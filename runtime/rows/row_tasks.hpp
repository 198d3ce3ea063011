// SPDX-License-Identifier: Apache-2.0
// Dispatch and Combine: which row carries which token, and which tokens sent none.
//
// Each lane looks up one row; the kernels decide what to do with rows and tokens. Must not depend
// on: queues; element types.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// An outgoing row: the assignment (pair) that it carries, its number in the cell, and the number
/// of the row that takes the token there: this row, or one before it.
struct OutgoingRow {
  u32 pair;
  u32 number;
  u32 origin;

  bool goes() const { return origin == number; }
};

/// The number in its cell of the row at `at`.
template <Platform P>
u32 number_of(const Rank<P>& rank, const RoutingMap::Place& at) {
  return rank.layout.row(at.local_expert, at.slot, at.row - at.slot);
}

/// Where the result of the row at `place` comes back, as Layout::result counts.
template <Platform P>
u32 row_of_result(const Rank<P>& rank, const RoutingMap::Place& place) {
  return rank.memory.first_result(rank.layout, place.peer) + number_of(rank, place);
}

/// Where the pair is noted that row `row`, in the order of sending to `peer`, carries.
template <Platform P>
u32* pair_of_row(const Rank<P>& rank, u32 peer, u32 row) {
  const Geometry& geometry = rank.geometry();
  return &rank.memory.row_pair[u64{peer} * geometry.chunks() * geometry.chunk_rows + row];
}

/// Notes which pair the row at `place` carries, for the returns subscriber, for Combine, and for a
/// GEMM0 that reads own rows where they are. Plain stores: the release that announces the chunk
/// publishes them along with the rows, and Combine runs because the results of these very rows came
/// back.
template <Platform P>
void note_row(const Rank<P>& rank, const RoutingMap::Place& place, u32 pair) {
  *pair_of_row(rank, place.peer, place.row) = pair;
  rank.memory.pair_row[pair] = row_of_result(rank, place);
}

/// Finds this lane's row of a part of Dispatch, row `row` in the order of sending, if there is one,
/// and notes both directions; for a peer that gets each token once, also writes the row's origin
/// there. All lanes.
template <Platform P>
OutgoingRow look_up_row(const Rank<P>& rank, const RoutingMap& map, const CourierPart& part,
                        u32 row) {
  const bool there = row < part.first + part.rows;
  const RoutingMap::Place place = map.place_at(part.peer, there ? row : part.first);
  OutgoingRow found{map.template pair_at<P>(place), number_of(rank, place), kNone};
  if (!there) {
    return found;
  }
  found.origin = found.number;
  if (rank.leaves_out(part.peer, part.cell_rows, part.chunk(rank.geometry()))) {
    found.origin = number_of(rank, map.first_place(found.pair, place));
    // Also a plain store: the peer acquires it with the chunk.
    *reinterpret_cast<u32*>(rank.platform.peer(part.peer) + rank.layout.origin(rank.rank, row)) =
        seal(found.origin);
  }
  note_row(rank, place, found.pair);
  return found;
}

/// Whether rows for a peer are copied at all: a rank that gathers its own rows does not copy them.
template <Platform P>
bool copies_rows(const Rank<P>& rank, u32 peer) {
  return !rank.geometry().gathers_own_rows() || peer != rank.rank;
}

/// The index in the order of sending of row `row` of a segment of this rank's own rows; and the
/// pair and the token of the row at such an index. They are acquired with the flag of the row's
/// chunk, as rows in cells are.
template <Platform P>
u32 own_place(const Rank<P>& rank, u32 local_expert, const Segment& segment, u32 row) {
  return first_in_order(rank, local_expert, segment) +
         (MOEOS_PLANTED(gathered_rows_are_the_first_again) ? row / 2 : row);
}
template <Platform P>
u32 own_pair(const Rank<P>& rank, u32 place) {
  return *pair_of_row(rank, rank.rank, place);
}
template <Platform P>
u32 own_token(const Rank<P>& rank, u32 place) {
  return own_pair(rank, place) / rank.geometry().top_k;
}
/// The pairs that the rows of a tile carry, one after the other; for a tile of own rows only.
/// Acquired likewise, and with GEMM0's counter.
template <Platform P>
const u32* pairs_of_tile(const Rank<P>& rank, const Task& task) {
  MOEOS_CHECK(task.segment_count == 1 && task.segments[0].source == rank.rank);
  return pair_of_row(rank, rank.rank, own_place(rank, task.local_expert, task.segments[0], 0));
}

/// The row of a pair's activations between the products (Geometry::between_by_pairs).
constexpr u32 place_between(u32 pair) {
  return MOEOS_PLANTED(pairs_share_a_place_between) ? pair & ~1U : pair;
}

/// A row of a chunk that has landed, and the row that holds its token, as numbers in the cell.
struct LandedRow {
  u32 number;
  u32 origin;

  bool came() const { return origin == number; }
};

/// Finds row `row`, in the order of sending from `source`, which sends each token once. An origin
/// that is no row ends the call; then the row counts as its own origin.
template <Platform P>
LandedRow look_up_landed(const Rank<P>& rank, const Call& call, u32 source, u32 row) {
  const Geometry& geometry = rank.geometry();
  u32 number = row;
  if (geometry.row_map == RowMap::capacity) {
    const u32* starts = rank.memory.receive_starts(source);
    const u32 local = partition_point(geometry.local_experts(),
                                      [&](u32 expert) { return starts[expert + 1] <= row; });
    number = rank.layout.row(local, row - starts[local], starts[local]);
  }
  const u32 sealed = *rank.template here<u32>(rank.layout.origin(source, row));
  // An origin after this row would not have landed yet.
  if (open(sealed) > number) {
    Failure failure = failure_of(rank, call, FailureKind::origin_damaged, Actor::processor);
    failure.peer = source;
    failure.chunk = row / geometry.chunk_rows;
    failure.seen = sealed;
    rank.fail(failure);
    return {number, number};
  }
  return {number, open(sealed)};
}

/// Counts the rows of each token of a block for the returns subscriber, and calls visit(token,
/// unsent) with one token a lane, by all lanes; `unsent`: the token has no row.
template <Platform P, class Visit>
void find_unsent(const Rank<P>& rank, const Call& call, const RoutingMap& map, u32 block,
                 Visit visit) {
  const TokenRange tokens = tokens_of_block(rank.geometry(), call, block);
  for (u32 first = tokens.first; first < tokens.end; first += P::kLanes) {
    const u32 token = first + P::lane();
    u32 rows = kNone;
    if (token < tokens.end) {
      rows = map.rows_of(token);
      // A plain store: Processor::complete publishes it at the part's end.
      rank.memory.token_rows[token] = rows;
    }
    visit(token, rows == 0);
  }
}

}  // namespace moeos
