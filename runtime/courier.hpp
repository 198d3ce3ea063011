// Dispatch: the actor that takes this rank's rows to the ranks of their experts, and makes chunks
// whole whose tokens came once.
//
// Rows leave as soon as routing is finished, and nothing that this rank computes waits for them: so
// Dispatch is not scheduled. The last Route part lists all of its parts, and couriers take one
// after the other; of few tokens there are other parts (spread.hpp). On the GPU every processor
// block has a courier beside its products (Geometry::couriers): a processor that sent would wait
// for the links. A machine with one warp a processor lets processors do it, before all other parts.
// Chunks that have landed are listed as they come (landings_subscriber.hpp), and go before: their
// tiles wait. May not know: how rows are copied.
#pragma once

#include "runtime/base.hpp"
#include "runtime/faults.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"
#include "runtime/whole.hpp"

namespace moeos {

/// Whether a courier's part makes a chunk whole, and brings nothing to a peer.
constexpr bool is_replication(const Geometry& geometry, const Task& task) {
  return geometry.once() && task.kind == TaskKind::replicate;
}

template <Platform P>
class Courier {
 public:
  /// `actor`: whose tally it writes, a processor's index, or `processors` and more for couriers.
  Courier(const Rank<P>& rank, const Call& call, u32 actor)
      : rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        tally_(rank.memory.tallies[actor]),
        all_sent_(rank.geometry().spreads(call.tokens)),
        replicates_(rank.geometry().once()) {}

  /// Takes the next part and its descriptor. False: there is none yet, or none any more. Never
  /// waits. One warp.
  bool take(ReadyWord& word, Task& task) {
    if (over() || (!take_replication(word, task) && !take_dispatch(word, task))) {
      return false;
    }
    left_ = left_ || !hold_back(rank_, call_, stage_of(task.kind));
    return !left_;
  }

  /// Whether nothing will come any more.
  bool over() const { return left_ || (all_sent_ && !replicates_); }

  /// After a part's rows, of which this warp has brought `sent` to where they go: announces the
  /// chunk, if all of its other parts have been; true if so.
  bool complete(const Task& task, ReadyWord word, u32 sent, u64 busy_ns) {
    if (P::lane() == 0) {
      ++tally_.tasks[static_cast<u32>(task.kind)];
      tally_.busy_ns[static_cast<u32>(task.kind)] += busy_ns;
    }
    if (is_replication(rank_.geometry(), task)) {
      P::sync_lanes();
      if (P::lane() == 0) {
        // Publishes all rows of the chunk, those that came among them, to the arrivals subscriber,
        // which polls this word and fences.
        P::template store_release<Scope::device>(
            rank_.memory.replicated_flag(task.peer, task.first_chunk), seal(call_.epoch));
      }
      P::sync_lanes();
      return true;
    }
    return complete_dispatch(task, word, sent);
  }

 private:
  bool take_replication(ReadyWord& word, Task& task) {
    if (!replicates_) {
      return false;
    }
    const u32 taken = by_one_lane<P>([this] { return take_ticket(); });
    if (taken == kNone) {
      replicates_ = !all_sent_ || more_replications();
      return false;
    }
    // Pairs with LandingsSubscriber::step: the list, the rows that landed and where they go. Not at
    // every look: a fence costs more than the look.
    P::template poll<Scope::device>(&state_.replications_ready.value);
    P::template acquire_fence<Scope::device>();
    const u64 listed = rank_.memory.replication_list[taken];
    word = ReadyWord(listed);
    if (word.epoch() != call_.epoch) {
      reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::processor, taken, listed);
      left_ = true;
      return false;
    }
    if (P::lane() == 0) {
      task = replicate_task(word);
    }
    P::sync_lanes();
    return true;
  }

  /// One lane: the number of a listed chunk, which so is ours, or kNone.
  u32 take_ticket() const {
    u32* const ready = &state_.replications_ready.value;
    // Relaxed: the number only promises us a word of the list. Not by comparing and exchanging: of
    // all couriers that wait, one would succeed in each round trip.
    if (static_cast<i32>(P::template load_relaxed<Scope::device>(ready)) <= 0) {
      return kNone;
    }
    if (static_cast<i32>(P::template add_relaxed<Scope::device>(ready, ~0U)) <= 0) {
      P::template add_relaxed<Scope::device>(ready, 1U);  // others were quicker
      return kNone;
    }
    // Acquire-release, because tickets may be taken in another order than promises are given: then
    // our word was listed behind the promise that an earlier ticket's holder got. We acquire that
    // one's look at `ready`, so that ours, which follows, is not older.
    return P::template add_acquire_release<Scope::device>(&state_.replications_taken.value, 1U);
  }

  /// Whether there may be chunks that nobody has taken.
  bool more_replications() const {
    // Relaxed: numbers that are compared.
    const u32 all =
        agreed<P>(P::template load_relaxed<Scope::device>(&state_.replications_all.value));
    return all == 0 ||
           agreed<P>(P::template load_relaxed<Scope::device>(&state_.replications_taken.value)) !=
               all - 1;
  }

  bool take_dispatch(ReadyWord& word, Task& task) {
    if (all_sent_ || left_ || !knows_parts()) {
      return false;
    }
    // Relaxed: a ticket publishes nothing, and who takes it has acquired the whole list.
    const u32 part = by_one_lane<P>([this] {
      return P::template add_relaxed<Scope::device>(&state_.dispatch_parts_taken.value, 1U);
    });
    all_sent_ = part >= parts_;
    left_ = !all_sent_ && !fetch(part, word, task);
    return !all_sent_ && !left_;
  }

  bool complete_dispatch(const Task& task, ReadyWord word, u32 sent) {
    const Geometry& geometry = rank_.geometry();
    const u32 rows_sent = rank_.memory.rows_sent(task.peer);
    const auto [chunk, first, rows] = rows_in_part(geometry, rows_sent, task, word.part());
    return by_one_lane<P>([&, chunk = chunk, rows = rows] {
             u32 flag_bytes = 0;
             const bool last =
                 count_rows(rank_, call_, task.peer, rows_sent, chunk, rows, sent, flag_bytes);
             tally_.row_bytes_to_peers +=
                 task.peer == rank_.rank ? 0 : u64{sent} * geometry.row_bytes;
             tally_.flag_bytes_to_peers +=
                 flag_bytes + (rank_.sends_once(task.peer, rows_sent) ? u64{rows} * sizeof(u32)
                                                                      : 0);  // their origins
             count_dispatch(rank_, call_);
             return last ? 1U : 0U;
           }) != 0;
  }

  bool knows_parts() {
    if (parts_ != kNone) {
      return true;
    }
    const u32 routed = agreed<P>(P::template poll<Scope::device>(&state_.routed.value));
    if (routed == 0) {
      return false;
    }
    // Pairs with finish_routing: the list, the descriptors and the routing map. Not at every look:
    // a fence costs more than the look.
    P::template acquire_fence<Scope::device>();
    parts_ = routed - 1;
    return true;
  }

  bool fetch(u32 part, ReadyWord& word, Task& task) {
    const u64 listed = rank_.memory.dispatch_list[part];
    word = ReadyWord(listed);
    if (word.epoch() != call_.epoch) {
      reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::processor, part, listed);
      return false;
    }
    if (!copy_whole<P>(rank_.memory.tasks[word.task()], task)) {
      reject_damaged(rank_, call_, FailureKind::task_damaged, Actor::processor, word.task(), 0);
      return false;
    }
    MOEOS_CHECK(task.epoch == call_.epoch && task.kind == TaskKind::dispatch);
    return true;
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Tally& tally_;
  u32 parts_ = kNone;  // not known yet
  bool all_sent_;      // every part of Dispatch has been taken, or all are tokens (spread.hpp)
  bool replicates_;    // there may be chunks to make whole
  bool left_ = false;  // the call has failed
};

}  // namespace moeos
