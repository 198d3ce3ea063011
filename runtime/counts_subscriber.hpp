// The subscriber of row counts: where each source's rows start, and the bound on this call's rows.
//
// One of the warps of Algorithm 2 that watch what peers write: step() looks once at its words and
// returns whether anything was new, and answer() says what it still waits for. May not know: flags,
// tiles.
#pragma once

#include "runtime/base.hpp"
#include "runtime/hearsay.hpp"
#include "runtime/rank.hpp"
#include "runtime/team.hpp"

namespace moeos {

template <Platform P>
class CountsSubscriber {
 public:
  CountsSubscriber(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {}

  bool step() {
    const Geometry& geometry = rank_.geometry();
    bool progress = false;
    for (u32 source = 0; known_ < geometry.world && source < geometry.world; ++source) {
      if (rank_.os->counts_known[source] != call_.epoch) {  // this warp alone writes it
        progress = decode(source) || progress;
      }
    }
    return progress;
  }

  /// By one lane. A rank that has not made this call may wait in the call before: for results
  /// (ReturnsSubscriber::answer); or, if several have not, for counts of one that is late. Of two
  /// ranks there is nobody else.
  Answer answer(Failure& failure) {
    const u32 late = missing(failure);
    const u32 links = rank_.geometry().world <= 2 ? 0 : late > 1 ? 4 : 2;
    return hearsay_.answer(late > 0, links, rank_.deadline_ns);
  }

 private:
  /// How many ranks' counts have not come, and the first count that has not.
  u32 missing(Failure& failure) const {
    const Geometry& geometry = rank_.geometry();
    u32 late = 0;
    for (u32 source = 0; source < geometry.world; ++source) {
      for (u32 expert = 0; expert < geometry.local_experts(); ++expert) {
        const u64 word = look(source, expert);
        if (static_cast<u32>(word >> 32) == call_.epoch) {
          continue;
        }
        if (late == 0) {
          failure.kind = FailureKind::counts_late;
          failure.peer = source;
          failure.expert = expert;
          failure.expected = call_.epoch;
          failure.seen = word >> 32;
        }
        ++late;
        break;
      }
    }
    return late;
  }

  u64 look(u32 source, u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.count(call_.epoch, source, expert))));
  }

  /// Reads a source's counts if they are all here.
  bool decode(u32 source) {
    const Geometry& geometry = rank_.geometry();
    const u32 experts = geometry.local_experts();
    u32* starts = rank_.os->receive_starts(source);
    u32* shared_starts = rank_.memory.receive_starts(source);
    u32 start = 0;
    for (u32 first = 0; first < experts; first += P::kLanes) {
      const u32 expert = first + P::lane();
      const u64 word = expert < experts ? look(source, expert) : u64{call_.epoch} << 32;
      const u32 epoch = static_cast<u32>(word >> 32);
      if (P::ballot(epoch != call_.epoch) != 0) {
        if (epoch > call_.epoch) {  // nobody can be so far ahead
          reject(FailureKind::count_damaged, source, expert, word);
        }
        return false;
      }
      const u32 rows = static_cast<u32>(word);
      if (P::ballot(rows > geometry.capacity) != 0) {
        if (rows > geometry.capacity) {
          reject(FailureKind::count_too_large, source, expert, rows);
        }
        return false;
      }
      const u32 inclusive = P::inclusive_scan(rows);
      if (expert < experts) {
        starts[expert] = start + inclusive - rows;
        shared_starts[expert] = start + inclusive - rows;
      }
      start += P::broadcast(inclusive, P::kLanes - 1);
    }
    if (start > geometry.cell_rows_used()) {
      reject(FailureKind::count_too_large, source, kNone, start);
      return false;
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      starts[experts] = start;
      shared_starts[experts] = start;
      // Algorithm 2, SelfCorrectTaskBound: the bound counted this source's cell as full. Relaxed:
      // the scheduler compares a number; nothing is read because of it.
      const u32 bound = P::template load_relaxed<Scope::block>(rank_.os->rows_expected);
      P::template store_relaxed<Scope::block>(rank_.os->rows_expected,
                                              bound - (geometry.cell_rows_used() - start));
      // Before the arrivals subscriber may note the first rows.
      PeerRecord& record = rank_.memory.peer_records[source];
      record.counts_ns = P::now_ns();
      // Relaxed: a number to be reported.
      record.rows_returned = P::template load_relaxed<Scope::device>(
          &rank_.memory.call(call_.epoch).rows_returned.value);
      // Publishes receive_starts(source) to the arrivals subscriber, which acquires this word.
      P::template store_release<Scope::block>(&rank_.os->counts_known[source], call_.epoch);
    }
    P::sync_lanes();
    ++known_;
    return true;
  }

  void reject(FailureKind kind, u32 source, u32 expert, u64 seen) const {
    Failure failure = failure_of(rank_, call_, kind, Actor::subscriber);
    failure.peer = source;
    failure.expert = expert;
    failure.expected =
        expert == kNone ? rank_.geometry().cell_rows_used() : rank_.geometry().capacity;
    failure.seen = seen;
    rank_.fail(failure);
  }

  const Rank<P>& rank_;
  const Call& call_;
  u32 known_ = 0;
  Hearsay<P> hearsay_;
};

}  // namespace moeos
