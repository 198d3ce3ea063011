// SPDX-License-Identifier: Apache-2.0
// Dispatch: the actor that takes this rank's rows to the ranks of their experts, and completes the
// chunks of sources that send each token once.
//
// Rows leave as soon as routing is finished, and nothing that this rank computes waits for them: so
// Dispatch is not scheduled. The last Route part lists all parts of Dispatch, and couriers take one
// after the other; calls with few tokens have other parts (token_dispatch.hpp). On the GPU every
// processor block has a courier in addition to its compute warps (Geometry::couriers): a processor
// that sent would wait for the links. On a machine with one warp a processor, processors run
// couriers' parts before all other parts. Chunks that have landed are listed as they come
// (landings_subscriber.hpp), and couriers complete them first, because their tiles wait.
//
// A source may send a rank more rows than its cell there has slots (Geometry::rings_cells). Then a
// chunk goes when the results of the chunk that had its slots are back. A courier whose part must
// wait for that keeps the part and takes no other part of Dispatch meanwhile; but it does not
// block, so it completes chunks, and a processor computes. Must not depend on: how rows are copied.
#pragma once

#include "runtime/health/faults.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

template <Platform P>
class Courier {
 public:
  /// `actor`: index of the tally it writes: a processor's index, or `processors` and more for
  /// couriers.
  Courier(const Rank<P>& rank, const Call& call, u32 actor)
      : rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        tally_(rank.memory.tallies[actor]),
        all_sent_(rank.geometry().dispatches_tokens(call.tokens)),
        replicates_(rank.geometry().deduplicates_any()) {}

  /// Takes the next part. False: there is none yet, or none any more. Never waits. One warp runs
  /// this and all functions below.
  bool take(CourierPart& part) {
    if (over() || (!take_replication(part) && !take_dispatch(part))) {
      return false;
    }
    left_ = left_ || !hold_back(rank_, call_, stage_of(part.kind));
    return !left_;
  }

  /// Whether nothing will come any more.
  bool over() const { return left_ || (all_sent_ && !replicates_); }

  /// Called when it is known how many of a part's rows go to its peer, and before they go.
  void begin(const CourierPart& part, u32 carried) const {
    if (part.sends() && P::lane() == 0) {
      count_carried(rank_, call_, part.peer, carried);
    }
  }

  /// Called after a part's rows, of which this warp has copied `carried` to where they go:
  /// announces the chunk if all of its other parts are complete, and returns whether it has.
  bool complete(const CourierPart& part, u32 carried, u64 busy_ns) {
    return by_one_lane<P>([&] {
             u32 flag_bytes = 0;
             const bool last =
                 part.sends() ? complete_dispatch(part, flag_bytes) : complete_replication(part);
             note<P>(tally_.tasks[static_cast<u32>(part.kind)], 1);
             note<P>(tally_.busy_ns[static_cast<u32>(part.kind)], busy_ns);
             if (part.sends() && part.peer != rank_.rank) {
               const bool deduplicated =
                   rank_.leaves_out(part.peer, part.cell_rows, part.chunk(rank_.geometry()));
               note<P>(tally_.row_bytes_to_peers, u64{carried} * rank_.geometry().sent_bytes);
               note<P>(tally_.flag_bytes_to_peers,
                       flag_bytes + (deduplicated ? part.rows * sizeof(u32) : 0));  // their origins
             }
             return last ? 1U : 0U;
           }) != 0;
  }

 private:
  bool take_replication(CourierPart& part) {
    if (!replicates_) {
      return false;
    }
    if (!is_promised()) {
      replicates_ = !all_sent_ || more_replications();
      return false;
    }
    // Pairs with LandingsSubscriber::step: the list, the rows that landed and where they go. Not at
    // every look: a fence costs more than the look. Relayed, because tickets may be taken in
    // another order than promises are given: then the promise that was given with our word went to
    // the holder of an earlier ticket, and its increment of the ticket counter publishes the word
    // to us.
    P::template relay_fence<Scope::device>();
    const u32 taken = by_one_lane<P>([this] {
      return P::template poll_add<Scope::device>(&state_.replications_taken.value, 1U);
    });
    P::template acquire_fence<Scope::device>();
    if (!find(rank_.memory.replication_list, taken, part)) {
      return false;
    }
    part.end_with(rank_.memory.rows_received(part.peer));
    return true;
  }

  /// Whether a word of the list is promised to us.
  bool is_promised() const {
    return by_one_lane<P>([this] {
             u32* const ready = &state_.replications_ready.value;
             // Relaxed, as long as there is none. Not by comparing and exchanging: of all waiting
             // couriers, only one would succeed in each round trip.
             if (static_cast<i32>(P::template load_relaxed<Scope::device>(ready)) <= 0) {
               return 0U;
             }
             if (static_cast<i32>(P::template poll_add<Scope::device>(ready, ~0U)) <= 0) {
               P::template count_relaxed<Scope::device>(ready, 1U);  // others were quicker
               return 0U;
             }
             return 1U;
           }) != 0;
  }

  /// Whether there may be chunks that no courier has taken.
  bool more_replications() const {
    // Relaxed: numbers that are compared.
    const u32 all =
        agreed<P>(P::template load_relaxed<Scope::device>(&state_.replications_all.value));
    return all == 0 ||
           agreed<P>(P::template load_relaxed<Scope::device>(&state_.replications_taken.value)) !=
               all - 1;
  }

  bool take_dispatch(CourierPart& part) {
    if (all_sent_ || left_ || !knows_parts()) {
      return false;
    }
    const u32 taken = kept_ != kNone ? kept_ : next_ticket();
    kept_ = kNone;
    all_sent_ = taken >= parts_;
    if (all_sent_ || !find(rank_.memory.dispatch_list, taken, part)) {
      return false;
    }
    if (!has_places(part)) {
      kept_ = MOEOS_PLANTED(kept_parts_are_lost) ? kNone : taken;
      return false;
    }
    part.end_with(rows_sent(part.peer));
    return true;
  }

  u32 next_ticket() const {
    // Relaxed: a ticket publishes nothing, and the courier that takes it has acquired the whole
    // list.
    return by_one_lane<P>([this] {
      return P::template add_relaxed<Scope::device>(&state_.dispatch_parts_taken.value, 1U);
    });
  }

  /// Whether the slots of a part's rows are free: the results of the chunk that had them are back.
  bool has_places(const CourierPart& part) const {
    const Geometry& geometry = rank_.geometry();
    const u32 chunk = part.chunk(geometry);
    if (!geometry.replaces_rows(chunk) || MOEOS_PLANTED(places_of_cells_are_not_awaited)) {
      return true;
    }
    const u32* const back = rank_.memory.chunk_back(part.peer, chunk - geometry.ring_chunks());
    if (agreed<P>(P::template poll<Scope::device>(back)) != seal(call_.epoch)) {
      return false;
    }
    // Pairs with ReturnsSubscriber::take_in: the peer has read those rows.
    P::template acquire_fence<Scope::device>();
    return true;
  }

  bool knows_parts() {
    if (parts_ != kNone) {
      return true;
    }
    const u32 routed = agreed<P>(P::template poll<Scope::device>(&state_.routed.value));
    if (routed == 0) {
      return false;
    }
    // Pairs with finish_routing: the list and the routing map. Not at every look: a fence costs
    // more than the look.
    P::template acquire_fence<Scope::device>();
    parts_ = routed - 1;
    rows_of_lane_ = rank_.memory.rows_sent(minimum(P::lane(), rank_.geometry().world - 1));
    return true;
  }

  /// Rows for a peer: from the lane that keeps the number, if there are enough lanes, since memory
  /// takes a round trip.
  u32 rows_sent(u32 peer) const {
    const bool kept = rank_.geometry().world <= P::kLanes;
    return kept ? P::broadcast(rows_of_lane_, peer) : rank_.memory.rows_sent(peer);
  }

  /// Decodes a word of a list that has been acquired. False: the word is not this call's, so the
  /// call is over.
  bool find(const u64* list, u32 place, CourierPart& part) {
    const u64 listed = list[place];
    const ReadyWord word(listed);
    if (word.epoch() != call_.epoch) {
      reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::processor, place, listed);
      left_ = true;
      return false;
    }
    part = courier_part(rank_.geometry(), word);
    return true;
  }

  /// One lane.
  bool complete_dispatch(const CourierPart& part, u32& flag_bytes) const {
    const bool last =
        completes_chunk(rank_, part.peer, part.cell_rows, part.chunk(rank_.geometry()), part.rows);
    if (last) {
      order_rows<P>(part.peer != rank_.rank);
      flag_bytes = send_chunk(rank_, call_, part.peer, part.chunk(rank_.geometry()));
    }
    count_dispatch(rank_, call_);
    return last;
  }

  /// One lane.
  bool complete_replication(const CourierPart& part) const {
    // Publishes all rows of the chunk, both copied and landed ones, to the arrivals subscriber and
    // to processors, which poll this word and fence.
    auto* const flag = rank_.memory.replicated_flag(part.peer, part.chunk(rank_.geometry()));
    MOEOS_PLANTED(replicated_chunk_overtakes_rows)
    ? P::template store_relaxed<Scope::device>(flag, seal(call_.epoch))
    : P::template store_release<Scope::device>(flag, seal(call_.epoch));
    return true;
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Tally& tally_;
  u32 parts_ = kNone;     // not known yet
  u32 rows_of_lane_ = 0;  // for the peer whose number this lane has
  u32 kept_ = kNone;      // ticket of a part that waits for slots
  bool all_sent_;      // all parts of Dispatch have been taken, or go by token (token_dispatch.hpp)
  bool replicates_;    // there may be chunks to complete
  bool left_ = false;  // the call has failed
};

}  // namespace moeos
