// SPDX-License-Identifier: Apache-2.0
// The subscriber of row counts: finds where each source's rows start and the bound on this call's
// rows, and checks that each source makes the call that this rank makes.
//
// One of the warps of Algorithm 2 that watch what peers write: step() looks once at its words and
// returns whether anything was new, and answer() says what it still waits for. Must not depend on:
// flags, tiles.
#pragma once

#include "runtime/health/grace_time.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

template <Platform P>
class CountsSubscriber {
 public:
  CountsSubscriber(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {}

  bool step() {
    const Geometry& geometry = rank_.geometry();
    if (known_ == geometry.world) {
      return false;
    }
    tell_all();
    bool progress = false;
    SoFar source;
    // Each step looks at the calls of one group of sources. That word is asked for with the counts.
    const u32 group = P::kLanes * group_;
    group_ = group + P::kLanes < geometry.world ? group_ + 1 : 0;
    const u64 said =
        says_calls() && group + P::lane() < geometry.world ? look_at_call(group + P::lane()) : 0;
    // Relaxed: a number to be reported. Asked for with the counts: after them, the load would be
    // waited for before the word that publishes them.
    const u32 returned = P::template load_relaxed<Scope::device>(
        &rank_.memory.call(call_.epoch).rows_returned.value);
    const u32 all = geometry.world * strips();
    for (u32 first = 0; first < all; first += kLooks) {
      // Asked for together, known sources' counts included: one round trip, however many sources
      // there are.
      u64 words[kLooks];
#pragma unroll
      for (u32 i = 0; i < kLooks; ++i) {
        const u32 strip = minimum(first + i, all - 1);
        const u32 expert = minimum(expert_in(strip), geometry.local_experts() - 1);
        words[i] = i < all ? look(strip / strips(), expert) : 0;
      }
      if (first == 0) {
        compare_calls(group, said);
      }
#pragma unroll 1
      for (u32 i = 0; i < minimum(kLooks, all - first); ++i) {
        u64 word = words[0];
#pragma unroll
        for (u32 n = 1; n < kLooks; ++n) {  // the loop avoids a dynamic index
          word = i == n ? words[n] : word;
        }
        const u32 strip = first + i;
        progress =
            (decode(strip, word, source) && finish(strip / strips(), source.rows, returned)) ||
            progress;
      }
    }
    return progress;
  }

  /// By one lane. A rank that has not made this call may wait in the call before: for results
  /// (ReturnsSubscriber::answer) or, if several have not, for the counts of a late one. Where two
  /// ranks are the whole world, there is no third rank to wait for.
  Answer answer(Failure& failure) {
    const Geometry& geometry = rank_.geometry();
    bool all_wait = true;
    const u32 late = missing(failure, all_wait);
    const u32 links = (late > 1 ? 4 : 2) + (all_wait ? kLinksOfSums : 0);
    const bool nobody_else = geometry.ranks() <= 2 || MOEOS_PLANTED(waiting_ranks_are_blamed);
    return grace_time_.answer(late > 0, nobody_else ? 0 : links, rank_.deadline_ns);
  }

 private:
  /// Within this many links a rank names the rank that it awaits in its sums
  /// (SumsSubscriber::answer).
  static constexpr u32 kLinksOfSums = 7;

  /// Whether a rank that has not made our call waits in the one before for another slice: it will
  /// name that slice.
  bool waits(u32 source) const {
    if (!rank_.geometry().sliced()) {
      return false;
    }
    // Relaxed, as for a count: it publishes nothing but itself.
    const u64 word = open(P::template load_relaxed<Scope::system>(
        reinterpret_cast<const u64*>(rank_.platform.peer(source) + rank_.layout.awaits())));
    return static_cast<u32>(word >> 32) == call_.epoch - 1;
  }

  /// Returns how many ranks' counts have not come, and describes the first missing count: of a rank
  /// that does not wait itself, if there is one. Otherwise all of them wait.
  u32 missing(Failure& failure, bool& all_wait) const {
    const Geometry& geometry = rank_.geometry();
    u32 late = 0;
    for (u32 source = 0; source < geometry.world; ++source) {
      // The word of the source's call stands for the first count: neither comes without the other.
      const u64 call = says_calls() ? look_at_call(source) : u64{call_.epoch} << 32;
      for (u32 expert = 0; expert < geometry.local_experts(); ++expert) {
        const u64 word = expert == 0 && call >> 32 != call_.epoch ? call : look(source, expert);
        if (static_cast<u32>(word >> 32) == call_.epoch) {
          continue;
        }
        const bool its = waits(source);
        if (late == 0 || (all_wait && !its)) {
          failure.kind = FailureKind::counts_late;
          failure.peer = source;
          failure.expert = expert;
          failure.expected = call_.epoch;
          failure.seen = word >> 32;
        }
        all_wait = all_wait && its;
        ++late;
        break;
      }
    }
    return late;
  }

  /// Whether ranks announce to each other which call they make: not a rank alone.
  bool says_calls() const { return rank_.geometry().world > 1; }

  /// Announces this call before the first look, so that a peer that makes another call learns of it
  /// as early as possible: its counts of that call may go where this rank never looks.
  void tell_all() {
    if (told_) {
      return;
    }
    told_ = true;
    for (u32 peer = P::lane(); says_calls() && peer < rank_.geometry().world; peer += P::kLanes) {
      send_identity(rank_, call_, peer);
    }
    P::sync_lanes();
  }

  u64 look_at_call(u32 source) const {
    // Relaxed, as for a count: it publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.call_of(call_.epoch, rank_.everywhere(source)))));
  }

  /// Notes which sources of a group, one a lane, make our call; a source that makes another ends
  /// it.
  void compare_calls(u32 group, u64 said) {
    P::sync_lanes();  // after every lane's look at these words in the step before (decode)
    const u32 source = group + P::lane();
    const u32 epoch = static_cast<u32>(said >> 32);
    if (said != 0 && epoch >= call_.epoch) {
      const u32 identity = static_cast<u32>(said);
      if (epoch == call_.epoch && identity == call_.identity) {
        rank_.os.alike[source] = epoch;  // this warp alone writes and reads it
      } else {
        Failure failure = failure_of(rank_, call_, FailureKind::call_differs, Actor::subscriber);
        failure.peer = source;
        failure.expected = call_.identity;
        failure.seen = identity;
        if (epoch > call_.epoch) {  // no rank can be that far ahead
          failure.kind = FailureKind::count_damaged;
          failure.seen = said;
        }
        rank_.fail(failure);
      }
    }
    P::sync_lanes();
  }

  u64 look(u32 source, u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.count(call_.epoch, source, expert))));
  }

  /// Counts that a lane asks for at once.
  static constexpr u32 kLooks = 8;

  /// A source's counts are looked at in strips of one count a lane; the strips of all sources
  /// follow each other.
  u32 strips() const { return ceil_div(rank_.geometry().local_experts(), P::kLanes); }
  /// The expert of this lane in a strip, if there is one.
  u32 expert_in(u32 strip) const { return strip % strips() * P::kLanes + P::lane(); }

  /// What the strips of a source have said so far.
  struct SoFar {
    bool reads = false;  // it was not known, and no count is missing or wrong
    u32 rows = 0;        // of all experts
  };

  /// Reads a strip, in which this lane's count is `word`; true if it is a source's last strip and
  /// all of the source's counts are here.
  bool decode(u32 strip, u64 word, SoFar& so_far) {
    const Geometry& geometry = rank_.geometry();
    const u32 source = strip / strips();
    const u32 expert = expert_in(strip);
    if (strip % strips() == 0) {
      // This warp alone writes that word.
      const bool alike = !says_calls() || rank_.os.alike[source] == call_.epoch;
      so_far = {alike && rank_.os.counts_known[source] != call_.epoch, 0};
    }
    if (!so_far.reads) {
      return false;
    }
    so_far.reads = false;
    const bool there = expert < geometry.local_experts();
    const u32 epoch = static_cast<u32>(word >> 32);
    if (P::ballot(there && epoch != call_.epoch) != 0) {
      if (there && epoch > call_.epoch) {  // no rank can be that far ahead
        reject(FailureKind::count_damaged, source, expert, word);
      }
      return false;
    }
    const u32 rows = there ? static_cast<u32>(word) : 0;
    if (P::ballot(rows > geometry.capacity) != 0) {
      if (rows > geometry.capacity) {
        reject(FailureKind::count_too_large, source, expert, rows);
      }
      return false;
    }
    const u32 inclusive = so_far.rows + P::inclusive_scan(rows);
    if (there) {
      rank_.os.receive_starts(source)[expert] = inclusive - rows;
      rank_.memory.receive_starts(source)[expert] = inclusive - rows;
    }
    so_far = {true, P::broadcast(inclusive, P::kLanes - 1)};
    return strip % strips() == strips() - 1;
  }

  /// Makes a source known whose counts have been read and sum to `rows`; false if these are too
  /// many. `returned`: rows of all sources whose results have left.
  bool finish(u32 source, u32 rows, u32 returned) {
    const Geometry& geometry = rank_.geometry();
    if (rows > geometry.cell_rows_used()) {
      reject(FailureKind::count_too_large, source, kNone, rows);
      return false;
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      rank_.os.receive_starts(source)[geometry.local_experts()] = rows;
      rank_.memory.receive_starts(source)[geometry.local_experts()] = rows;
      // Algorithm 2, SelfCorrectTaskBound: the bound counted this source's cell as full. Relaxed:
      // the scheduler compares a number; nothing is read because of it.
      const u32 bound = P::template load_relaxed<Scope::block>(rank_.os.rows_expected);
      P::template store_relaxed<Scope::block>(rank_.os.rows_expected,
                                              bound - (geometry.cell_rows_used() - rows));
      // Before the arrivals subscriber may note the first rows.
      PeerRecord& record = rank_.memory.peer_records[source];
      record.counts_ns = P::now_ns();
      record.rows_returned = returned;
      // Publishes receive_starts(source) to the arrivals subscriber, which acquires this word.
      P::template store_release<Scope::block>(&rank_.os.counts_known[source], call_.epoch);
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
  u32 group_ = 0;  // of sources, whose calls the next step looks at
  bool told_ = false;
  GraceTime<P> grace_time_;
};

}  // namespace moeos
