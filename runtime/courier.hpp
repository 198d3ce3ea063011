// Dispatch: the actor that takes this rank's rows to the ranks of their experts.
//
// Rows leave as soon as routing is finished, and nothing that this rank computes waits for them: so
// Dispatch is not scheduled. The last Route part lists all of its parts, and couriers take one
// after the other. On the GPU every processor block has one beside its products
// (Geometry::couriers): a processor that sent would wait for the links. A machine with one warp a
// processor lets processors do it, before all other parts. May not know: how rows are copied.
#pragma once

#include "runtime/base.hpp"
#include "runtime/faults.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"
#include "runtime/whole.hpp"

namespace moeos {

template <Platform P>
class Courier {
 public:
  /// `actor`: whose tally it writes, a processor's index, or `processors` and more for couriers.
  Courier(const Rank<P>& rank, const Call& call, u32 actor)
      : rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        tally_(rank.memory.tallies[actor]) {}

  /// Takes the next part and its descriptor. False: there is none yet, or none any more. Never
  /// waits. One warp.
  bool take(ReadyWord& word, Task& task) {
    if (over_ || !knows_parts()) {
      return false;
    }
    // Relaxed: a ticket publishes nothing, and who takes it has acquired the whole list.
    const u32 part = by_one_lane<P>([this] {
      return P::template add_relaxed<Scope::device>(&state_.dispatch_parts_taken.value, 1U);
    });
    over_ = part >= parts_ || !fetch(part, word, task) ||
            !hold_back(rank_, call_, stage_of(TaskKind::dispatch));
    return !over_;
  }

  /// Whether nothing will come any more.
  bool over() const { return over_; }

  /// Announces the chunk of a part, whose rows this warp has brought to where they go, if all of
  /// the chunk's other parts have been; true if so.
  bool complete(const Task& task, ReadyWord word, u64 busy_ns) {
    const Geometry& geometry = rank_.geometry();
    const u32 rows_sent = rank_.memory.rows_sent(task.peer);
    const u32 chunk = rows_in_part(geometry, rows_sent, task, word.part()).chunk;
    const bool announced =
        completes<P>(&rank_.memory.chunk_parts_done[u64{task.peer} * geometry.chunks() + chunk],
                     ceil_div(rows_in_chunk(geometry, rows_sent, chunk), task.rows));
    if (P::lane() == 0) {
      ++tally_.tasks[static_cast<u32>(TaskKind::dispatch)];
      tally_.busy_ns[static_cast<u32>(TaskKind::dispatch)] += busy_ns;
      if (announced) {
        send_chunk(rank_, call_, task, word, chunk, tally_);
      }
      // Relaxed: a number by which the scheduler sees whether links are still in use, and the
      // returns subscribers, when results are late, whether we have sent everything.
      P::template add_relaxed<Scope::device>(&state_.dispatch_parts_done.value, 1U);
    }
    P::sync_lanes();
    return announced;
  }

 private:
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
  bool over_ = false;
};

}  // namespace moeos
