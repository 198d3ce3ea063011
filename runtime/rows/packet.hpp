// SPDX-License-Identifier: Apache-2.0
// What travels between ranks: row counts, chunks of rows, and credits for returned rows.
//
// The only file that moves rows into a peer's heap. For a direct peer, rows are stored there; for a
// remote peer, rows are staged in this rank's heap (b = 0) and a request is posted, which a sender
// (sender.hpp) turns into a put with a signal. Must not depend on: how rows are computed, the
// scheduler, when a request's turn comes.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// The send buffer of a row for a remote peer, until it is put.
template <Platform P>
u8* staged_row(const Rank<P>& rank, u32 peer, u32 row) {
  return rank.heap + rank.layout.staged_row(rank.memory.first_result(rank.layout, peer), row);
}

/// Where this rank writes a row for `peer`: in the peer's cell; or, for a remote peer, in the send
/// buffer: the space of the row's own result, which comes back only after the row has been read.
/// Requires the routing map.
template <Platform P>
u8* outgoing_row(const Rank<P>& rank, u32 peer, u32 row) {
  u8* direct = rank.platform.peer(peer);
  // This is tested even without remote peers: otherwise the GPU's compiler hoists too many of these
  // addresses out of its loops, and registers spill.
  if (direct != nullptr) {
    return direct + rank.layout.write_row(
                        rank.rank, peer,
                        MOEOS_PLANTED(rows_go_to_the_peers_own_cell) ? peer : rank.rank, row);
  }
  return staged_row(rank, peer, row);
}

/// Whether this rank writes a chunk's rows twice, the second time Layout::ring_bytes() further on.
/// For a remote peer the second time is a put (put_chunk).
template <Platform P>
bool writes_twice(const Rank<P>& rank, u32 peer, u32 chunk) {
  return rank.geometry().lies_twice(chunk) &&
         (!P::kRemotePeers || rank.platform.peer(peer) != nullptr);
}

/// Where the results that this rank computes for `owner` begin there, as Layout::result counts.
/// Waits for the owner's word, which the owner sends after its counts: so not for long, and no
/// longer than the call lasts; a call that ends meanwhile returns an arbitrary value. One lane;
/// others may ask for other owners.
template <Platform P>
u32 first_result_at(const Rank<P>& rank, u32 epoch, u32 owner) {
  if (!rank.geometry().tells_bases()) {
    return rank.layout.first_result(rank.rank, 0);
  }
  u32 idle = 0;
  for (;;) {
    // Relaxed, as for a count: the word carries its own epoch and publishes nothing but itself.
    const u64 word = open(P::template load_relaxed<Scope::system>(
        rank.template here<u64>(rank.layout.base(epoch, owner))));
    const u32 its = static_cast<u32>(word >> 32);
    const u32 base = static_cast<u32>(word);
    if ((its == epoch || MOEOS_PLANTED(results_go_where_old_ones_went)) &&
        base <= rank.geometry().result_rows()) {
      return base;
    }
    if (its >= epoch) {  // no rank can be that far ahead, or have so many rows
      const Call call{.epoch = epoch};
      Failure failure = failure_of(rank, call, FailureKind::count_damaged, Actor::processor);
      failure.peer = owner;
      failure.seen = word;
      rank.fail(failure);
    }
    if (rank.leaving(epoch)) {
      return 0;
    }
    P::pause(idle);
  }
}

/// Where this rank writes the result of a row that `owner` sent, its row `row` here: among the
/// owner's results; or, for a remote owner, where results are staged for a put: if that is the
/// row's own slot, all parts of GEMM0 have read the row by then. `first`: first_result_at.
template <Platform P>
u8* outgoing_result(const Rank<P>& rank, u32 owner, u32 first, u32 row) {
  u8* direct = rank.platform.peer(owner);
  if (!P::kRemotePeers || direct != nullptr) {
    return direct + rank.layout.result(first + row);
  }
  return rank.heap + rank.layout.staged_result(owner, row);
}

/// Where this rank writes the results of a segment, from its first row on; for a shared expert's
/// tile, among this rank's own results. One look at the owner's word serves all rows.
template <Platform P>
u8* outgoing_results(const Rank<P>& rank, const Task& task, const Segment& segment) {
  if (is_shared(rank.geometry(), task)) {
    return rank.heap + rank.layout.shared_result(segment.first_row);
  }
  const u32 first = first_result_at(rank, task.epoch, segment.source);
  return outgoing_result(rank, segment.source, first, segment.first_row);
}

/// Where a row that `source` sends to this rank lies here.
template <Platform P>
u8* arrived_row(const Rank<P>& rank, u32 source, u32 row) {
  return rank.heap + rank.layout.cell_row(source, row);
}

/// The row of this rank's partial sum of a token, counted through the rows of all owners.
template <Platform P>
u32 place_of_partial(const Rank<P>& rank, const Call& call, u32 token) {
  const Geometry& geometry = rank.geometry();
  const u32 owner = owner_of_token(geometry, call.tokens, token);
  const u32 nth = token - tokens_owned(geometry, call.tokens, owner).first;
  return owner * geometry.partial_rows() + rank.layout.partial_row(call.epoch, rank.slice, nth);
}

/// Where this rank writes a partial sum: at the token's owner. `place`: place_of_partial.
template <Platform P>
u8* outgoing_partial(const Rank<P>& rank, u32 place) {
  const u32 rows = rank.geometry().partial_rows();
  return rank.platform.peer(rank.peer_of_slice(place / rows)) + rank.layout.sum_at(place % rows);
}

/// Where the owner of a token writes its sum for the nth slice after its own.
template <Platform P>
u8* outgoing_total(const Rank<P>& rank, u32 nth, u32 token) {
  return rank.platform.peer(rank.peer_behind(nth)) +
         rank.layout.sum_at(rank.layout.total_row(token));
}

/// The number of rows of sums that a Combine adds up for a token.
constexpr u32 sums_of(const Geometry& geometry, Summands summands) {
  return summands == Summands::slices ? geometry.slices : 1;
}
/// The nth of these rows, as Layout::sum_at counts.
template <Platform P>
u32 sum_row(const Rank<P>& rank, const Call& call, Summands summands, u32 token, u32 nth) {
  const u32 first = tokens_owned(rank.geometry(), call.tokens, rank.slice).first;
  return summands == Summands::slices ? rank.layout.partial_row(call.epoch, nth, token - first)
                                      : rank.layout.total_row(token);
}

/// Announces a group of tokens whose partial sums this rank has sent to their owner. One lane,
/// after order_rows.
template <Platform P>
void send_partials(const Rank<P>& rank, const Call& call, u32 owner, u32 group) {
  // Publishes the group's partial sums to the owner's subscriber, which polls this word and fences.
  P::template publish<Scope::system>(
      reinterpret_cast<u32*>(rank.platform.peer(rank.peer_of_slice(owner)) +
                             rank.layout.partial_flag(call.epoch, rank.slice, group)),
      seal(call.epoch));
}

/// Announces the sums of a group of this rank's tokens to all slices. One lane, after order_rows.
template <Platform P>
void send_totals(const Rank<P>& rank, const Call& call, u32 group) {
  for (u32 nth = 1; nth < rank.geometry().slices; ++nth) {
    // Publishes the group's sums to that slice's subscriber, which polls this word and fences.
    P::template publish<Scope::system>(
        reinterpret_cast<u32*>(rank.platform.peer(rank.peer_behind(nth)) +
                               rank.layout.total_flag(call.epoch, rank.slice, group)),
        seal(call.epoch));
  }
}

/// Writes a word into `peer`'s heap. It carries its own epoch and publishes nothing but itself:
/// relaxed is enough.
template <Platform P>
void send_word(const Rank<P>& rank, u32 peer, u64 offset, u64 word) {
  u8* direct = rank.platform.peer(peer);
  if (!P::kRemotePeers || direct != nullptr) {
    P::template store_relaxed<Scope::system>(reinterpret_cast<u64*>(direct + offset), word);
  } else {
    rank.platform.put_word(peer, offset, word);
  }
}

/// Sends `peer` the number of rows that its local expert gets from us in this call, zero included.
template <Platform P>
void send_count(const Rank<P>& rank, const Call& call, u32 peer, u32 local_expert, u32 rows) {
  send_word(rank, peer, rank.layout.count(call.epoch, rank.rank, local_expert),
            count_word(call.epoch, rows));
}

/// Sends `peer` the identity of the call that this rank makes.
template <Platform P>
void send_identity(const Rank<P>& rank, const Call& call, u32 peer) {
  send_word(rank, peer, rank.layout.call_of(call.epoch, rank.everywhere(rank.rank)),
            count_word(call.epoch, call.identity));
}

/// Sends `peer` the beginning of its range among this rank's results.
template <Platform P>
void send_base(const Rank<P>& rank, const Call& call, u32 peer, u32 first) {
  send_word(rank, peer, rank.layout.base(call.epoch, rank.rank), count_word(call.epoch, first));
}

/// Orders rows, or results, that have been written before the words that announce them, which are
/// sent after it: flags (send_chunk, send_partials, send_totals), credits (return_rows), requests
/// (post_request). Pairs with the fence of each actor that polls these. `elsewhere`: some rows are
/// at other ranks; our own are on this device, for which a narrower, cheaper fence is enough.
template <Platform P>
void order_rows(bool elsewhere) {
  if (elsewhere) {
    P::template publish_fence<Scope::system>();
  } else {
    P::template publish_fence<Scope::device>();
  }
}

/// The word that asks a sender to put a chunk to the peer whose outbox it lies in.
constexpr ReadyWord chunk_word(u32 epoch, u32 chunk) {
  return ReadyWord(epoch, TaskKind::dispatch, chunk, 0);
}

/// Asks a sender to put staged rows to a remote peer: a chunk (chunk_word), or a tile's segment, as
/// `word` of its Product1 task with the segment in place of the part. One lane, after order_rows.
template <Platform P>
void post_request(const Rank<P>& rank, const Call& call, u32 peer, ReadyWord word) {
  const u32 slot =
      take_slots(rank, call, Actor::processor, rank.memory.outbox_tickets(call.epoch, peer),
                 rank.memory.outbox_slots());
  if (slot != kNone) {
    // Publishes the staged rows and, for a tile, the descriptor (acquired by this actor), with the
    // caller's fence, to the sender, which polls this word and fences.
    P::template publish<Scope::device>(&rank.memory.outbox_of(peer)[slot], word.sealed());
  }
}

/// Bytes of a flag or a credit: of a stored word, or of a signal.
template <Platform P>
constexpr u32 flag_bytes(const u8* direct) {
  return !P::kRemotePeers || direct != nullptr ? sizeof(u32) : sizeof(u64);
}

/// Announces a chunk of the rows for a peer, which this actor has written to outgoing_row or
/// acquired from the actors that have, or has a sender put them; after order_rows. Returns the
/// bytes of the flag if it goes to another rank. One lane.
template <Platform P>
u32 send_chunk(const Rank<P>& rank, const Call& call, u32 peer, u32 chunk) {
  u8* direct = rank.platform.peer(peer);
  if (!P::kRemotePeers || direct != nullptr) {
    // Publishes the chunk's rows, with order_rows, to the peer's subscribers and processors, which
    // poll this word and fence.
    P::template publish<Scope::system>(
        reinterpret_cast<u32*>(direct + rank.layout.arrived(rank.rank, chunk)), seal(call.epoch));
  } else {
    post_request(rank, call, peer, chunk_word(call.epoch, chunk));
  }
  return peer == rank.rank ? 0 : flag_bytes<P>(direct);
}

/// Counts rows that are sent to a peer. One lane, before their chunk is announced, so that the
/// number is there when the call ends (Scheduler::interrupt).
template <Platform P>
void count_carried(const Rank<P>& rank, const Call& call, u32 peer, u32 rows) {
  // Relaxed: a number to be reported.
  P::template count_relaxed<Scope::device>(rank.memory.rows_carried(call.epoch, peer), rows);
}

/// Notes that `rows` of the `rows_sent` rows for a peer, all of one chunk, have been written; true
/// if they are its last ones: then the chunk must be announced. One lane, after every write of
/// these rows.
template <Platform P>
bool completes_chunk(const Rank<P>& rank, u32 peer, u32 rows_sent, u32 chunk, u32 rows) {
  const Geometry& geometry = rank.geometry();
  u32* const done = &rank.memory.chunk_rows_done[u64{peer} * geometry.chunks() + chunk];
  return lane_completes<P>(done, rows, rows_in_chunk(geometry, rows_sent, chunk));
}

/// Counts a part of Dispatch that is done. One lane.
template <Platform P>
void count_dispatch(const Rank<P>& rank, const Call& call) {
  // Relaxed: a number by which the scheduler sees whether links are still in use, and the returns
  // subscribers, when results are late, whether we have sent everything.
  P::template count_relaxed<Scope::device>(&rank.memory.call(call.epoch).dispatch_parts_done.value,
                                           1U);
}

/// Puts a chunk's staged rows, twice if they also lie after the ring, then its flag, to a remote
/// peer. One warp.
template <Platform P>
void put_chunk(const Rank<P>& rank, const Call& call, const RoutingMap& map, u32 peer, u32 chunk) {
  const Geometry& geometry = rank.geometry();
  const u32 rows = rows_in_chunk(geometry, rank.memory.rows_sent(peer), chunk);
  const u32* starts = rank.memory.send_starts(peer);
  for (u32 sent = 0; sent < rows;) {
    const RoutingMap::Place place = map.place_at(peer, chunk * geometry.chunk_rows + sent);
    // In the capacity map experts' rows are not adjacent, and each expert's run is a put; or each
    // row, where staged rows have gaps between them.
    const u32 adjacent = geometry.stages_apart() ? 1 : starts[place.local_expert + 1] - place.row;
    const u32 run =
        geometry.row_map == RowMap::ragged ? rows - sent : minimum(rows - sent, adjacent);
    const u32 row = rank.layout.row(place.local_expert, place.slot, starts[place.local_expert]);
    const u64 to = rank.layout.write_row(rank.rank, peer, rank.rank, row);
    const u8* from = staged_row(rank, peer, row);
    const u64 bytes = u64{run} * geometry.sent_bytes;
    if (sent + run < rows) {
      rank.platform.put(peer, to, from, bytes);
    } else {
      const bool twice = geometry.lies_twice(chunk);
      if (twice) {
        rank.platform.put(peer, to + rank.layout.ring_bytes(), from, bytes);
      }
      if ((sent > 0 || twice) && !MOEOS_PLANTED(flag_overtakes_earlier_runs)) {
        rank.platform.order_puts();  // the flag speaks for what was put before, too
      }
      rank.platform.put_signal(peer, to, from, bytes, rank.layout.arrived(rank.rank, chunk),
                               SignalOp::set, seal(call.epoch));
    }
    sent += run;
  }
}

/// The first row of a segment in the order of arrival, in which chunks count rows. The segment
/// names rows of the cell, and the two differ in the capacity map.
template <Platform P>
u32 first_in_order(const Rank<P>& rank, u32 local_expert, const Segment& segment) {
  if (rank.geometry().row_map == RowMap::ragged) {
    return segment.first_row;
  }
  const u32 start = rank.memory.receive_starts(segment.source)[local_expert];
  return start + (segment.first_row - rank.layout.row(local_expert, 0, start));
}

/// Calls visit(offset in the segment, chunk of the owner's, rows) for each run of a segment's rows
/// that lies in one chunk.
template <Platform P, class Visit>
void for_each_run(const Rank<P>& rank, u32 local_expert, const Segment& segment, Visit visit) {
  const u32 chunk_rows = rank.geometry().chunk_rows;
  const u32 first = first_in_order(rank, local_expert, segment);
  for (u32 row = first; row < first + segment.rows;) {
    const u32 chunk = row / chunk_rows;
    const u32 rows = minimum((chunk + 1) * chunk_rows, first + segment.rows) - row;
    visit(row - first, chunk, rows);
    row += rows;
  }
}

/// What return_rows has done.
struct Returned {
  u32 rows;        // rows whose results have left
  u64 row_bytes;   // bytes of results for other ranks
  u64 flag_bytes;  // bytes of their credits
};

/// Credits the owners of a tile's rows, whose results have been written among the owners', or has a
/// sender put them. One lane.
template <Platform P>
Returned return_rows(const Rank<P>& rank, const Call& call, const Task& task, ReadyWord word) {
  Returned returned{task.rows, 0, 0};
  // Orders the results of every part of this tile: acquired by the part that completed it.
  order_rows<P>(rank.geometry().world > 1);
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment& segment = task.segments[s];
    const u32 owner = segment.source;
    u8* direct = rank.platform.peer(owner);
    if (P::kRemotePeers && direct == nullptr) {
      returned.rows -= segment.rows;
      post_request(rank, call, owner, word.with_part(s));
    }
    for_each_run(rank, task.local_expert, segment, [&](u32, u32 chunk, u32 rows) {
      if (!P::kRemotePeers || direct != nullptr) {
        const u64 credit = rank.layout.returned(rank.rank, chunk);
        // Publishes the results, with order_rows, to the owner's subscribers and processors, which
        // poll this word and fence.
        P::template publish_add<Scope::system>(reinterpret_cast<u32*>(direct + credit), seal(rows));
      }
      if (owner != rank.rank) {
        returned.row_bytes += u64{rows} * rank.geometry().returned_bytes;
        returned.flag_bytes += flag_bytes<P>(direct);
      }
    });
  }
  return returned;
}

/// Puts the staged results of a segment of an expert's tile, and the credits for them, to their
/// remote owner. One warp.
template <Platform P>
void put_results(const Rank<P>& rank, u32 epoch, u32 local_expert, const Segment& segment) {
  const u32 owner = segment.source;
  const u32 first = first_result_at(rank, epoch, owner);
  if (agreed<P>(rank.leaving(epoch))) {
    return;  // `first` is arbitrary: the owner's call would end well with results in wrong rows
  }
  const u8* staged = rank.heap + rank.layout.staged_result(owner, segment.first_row);
  for_each_run(rank, local_expert, segment, [&](u32 offset, u32 chunk, u32 rows) {
    rank.platform.put_signal(owner, rank.layout.result(first + segment.first_row + offset),
                             staged + u64{offset} * rank.geometry().returned_bytes,
                             u64{rows} * rank.geometry().returned_bytes,
                             rank.layout.returned(rank.rank, chunk), SignalOp::add, seal(rows));
  });
}

}  // namespace moeos
