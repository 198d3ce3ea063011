// What travels between ranks: row counts, chunks of rows, and credits for returned rows.
//
// The only file that writes into a peer's heap. A direct peer is stored to; a remote peer gets puts
// from this rank's staging copy (b = 0), then a signal. May not know: how rows are computed, who
// schedules.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Where this rank writes a row for `peer`: in the peer's arrival cell, or in the staging copy of a
/// remote peer.
template <Platform P>
u8* outgoing_row(const Rank<P>& rank, u32 peer, Round round, u32 row) {
  u8* direct = rank.platform.peer(peer);
  if (direct != nullptr) {
    return direct + rank.layout.write_row(rank.rank, peer, rank.rank, round, Buffer::arrival, row);
  }
  return rank.heap + rank.layout.write_row(rank.rank, rank.rank, peer, round, Buffer::staging, row);
}

/// Sends `rows` consecutive staged rows to a remote peer; nothing to do for a direct one, whose
/// rows are in place.
template <Platform P>
void send_staged(const Rank<P>& rank, u32 peer, Round round, u32 row, u32 rows) {
  if (rank.platform.peer(peer) != nullptr) {
    return;
  }
  rank.platform.put(peer,
                    rank.layout.write_row(rank.rank, peer, rank.rank, round, Buffer::arrival, row),
                    rank.heap + rank.layout.cell_row(peer, round, Buffer::staging, row),
                    u64{rows} * rank.geometry().row_bytes);
}

/// Tells `peer` how many rows its local expert gets from us in this call, zero included.
template <Platform P>
void send_count(const Rank<P>& rank, const Call& call, u32 peer, u32 local_expert, u32 rows) {
  const u64 offset = rank.layout.count(call.epoch, rank.rank, local_expert);
  const u64 word = u64{call.epoch} << 32 | rows;
  u8* direct = rank.platform.peer(peer);
  if (direct != nullptr) {
    // The word carries its own epoch and publishes nothing but itself: relaxed is enough.
    P::template store_relaxed<Scope::system>(reinterpret_cast<u64*>(direct + offset), word);
  } else {
    rank.platform.put_word(peer, offset, word);
  }
}

/// Announces a chunk whose rows this actor has written to outgoing_row.
template <Platform P>
void send_chunk(const Rank<P>& rank, const Call& call, const RoutingMap& map, u32 peer, u32 chunk,
                Tally& tally) {
  const Geometry& geometry = rank.geometry();
  const u32 first = chunk * geometry.chunk_rows;
  const u32 rows = rows_in_chunk(geometry, rank.memory.rows_sent(peer), chunk);
  const u64 flag = rank.layout.arrived(rank.rank, chunk);
  u8* direct = rank.platform.peer(peer);
  if (direct != nullptr) {
    // Publishes the chunk's rows to the peer's subscriber, which polls this word and fences.
    P::template store_release<Scope::system>(reinterpret_cast<u32*>(direct + flag), call.epoch);
  } else {
    const u32* starts = rank.memory.send_starts(peer);
    for (u32 sent = 0;
         sent <
         rows;) {  // one put for each expert's run: runs are not adjacent in the capacity map
      const RoutingMap::Place place = map.place_at(peer, first + sent);
      const u32 run = minimum(rows - sent, starts[place.local_expert + 1] - place.row);
      send_staged(rank, peer, Round::dispatch,
                  rank.layout.row(place.local_expert, place.slot, starts[place.local_expert]), run);
      sent += run;
    }
    rank.platform.signal_set(peer, flag, call.epoch);
  }
  if (peer != rank.rank) {
    tally.row_bytes_to_peers += u64{rows} * geometry.row_bytes;
    tally.flag_bytes_to_peers += sizeof(u32);
  }
}

/// Credits the owners of a tile's rows: their results are in the owners' combine cells (or staged
/// for them).
template <Platform P>
void return_rows(const Rank<P>& rank, const Task& task, Tally& tally) {
  const Geometry& geometry = rank.geometry();
  // Orders the results of every part of this tile (acquired by the part that completed it) before
  // the credits below; pairs with the owners' subscribers, which poll them and fence.
  P::template publish_fence<Scope::system>();
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment& segment = task.segments[s];
    const u32 owner = segment.source;
    const u32* starts = rank.memory.receive_starts(owner);
    // Chunks count rows in the order of arrival; the segment names rows of the cell. They differ in
    // the capacity map.
    const u32 first_of_expert = rank.layout.row(task.local_expert, 0, starts[task.local_expert]);
    const u32 first = starts[task.local_expert] + (segment.first_row - first_of_expert);
    send_staged(rank, owner, Round::combine, segment.first_row, segment.rows);
    for (u32 row = first; row < first + segment.rows;) {
      const u32 chunk = row / geometry.chunk_rows;
      const u32 rows = minimum((chunk + 1) * geometry.chunk_rows, first + segment.rows) - row;
      const u64 credit = rank.layout.returned(rank.rank, chunk);
      u8* direct = rank.platform.peer(owner);
      if (direct != nullptr) {
        P::template publish_add<Scope::system>(reinterpret_cast<u32*>(direct + credit), rows);
      } else {
        rank.platform.signal_add(owner, credit, rows);
      }
      if (owner != rank.rank) {
        tally.row_bytes_to_peers += u64{rows} * geometry.row_bytes;
        tally.flag_bytes_to_peers += sizeof(u32);
      }
      row += rows;
    }
  }
}

}  // namespace moeos
