// SPDX-License-Identifier: Apache-2.0
// Dispatch: the courier warp copies tokens' rows through buffers of its own, to memory here or at a
// peer, while the rest of its block computes; and rows that have come, to other rows of their
// tokens.
//
// In a call of few tokens it has its tokens' rows in the buffers before they are routed
// (token_dispatch.hpp).
//
// Links are slow and far: they stay busy if every block always has a few copies under way. A parcel
// is what one buffer holds: some rows, or a piece of one. Loads run ahead of stores, across the
// parcels of a part of Dispatch. Must not depend on: flags; the other warps of the block.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/actors/courier.hpp"
#include "runtime/record/trace.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/rows/token_dispatch.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

// The size of a parcel: several whole rows, or a number of bytes of one.
inline constexpr u32 kPiecesOfRow = ceil_div(kGeometry.sent_bytes, Parcels::kBufferBytes);
inline constexpr u32 kParcelRows =
    minimum(kGeometry.chunk_rows, maximum(1U, Parcels::kBufferBytes / kGeometry.sent_bytes));
inline constexpr u32 kParcelBytes =
    align_up(ceil_div(kGeometry.sent_bytes, kPiecesOfRow), 16U);  // of each row
static_assert(kParcelRows * kParcelBytes <= Parcels::kBufferBytes);
static_assert(kGeometry.chunk_rows <= Machine::kLanes, "a lane looks up one row of a chunk");
static_assert(!kAltersRows || kGeometry.dispatch_tokens == 0,
              "rows dispatched by token are loaded before they are altered");
static_assert(kGeometry.dispatch_tokens * kGeometry.top_k <= Machine::kLanes,
              "a lane looks up one pair of the tokens of a part");

/// Copies rows through the block's parcels. Every function is called by the whole warp.
class ParcelLine {
 public:
  ParcelLine(const RankArguments& arguments, Shared& shared)
      : arguments_(arguments), shared_(shared) {}

  /// Copies a row of `sent_bytes` bytes for each of the first `rows` lanes, from `source` to
  /// `destination`; each lane copies its own row's share of each parcel. When it returns, the rows
  /// are stored.
  void copy(const u8* source, u64 destination, u32 rows) {
    const u32 parcels = parcels_of(rows);
    for (u32 next = 0; next < parcels + kAhead; ++next) {
      if (next < parcels) {
        // This buffer's previous parcel was stored kBuffers - kAhead stores ago; only later stores
        // may still read their buffers, and no store of the copy before does.
        wait_until_read<kBuffers - kAhead - 1>();
        __syncwarp();
        const Part part = part_of(next, rows, Machine::lane());
        expect(part.all_bytes);
        load(part, source, part.bytes);
      }
      if (next >= kAhead) {
        store(part_of(next - kAhead, rows, Machine::lane()), destination);
      }
    }
    wait_until_stored();
    __syncwarp();
  }

  /// Begins to load `rows` contiguous rows at `source`, as many as there are buffers for. Must be
  /// followed by spread() with the same rows, or by drop().
  void begin(const u8* source, u32 rows) {
#pragma unroll 1
    for (u32 next = 0; next < minimum(kBuffers, parcels_of(rows)); ++next) {
      load_together(next, source, rows);
    }
  }

  /// Stores row `row` of these to this lane's `destination`, if that is not 0.
  void spread(const u8* source, u32 rows, u32 row, u64 destination) {
#pragma unroll 1
    for (u32 next = 0; next < parcels_of(rows); ++next) {
      Part part = part_of(next, rows, row);
      part.bytes = destination == 0 ? 0 : part.bytes;
      store(part, destination);
      if (next + kBuffers < parcels_of(rows)) {
        wait_until_read<0>();
        __syncwarp();
        load_together(next + kBuffers, source, rows);
      }
    }
    wait_until_stored();
    __syncwarp();
  }

  /// Waits for what begin() has asked for: the block must not leave its shared memory to another
  /// before.
  void drop(u32 rows) {
#pragma unroll 1
    for (u32 next = 0; next < minimum(kBuffers, parcels_of(rows)); ++next) {
      wait_until_loaded();
      stored_.advance();
    }
  }

 private:
  static constexpr u32 kBuffers = Parcels::kBuffers;
  static constexpr u32 kAhead = kBuffers - 1;  // parcels by which loads run ahead of stores

  static constexpr u32 parcels_of(u32 rows) { return ceil_div(rows, kParcelRows) * kPiecesOfRow; }

  /// A row's share of a parcel: some of its bytes, or none if the row is in other parcels.
  struct Part {
    u32 first_byte;  // of the row
    u32 bytes;
    u32 first_row;  // of the parcel
    u32 all_bytes;  // of the parcel
    u32 place;      // in the buffer
  };
  static Part part_of(u32 parcel, u32 rows, u32 row) {
    const u32 first_row = parcel / kPiecesOfRow * kParcelRows;
    const u32 first_byte = parcel % kPiecesOfRow * kParcelBytes;
    const u32 bytes = minimum(kParcelBytes, kGeometry.sent_bytes - first_byte);
    const u32 end = minimum(rows, first_row + kParcelRows);
    const bool there = row >= first_row && row < end;
    return {first_byte, there ? bytes : 0, first_row, (end - first_row) * bytes,
            there ? (row - first_row) * kParcelBytes : 0};
  }

  void wait_until_loaded() {
    wait_watched(rank_of_look(arguments_), shared_.call, shared_.parcels.full[stored_.index],
                 stored_.parity);
  }
  void expect(u32 bytes) {
    if (Machine::lane() == 0) {
      shared_.parcels.full[loaded_.index].arrive_expecting(bytes);
    }
    __syncwarp();
  }
  /// Loads `bytes` bytes of the next parcel, if that is not 0, from a lane's share on.
  void load(const Part& part, const u8* source, u32 bytes) {
    if (bytes != 0) {
      load_bytes(source + part.first_byte, shared_.parcels.buffers[loaded_.index] + part.place,
                 bytes, shared_.parcels.full[loaded_.index]);
    }
    loaded_.advance();
  }
  /// Loads a parcel of contiguous rows: all of it at once.
  void load_together(u32 parcel, const u8* source, u32 rows) {
    static_assert(kParcelRows == 1 || kParcelBytes == kGeometry.sent_bytes);
    const Part part = part_of(parcel, rows, 0);  // whose place is the buffer's beginning
    expect(part.all_bytes);
    load(part, source + u64{part.first_row} * kGeometry.sent_bytes,
         Machine::lane() == 0 ? part.all_bytes : 0);
  }

  void store(const Part& part, u64 destination) {
    wait_until_loaded();
    if (part.bytes != 0) {
      store_bytes(shared_.parcels.buffers[stored_.index] + part.place,
                  destination + part.first_byte, part.bytes);
    }
    commit_stores();  // also in lanes without stores, so that all count the same groups
    stored_.advance();
  }

  const RankArguments& arguments_;
  Shared& shared_;
  RingPosition<kBuffers> loaded_;
  RingPosition<kBuffers> stored_;
};

/// A row that a lane has to copy.
struct Copy {
  bool wanted = false;
  const u8* source = nullptr;
  u64 destination = 0;

  /// Gives the first lanes the copies that are wanted, in their order; returns how many. Where a
  /// token has a row for each expert, the first lanes already have them.
  u32 gather() {
    const u32 all = Machine::ballot(wanted);
    if constexpr (!kGeometry.deduplicates_any()) {
      return Machine::count(all);
    }
    const u32 places = MOEOS_PLANTED(rows_go_where_others_stay)
                           ? Machine::lane() + 1
                           : Machine::lanes_before(all) + wanted;
    const u32 from = lane_with<Machine>(places, Machine::lane());
    source = reinterpret_cast<const u8*>(Machine::broadcast(reinterpret_cast<u64>(source), from));
    destination = Machine::broadcast(destination, from);
    return Machine::count(all);
  }
};

/// The rows that are sent for tokens: x, unless Route makes others of it (sent_rows.cuh).
inline const u8* sent_rows(const RankArguments& arguments) {
  return kAltersRows ? arguments.out : arguments.x_rows;
}

/// The copy of this lane's row in a part of Dispatch, to its peer, or for a remote peer to the send
/// buffer.
inline Copy outgoing_copy(const RankArguments& arguments, const Rank<Machine>& rank,
                          const Call& call, const CourierPart& part) {
  const RoutingMap map(kGeometry, rank.memory, call);
  const OutgoingRow row = look_up_row(rank, map, part, part.first + Machine::lane());
  return {row.goes() && copies_rows(rank, part.peer),
          sent_rows(arguments) + u64{row.pair / kGeometry.top_k} * kGeometry.row_bytes,
          reinterpret_cast<u64>(outgoing_row(rank, part.peer, row.number))};
}

/// Whether no row is copied: a rank alone reads its rows where they are.
inline constexpr bool kCopiesNone = kGeometry.world == 1 && kGeometry.gathers_own_rows();

/// Runs a courier through a call of few tokens. Leaves early if the call has failed.
inline void run_token_dispatch(const RankArguments& arguments, const Call& call, u32 actor,
                               ParcelLine& line) {
  Rank<Machine> rank = rank_of_look(arguments);
  const RoutingMap map(kGeometry, rank.memory, call);
  Trace<Machine> trace(rank, actor);
  TokenDispatch<Machine> by_token(rank, call, actor);
  TokenRange tokens;
  while (by_token.take(tokens)) {
    const u32 rows = tokens.end - tokens.first;
    const u8* source = arguments.x_rows + u64{tokens.first} * kGeometry.row_bytes;
    const u32 copied = kCopiesNone ? 0 : rows;
    line.begin(source, copied);
    // This wait is bounded by the scheduler's watch (os.hpp, run_watcher).
    u32 idle = 0;
    bool leave = false;
    while (!leave && !by_token.routed()) {
      leave = must_leave(rank, call);
      Machine::pause(idle);
    }
    if (leave || !by_token.begin_part()) {
      line.drop(copied);
      return;
    }
    rank = rank_of_look(arguments);
    u64 begun_ns = Machine::now_ns();
    const u32 nth = Machine::lane() / kGeometry.top_k;  // of the part's tokens
    const u32 pair = tokens.first * kGeometry.top_k + Machine::lane();
    const TokenRow row = by_token.look_up(map, pair, nth < rows);
    begun_ns += wait_for_links(rank, call, [&](u32 peer) {
      return u64{Machine::count(Machine::ballot(row.goes && row.peer == peer))} *
             kGeometry.sent_bytes;
    });
    line.spread(source, copied, nth,
                row.goes && copies_rows(rank, row.peer)
                    ? reinterpret_cast<u64>(outgoing_row(rank, row.peer, row.number))
                    : 0);
    const u64 stored_ns = Machine::now_ns();
    const TokenChunk chunk = by_token.count(row);
    by_token.end_part(stored_ns - begun_ns);
    if constexpr (kTraced) {
      TraceEvent event = event_of_token_row(row, chunk, pair);
      event.begin_ns = begun_ns;
      event.end_ns = Machine::now_ns();
      event.stored = since_begin(event, stored_ns);
      if (Machine::lanes_before(Machine::ballot(chunk.rows > 0)) > 0) {
        event.begin_ns = stored_ns - 1;  // the first event has the time of all
        event.stored = 1;
      }
      trace.note_each(event, chunk.rows > 0);
    }
  }
}

/// The copy of this lane's row in a chunk whose source sends each token once.
inline Copy landed_copy(const Rank<Machine>& rank, const Call& call, const CourierPart& part) {
  if (Machine::lane() >= part.rows) {
    return {};
  }
  const LandedRow row = look_up_landed(rank, call, part.peer, part.first + Machine::lane());
  return {!row.came(), arrived_row(rank, part.peer, row.origin),
          reinterpret_cast<u64>(arrived_row(rank, part.peer, row.number))};
}

/// The courier warp: parts of Dispatch and chunks to complete, until there are no more, or the call
/// is over.
inline void run_courier(const RankArguments& arguments, u32 index, Shared& shared) {
  const Call& call = shared.call;
  const u32 actor = kGeometry.processors + index;
  ParcelLine line(arguments, shared);
  if constexpr (kGeometry.dispatch_tokens != 0) {
    run_token_dispatch(arguments, call, actor, line);
  }
  Rank<Machine> rank = rank_of_look(arguments);
  Trace<Machine> trace(rank, actor);
  trace.resume();
  Courier<Machine> courier(rank, call, actor);
  CourierPart part;
  u32 idle = 0;
  for (; !courier.over(); rank = rank_of_look(arguments)) {
    if (!courier.take(part)) {
      // This wait is bounded by the scheduler's watch (os.hpp, run_watcher).
      if (must_leave(rank, call)) {
        return;
      }
      Machine::pause(idle);
      continue;
    }
    Machine::rest(idle);
    u64 begun_ns = Machine::now_ns();
    Copy copy =
        part.sends() ? outgoing_copy(arguments, rank, call, part) : landed_copy(rank, call, part);
    const u32 rows = copy.gather();
    courier.begin(part, rows);
    begun_ns += wait_for_links(rank, call, [&](u32 peer) {
      return part.sends() && peer == part.peer ? u64{rows} * kGeometry.sent_bytes : 0;
    });
    const u32 chunk = part.chunk(kGeometry);
    if (!part.sends() || kAltersRows || kGeometry.replaces_rows(chunk)) {
      // Rows that peers, or Route, have written, acquired with the part, are read through the async
      // proxy. Or rows that a peer has read are overwritten through it.
      fence_proxy_async();
    }
    line.copy(copy.source, copy.destination, rows);
    if (part.sends() && writes_twice(rank, part.peer, chunk)) {
      line.copy(copy.source, copy.destination + rank.layout.ring_bytes(), rows);
    }
    const u64 stored_ns = Machine::now_ns();
    const bool announced = courier.complete(part, rows, stored_ns - begun_ns);
    if (kTraced && Machine::lane() == 0) {
      TraceEvent event = event_of(kGeometry, part, rows, announced);
      event.begin_ns = begun_ns;
      event.end_ns = Machine::now_ns();
      event.stored = since_begin(event, stored_ns);
      trace.note(event);
    }
  }
}

}  // namespace moeos::sm90
