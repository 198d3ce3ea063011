// SPDX-License-Identifier: Apache-2.0
// What each actor of a rank did in the last call, and when: a bounded list of events for each
// actor.
//
// Only where Geometry::trace_events asks for it: a kernel compiled without it contains no trace
// code. Times are of the device's clock, which all actors of a device share. Must not depend on:
// what the host makes of events.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/record/trace_event.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// The list of one actor: a processor, a courier, or an actor of the OS block. Events are counted
/// here: a look at memory for each would slow down what the actor does next. So each list has one
/// such object at a time.
template <Platform P>
class Trace {
 public:
  /// `actor`: a processor's index; from `processors` on a courier's, then the OS block's.
  Trace(const Rank<P>& rank, u32 actor) : rank_(rank), actor_(actor) {}

  static bool wanted(const Geometry& geometry) { return geometry.trace_events != 0; }

  /// By one lane, before the call: forgets the last call.
  void clear() const {
    if (wanted(rank_.geometry())) {
      rank_.memory.trace_counts[actor_] = 0;
    }
  }
  /// By all lanes: continues after what this warp has noted by another object, which is gone.
  void resume() {
    if (wanted(rank_.geometry())) {
      count_ = rank_.memory.trace_counts[actor_];
    }
  }
  /// By the first lane: notes an event, or, when the list is full, that one more is missing.
  void note(const TraceEvent& event) {
    if (wanted(rank_.geometry())) {
      put(event, count_);
      rank_.memory.trace_counts[actor_] = ++count_;
    }
  }
  /// By all lanes: notes an event for each lane that has one.
  void note_each(const TraceEvent& event, bool there) {
    if (!wanted(rank_.geometry())) {
      return;
    }
    const u32 lanes = P::ballot(there);
    count_ = P::broadcast(count_, 0);
    if (there) {
      put(event, count_ + P::lanes_before(lanes));
    }
    count_ += P::count(lanes);
    if (P::lane() == 0) {
      rank_.memory.trace_counts[actor_] = count_;
    }
  }

 private:
  void put(const TraceEvent& event, u32 number) const {
    if (number < rank_.geometry().trace_events) {
      rank_.memory.trace_events[u64{actor_} * rank_.geometry().trace_events + number] = event;
    }
  }

  const Rank<P>& rank_;
  u32 actor_;
  u32 count_ = 0;  // events, noted or missing
};

/// The list of the OS block's actor that notes events of this kind.
template <Platform P>
Trace<P> trace_of(const Rank<P>& rank, TraceKind kind) {
  const Geometry& geometry = rank.geometry();
  return Trace<P>(rank,
                  geometry.processors + geometry.couriers + static_cast<u32>(kind) - kTaskKinds);
}

/// The time, if events are traced; else 0.
template <Platform P>
u64 trace_time(const Geometry& geometry) {
  return Trace<P>::wanted(geometry) ? P::now_ns() : 0;
}

}  // namespace moeos
