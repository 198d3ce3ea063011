// What tells a processor that a part's inputs are here, where the part was handed out before they
// were.
//
// In a call that is planned whole (arrivals_subscriber.hpp) a part waits for nothing but what other
// ranks send and what parts before it in the ready ring leave, and so a processor that has it may
// wait: whoever runs those has them already, and waits for no later one. It looks at the words that
// are written for this anyway: the flags of the chunks in which a tile's rows come, the counter of
// its first GEMM's parts, the credits of the chunks in which a token's rows have left. May not
// know: how a part is computed.
#pragma once

#include "runtime/base.hpp"
#include "runtime/chunk_flags.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"
#include "runtime/row_tasks.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// The words of one part, shared out among the lanes. Every function by one warp.
template <Platform P>
class Inputs {
 public:
  /// Of a descriptor that awaits. `map`: of a Combine, whose word was handed out behind the routing
  /// map; then each pair's lane calls found(number in the part, pair, its row as Layout::row_index,
  /// or kNone: it was not sent).
  template <class Found>
  Inputs(const Rank<P>& rank, const Call& call, const RoutingMap& map, const Task& task,
         Found found) {
    if (task.kind == TaskKind::gemm0) {
      find_rows(rank, call, task);
    } else if (task.kind == TaskKind::gemm1) {
      note_all(&rank.memory.gemm0_parts_done[task.tile],
               rank.geometry().gemm0_parts_of(task.narrow != 0));
    } else {
      find_results(rank, map, task, found);
    }
  }

  /// Looks once; true when everything is here. Then a fence of system scope (Processor::await)
  /// pairs with what has written the words: send_chunk, and the put of a sender;
  /// Processor::complete; return_rows.
  bool here() const {
    u32 seen[kOfALane];
    for (u32 i = 0; i < kOfALane; ++i) {
      seen[i] = P::template poll<Scope::system>(word_[i]);
    }
    bool missing = false;
    for (u32 i = 0; i < kOfALane; ++i) {
      missing = missing || seen[i] != wanted_[i];
    }
    return P::ballot(missing) == 0;
  }

 private:
  static constexpr u32 kOfALane = ceil_div(Geometry::kAwaitedMost, P::kLanes);

  /// A tile's rows: the flags of the chunks in which they come.
  void find_rows(const Rank<P>& rank, const Call& call, const Task& task) {
    u32 number = 0;
#pragma unroll 1
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment segment = task.segments[s];
      const u32 all_rows = rank.memory.rows_received(segment.source);
      const auto flag_of = whole_chunk_flags(rank, segment.source, all_rows);
      for_each_piece(rank, task.local_expert, segment, [&](u32, u32 chunk, u32) {
        const u32* flag = flag_of(chunk);
        if (number == 0) {
          note_all(flag, seal(call.epoch));  // lanes without one look at that
        }
        note(number, flag, seal(call.epoch));
        ++number;
      });
    }
    MOEOS_CHECK(number > 0 && number <= Geometry::kAwaitedMost);
  }

  /// Tokens' results: the credits of the chunks in which their rows have left.
  template <class Found>
  void find_results(const Rank<P>& rank, const RoutingMap& map, const Task& task, Found found) {
    const Geometry& geometry = rank.geometry();
    const u32 pairs = task.rows * geometry.top_k;
    MOEOS_CHECK(pairs > 0 && pairs <= Geometry::kAwaitedMost);
    for (u32 i = 0; i < kOfALane; ++i) {
      // Beyond them: the last one again.
      const u32 number = minimum(i * P::kLanes + P::lane(), pairs - 1);
      const u32 pair = task.first_ready * geometry.top_k + number;
      // Of a pair that was not sent, nothing: a word that stays as it is while the call lasts.
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

  void note_all(const u32* word, u32 wanted) {
    for (u32 i = 0; i < kOfALane; ++i) {
      word_[i] = word;
      wanted_[i] = wanted;
    }
  }
  /// Word `number` of the part: one lane's.
  void note(u32 number, const u32* word, u32 wanted) {
    for (u32 i = 0; i < kOfALane; ++i) {
      const bool mine = i * P::kLanes + P::lane() == number;
      word_[i] = mine ? word : word_[i];
      wanted_[i] = mine ? wanted : wanted_[i];
    }
  }

  // Word i of a lane is the part's i * P::kLanes + the lane's; without one, another's.
  const u32* word_[kOfALane];
  u32 wanted_[kOfALane];  // as it lies in memory
};

}  // namespace moeos
