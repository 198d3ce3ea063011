// SPDX-License-Identifier: Apache-2.0
// Dispatch of a call of few tokens: a token's rows go to all of its experts at once.
//
// With many tokens, parts are rows in the order of sending, so that tiles are complete early
// (courier.hpp). Few tokens' rows leave together in any order, and what counts is how soon they do.
// So a courier takes tokens, which it knows and may read before they are routed; then it looks up
// where their rows go in two round trips to memory, where the way from a row to its token takes
// twice as many, and the end of Route has nothing to list. Must not depend on: how rows are copied.
#pragma once

#include "runtime/health/faults.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/record/trace_event.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"

namespace moeos {

/// Where an assignment's row goes, in a call dispatched by token; nowhere, if it has none.
struct TokenRow {
  bool goes = false;
  u32 peer = 0;
  u32 number = 0;     // in the cell
  u32 chunk = 0;      // of the rows for that peer
  u32 rows_sent = 0;  // to that peer
};

/// What a lane reports of the chunk that its row is in.
struct TokenChunk {
  u32 rows;        // of the part; 0: another lane reports the chunk, or there is none
  bool announced;  // these were its last ones
};

/// The courier of such a call. Every function is called by one warp, one assignment a lane.
template <Platform P>
class TokenDispatch {
 public:
  /// `actor`: as for Courier.
  TokenDispatch(const Rank<P>& rank, const Call& call, u32 actor)
      : rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        tally_(rank.memory.tallies[actor]),
        all_taken_(!rank.geometry().dispatches_tokens(call.tokens) ||
                   rank.geometry().reads_in_place(call.tokens)) {}

  /// Takes the next part: its tokens, which may not be routed yet. False: there is none left.
  bool take(TokenRange& tokens) {
    if (all_taken_) {
      return false;
    }
    // Relaxed: a ticket publishes nothing.
    const u32 part = by_one_lane<P>([this] {
      return P::template add_relaxed<Scope::device>(&state_.dispatch_parts_taken.value, 1U);
    });
    const u32 each = rank_.geometry().tokens_of_part(call_.tokens);
    tokens = {minimum(call_.tokens, part * each), minimum(call_.tokens, (part + 1) * each)};
    all_taken_ = tokens.first == tokens.end;
    return !all_taken_;
  }

  /// Whether it is known where tokens go. Never waits.
  bool routed() {
    if (!routed_) {
      routed_ = agreed<P>(P::template poll<Scope::device>(&state_.routed.value)) != 0;
      if (routed_) {
        // Pairs with finish_routing: the routing map. Not at every look: a fence costs more than
        // the look.
        P::template acquire_fence<Scope::device>();
      }
    }
    return routed_;
  }

  /// Called before a part's rows are looked up. False: leave.
  bool begin_part() const { return hold_back(rank_, call_, stage_of(TaskKind::dispatch)); }

  /// Finds where the row of this lane's assignment goes, if it has one (`there`), and notes it.
  TokenRow look_up(const RoutingMap& map, u32 pair, bool there) const {
    if (!there || !map.sent(pair)) {
      return {};
    }
    const RoutingMap::Place place = map.place_of(pair);
    note_row(rank_, place, pair);
    return {true, place.peer, number_of(rank_, place), place.row / rank_.geometry().chunk_rows,
            rank_.memory.rows_sent(place.peer)};
  }

  /// Counts this lane's row, which has been written, in its chunk, and announces the chunk if it is
  /// complete.
  TokenChunk count(const TokenRow& row) {
    const Geometry& geometry = rank_.geometry();
    const u32 number = row.peer * geometry.chunks() + row.chunk;
    const u32 alike = P::alike(row.goes ? number : kNone);
    TokenChunk chunk{row.goes && P::lanes_before(alike) == 0 ? P::count(alike) : 0, false};
    P::sync_lanes();  // the lane that reports the chunk has what the others have stored
    if (chunk.rows > 0) {
      count_carried(rank_, call_, row.peer, chunk.rows);
      chunk.announced = completes_chunk(rank_, row.peer, row.rows_sent, row.chunk, chunk.rows);
    }
    u32 flag_bytes = 0;
    if (P::ballot(chunk.announced) != 0) {
      // One fence for all flags: lanes that differ in it would wait for each other's.
      order_rows<P>(P::ballot(chunk.announced && row.peer != rank_.rank) != 0);
      flag_bytes = chunk.announced ? send_chunk(rank_, call_, row.peer, row.chunk) : 0;
    }
    const u32 chunks = P::count(P::ballot(chunk.rows > 0));
    const u32 elsewhere = P::count(P::ballot(row.goes && row.peer != rank_.rank));
    const u32 flags = P::broadcast(P::inclusive_scan(flag_bytes), P::kLanes - 1);
    if (P::lane() == 0) {
      note<P>(tally_.tasks[static_cast<u32>(TaskKind::dispatch)], chunks);
      note<P>(tally_.row_bytes_to_peers, u64{elsewhere} * geometry.sent_bytes);
      note<P>(tally_.flag_bytes_to_peers, flags);
    }
    return chunk;
  }

  /// Called after the last row of a part.
  void end_part(u64 busy_ns) {
    if (P::lane() == 0) {
      count_dispatch(rank_, call_);
      note<P>(tally_.busy_ns[static_cast<u32>(TaskKind::dispatch)], busy_ns);
    }
    P::sync_lanes();
  }

 private:
  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Tally& tally_;
  bool all_taken_;
  bool routed_ = false;
};

/// The trace event of the rows that tokens have brought to a chunk, the first of them for `pair`. A
/// trace and a tally have it as a part: in other calls, too, all rows of a part are in one chunk.
constexpr TraceEvent event_of_token_row(const TokenRow& row, const TokenChunk& chunk, u32 pair) {
  TraceEvent event{};
  event.kind = static_cast<u32>(TaskKind::dispatch);
  event.part = pair;
  event.peer = row.peer;
  event.expert = kNone;
  event.place = row.chunk;
  event.rows = chunk.announced ? 1 : 0;
  event.carried = chunk.rows;
  return event;
}

}  // namespace moeos
