// SPDX-License-Identifier: Apache-2.0
// The words that say that a part's inputs are here, for a part that was handed out before its
// inputs came.
//
// In a call that is planned up front (arrivals_subscriber.hpp) a part waits only for what other
// ranks send and for the results of earlier parts in the ready ring. So its processor may wait: the
// processors that run the earlier parts have claimed them already, and none waits for a later part.
// It looks at words that are written in any case: the flags of the chunks in which a tile's rows
// come, the counter of the tile's GEMM0 parts, the credits of the chunks in which a token's rows
// have left. Must not depend on: how a part is computed.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/queues/chunk_flags.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// The words of one part, shared out among the lanes. Every function is called by one warp.
template <Platform P>
class Inputs {
 public:
  /// Takes a descriptor that awaits its inputs. `map`: needed for a Combine, whose word was handed
  /// out after the routing map; then the lane of each assignment calls found(number in the part,
  /// pair, row of its result as row_of_result has it, or kNone: it was not sent).
  template <class Found>
  Inputs(const Rank<P>& rank, const Call& call, const RoutingMap& map, const Task& task,
         Found found) {
    if (!is_product(task.kind)) {
      find_results(rank, map, task, found);
    } else if (awaits_of(task.from) == Awaits::product) {
      for (u32 i = 0; i < kOfALane; ++i) {
        word_[i] = &rank.memory.product0_parts_done[task.tile];
        wanted_[i] = first_parts_of(rank.geometry(), task);
      }
    } else {
      find_rows(rank, call, task);
    }
  }

  /// Looks once; true when everything is here. Then a fence of system scope (Processor::await)
  /// pairs with the release of the words: send_chunk, and the put of a sender; Processor::complete;
  /// return_rows.
  bool here() const {
    u32 seen[kOfALane];
    for (u32 i = 0; i < kOfALane; ++i) {
      seen[i] = P::template poll<Scope::system>(word_[i]);
    }
    bool missing = false;
    for (u32 i = 0; i < kOfALane; ++i) {
      missing = missing || (seen[i] != wanted_[i] && !MOEOS_PLANTED(inputs_are_not_awaited));
    }
    return P::ballot(missing) == 0;
  }

 private:
  static constexpr u32 kOfALane = ceil_div(Geometry::kAwaitedMost, P::kLanes);

  /// Finds the flags of the chunks in which a tile's rows come. Each lane has a segment, so that
  /// one round trip to memory serves all.
  void find_rows(const Rank<P>& rank, const Call& call, const Task& task) {
    const u32 chunk_rows = rank.geometry().chunk_rows;
    u32 words = 0;  // of the segments so far
    for (u32 first = 0; first < task.segment_count; first += P::kLanes) {
      const bool there = first + P::lane() < task.segment_count;
      const Segment segment = task.segments[there ? first + P::lane() : first];
      // A rank leaves out none of its own rows, whatever it receives; and a processor that has
      // planned by counts has not acquired how many rows it receives.
      const u32 rows = task.awaits == kAwaitsByCounts || segment.source == rank.rank ||
                               MOEOS_PLANTED(landed_rows_are_not_copied)
                           ? 0
                           : rank.memory.rows_received(segment.source);
      const u32 row = first_in_order(rank, task.local_expert, segment);
      const u32 chunk = row / chunk_rows;
      const u32 chunks = there ? (row + segment.rows - 1) / chunk_rows + 1 - chunk : 0;
      const u32 ends = P::inclusive_scan(chunks);
      const u32 all = P::broadcast(ends, P::kLanes - 1);
      for (u32 i = 0; i < kOfALane; ++i) {
        const u32 number = i * P::kLanes + P::lane() - words;  // large: of segments before
        const u32 nth = minimum(number, all - 1);
        const u32 owner = lane_with<P>(ends, nth);
        const u32 source = P::broadcast(static_cast<u32>(segment.source), owner);
        const u32 of_source = P::broadcast(chunk + chunks - ends, owner) + nth;
        const u32* flag = complete_chunk_flags(rank, source, P::broadcast(rows, owner))(of_source);
        if (words == 0 || number < all) {  // a lane without a word repeats the last first-round one
          word_[i] = flag;
          wanted_[i] = seal(call.epoch);
        }
      }
      words += all;
    }
    MOEOS_CHECK(words > 0 && words <= Geometry::kAwaitedMost);
  }

  /// Finds the credits of the chunks in which tokens' rows have left.
  template <class Found>
  void find_results(const Rank<P>& rank, const RoutingMap& map, const Task& task, Found found) {
    const Geometry& geometry = rank.geometry();
    const u32 pairs = task.rows * geometry.top_k;
    MOEOS_CHECK(pairs > 0 && pairs <= Geometry::kAwaitedMost);
    for (u32 i = 0; i < kOfALane; ++i) {
      // Lanes beyond the last assignment take that one again.
      const u32 number = minimum(i * P::kLanes + P::lane(), pairs - 1);
      const u32 pair = task.first_ready * geometry.top_k + number;
      // An assignment that was not sent awaits nothing: it gets a word that stays as it is during
      // the call.
      word_[i] = rank.memory.epoch;
      wanted_[i] = task.epoch;
      u32 row = kNone;
      if (map.sent(pair)) {
        const RoutingMap::Place place = map.place_of(pair);
        const u32 chunk = place.row / geometry.chunk_rows;
        word_[i] = rank.template here<u32>(rank.layout.returned(place.peer, chunk));
        wanted_[i] = seal(rows_in_chunk(geometry, rank.memory.rows_sent(place.peer), chunk));
        row = row_of_result(rank, place);
      }
      found(number, pair, row);
    }
  }

  // Word i of a lane is the part's word i * P::kLanes + lane; a lane without one repeats another's.
  const u32* word_[kOfALane];
  u32 wanted_[kOfALane];  // as it lies in memory
};

}  // namespace moeos
