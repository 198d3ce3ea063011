// SPDX-License-Identifier: Apache-2.0
// Which assignment (pair of a token and its j-th choice) each row carries that this rank sends.
//
// Route sorts each block of tokens by expert on its own (block_pairs, block_first, block_base); a
// prefix sum over the blocks then gives every pair its slot at its expert, in the order (token, j).
// So the permutation is the same for any number of processors and any timing, no atomic decides a
// row, and with a capacity the pairs that are dropped are the last ones. The courier that
// dispatches a row finds its pair from the prefix sums and notes both directions (row_tasks.hpp),
// which Combine reads. Must not depend on: flags, queues, where a row lies in memory (layout.hpp).
#pragma once

#include "runtime/memory/memory.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/geometry_of.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

class RoutingMap {
 public:
  RoutingMap(const Geometry& geometry, const RankMemory& memory, const Call& call)
      : geometry_(geometry),
        memory_(memory),
        tokens_(call.tokens),
        limit_(call.pair_limit),
        all_sent_(call.may_be_unsent == 0) {}

  struct Place {
    u32 peer;  // owner of the expert
    u32 local_expert;
    u32 slot;  // among the rows that we send to that expert
    u32 row;   // in the order of sending to that peer: what chunks count
  };

  /// Whether a pair has a row: its slot is used and within the expert's capacity.
  bool sent(u32 pair) const {
    if (all_sent_) {
      return true;
    }
    const u32 expert = memory_.pair_expert[pair];
    return expert != kNone && slot(pair, expert) < limit_;
  }

  /// Where a row that we send to `peer` lies.
  Place place_at(u32 peer, u32 row) const {
    const u32* starts = memory_.send_starts(peer);
    MOEOS_CHECK(row < starts[geometry_.get().local_experts()]);
    // The last expert that starts at or before the row; experts without rows start where the next
    // one does.
    const u32 local = partition_point(geometry_.get().local_experts(),
                                      [&](u32 expert) { return starts[expert + 1] <= row; });
    return Place{peer, local, row - starts[local], row};
  }

  /// The pair that the row at this lane's place carries. By all lanes of a warp, whose places are
  /// contiguous and so have few experts: for each expert, the lanes look at all blocks together,
  /// one a lane, where a lane alone would go from block to block.
  template <Platform P>
  u32 pair_at(const Place& place) const {
    const u32 expert = place.peer * geometry_.get().local_experts() + place.local_expert;
    if constexpr (P::kLanes == 1) {
      const u32 block =
          partition_point(blocks(), [&](u32 b) { return base(b, expert) <= place.slot; }) - 1;
      return memory_.block_pairs[place_of_first(block, expert, base(block, expert)) + place.slot];
    }
    u32 before = 0;  // where the pair of slot 0 would be, if all slots up to ours were in our block
    u32 left = P::ballot(true);
    while (left != 0) {
      const u32 its = P::broadcast(expert, P::first_lane(left));
#pragma unroll 1
      for (u32 first = 0; first < blocks(); first += P::kLanes) {
        const u32 block = minimum(first + P::lane(), blocks() - 1);
        // No condition around the load: it would keep the next one waiting.
        const u32 slots_before = base(block, its);
        const u32 place_of_slot_0 = place_of_first(block, its, slots_before);
        const u32 starts = first + P::lane() < blocks() ? slots_before : kNone;
        u32 last = 0;  // the last lane whose block starts at or before our slot
#pragma unroll 1
        for (u32 step = P::kLanes / 2; step > 0; step /= 2) {
          const u32 start = P::broadcast(starts, last + step);
          const bool before = MOEOS_PLANTED(pairs_are_of_the_block_before) ? start < place.slot
                                                                           : start <= place.slot;
          last += before ? step : 0;
        }
        const u32 first_start = P::broadcast(starts, 0);
        const u32 found = P::broadcast(place_of_slot_0, last);
        const bool among = expert == its && first_start <= place.slot;
        before = among ? found : before;
      }
      left &= ~P::ballot(expert == its);
    }
    return memory_.block_pairs[before + place.slot];
  }

  /// Where the row of a pair that is sent lies.
  Place place_of(u32 pair) const { return place_of(pair, memory_.pair_expert[pair]); }

  /// The first, in the order of sending to the place's peer, of the rows that carry the token of
  /// `pair`; `place` is that of `pair`.
  Place first_place(u32 pair, const Place& place) const {
    const Geometry& geometry = geometry_.get();
    const u32 first_pair = pair - pair % geometry.top_k;
    u32 first = pair;
    u32 expert = place.peer * geometry.local_experts() + place.local_expert;
#pragma unroll 1
    for (u32 other = first_pair; other < first_pair + geometry.top_k; ++other) {
      const u32 its = memory_.pair_expert[other];
      const bool before = MOEOS_PLANTED(rows_come_with_the_last_pair) ? its > expert : its < expert;
      if (before && geometry.owner_of(its) == place.peer &&
          (sent(other) || MOEOS_PLANTED(rows_come_with_dropped_pairs))) {
        first = other;
        expert = its;
      }
    }
    return first == pair ? place : place_of(first, expert);
  }

  /// Rows that come back for the token.
  u32 rows_of(u32 token) const {
    if (all_sent_) {
      return geometry_.get().top_k;
    }
    u32 rows = 0;
    for (u32 j = 0; j < geometry_.get().top_k; ++j) {
      rows += sent(token * geometry_.get().top_k + j) ? 1 : 0;
    }
    return rows;
  }

 private:
  Place place_of(u32 pair, u32 expert) const {
    const u32 at = slot(pair, expert);
    const u32 peer = geometry_.get().owner_of(expert);
    const u32 local = expert % geometry_.get().local_experts();
    return Place{peer, local, at, memory_.send_starts(peer)[local] + at};
  }
  u32 blocks() const { return geometry_.get().route_blocks_of(tokens_); }
  u32 base(u32 block, u32 expert) const {
    return memory_.block_base[u64{block} * geometry_.get().experts + expert];
  }
  /// Index in block_pairs where the expert's pairs start in a block, minus the slots before them.
  u32 place_of_first(u32 block, u32 expert, u32 slots_before) const {
    const u32 block_pairs = geometry_.get().route_tokens_of(tokens_) * geometry_.get().top_k;
    return block * block_pairs +
           memory_.block_first[u64{block} * geometry_.get().experts + expert] - slots_before;
  }
  u32 slot(u32 pair, u32 expert) const {
    return base(geometry_.get().route_block(tokens_, pair / geometry_.get().top_k), expert) +
           memory_.pair_rank[pair];
  }

  GeometryOf geometry_;
  const RankMemory& memory_;
  u32 tokens_;  // of the call
  u32 limit_;
  bool all_sent_;  // dropless and routed here: every pair has a row, and nothing need be looked up
};

/// Route's last step for a block of tokens, after the choice of experts: sorts the block's pairs by
/// expert.
///
/// Reads pair_expert of the block; writes pair_rank, block_pairs, block_first and block_base (as
/// pairs in this block). One thread.
inline void sort_block(const Geometry& geometry, const RankMemory& memory, const Call& call,
                       u32 block) {
  const TokenRange tokens = tokens_of_block(geometry, call, block);
  const u32 begin = tokens.first * geometry.top_k;
  const u32 end = tokens.end * geometry.top_k;
  u32* in_block = memory.block_base + u64{block} * geometry.experts;
  u32* first = memory.block_first + u64{block} * geometry.experts;
  for (u32 expert = 0; expert < geometry.experts; ++expert) {
    in_block[expert] = 0;
  }
  for (u32 pair = begin; pair < end; ++pair) {
    const u32 expert = memory.pair_expert[pair];
    if (expert != kNone) {
      memory.pair_rank[pair] = in_block[expert]++;
    }
  }
  u32 start = 0;
  for (u32 expert = 0; expert < geometry.experts; ++expert) {
    first[expert] = start;
    start += in_block[expert];
  }
  u32* sorted = memory.block_pairs + begin;
  for (u32 pair = begin; pair < end; ++pair) {
    const u32 expert = memory.pair_expert[pair];
    if (expert != kNone) {
      sorted[first[expert] + memory.pair_rank[pair]] = pair;
    }
  }
}

}  // namespace moeos
