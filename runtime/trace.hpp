// What each actor of a rank did in the last call, and when: a bounded list of events an actor.
//
// Only where Geometry::trace_events asks for it: a kernel that is compiled without holds nothing of
// this. Times are of the device's clock, which all actors of a device share. May not know: what the
// host makes of it.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/trace_event.hpp"

namespace moeos {

/// The list of one actor: a processor, a courier, or one of the OS block's.
template <Platform P>
class Trace {
 public:
  /// `actor`: a processor's index; from `processors` on a courier's, then the OS block's.
  Trace(const Rank<P>& rank, u32 actor) : rank_(rank), actor_(actor) {}

  static bool wanted(const Geometry& geometry) { return geometry.trace_events != 0; }

  /// By one lane of the only warp that uses this list: forgets the last call.
  void clear() const {
    if (wanted(rank_.geometry())) {
      rank_.memory.trace_counts[actor_] = 0;
    }
  }
  /// The same lane: an event, or, when the list is full, one more that is missing.
  void note(const TraceEvent& event) const {
    if (!wanted(rank_.geometry())) {
      return;
    }
    const u32 number = rank_.memory.trace_counts[actor_]++;
    if (number < rank_.geometry().trace_events) {
      rank_.memory.trace_events[u64{actor_} * rank_.geometry().trace_events + number] = event;
    }
  }

 private:
  const Rank<P>& rank_;
  u32 actor_;
};

/// The list of the OS block's actor that notes events of this kind.
template <Platform P>
Trace<P> trace_of(const Rank<P>& rank, TraceKind kind) {
  const Geometry& geometry = rank.geometry();
  return Trace<P>(rank,
                  geometry.processors + geometry.couriers + static_cast<u32>(kind) - kTaskKinds);
}

/// The time, where somebody wants it.
template <Platform P>
u64 trace_time(const Geometry& geometry) {
  return Trace<P>::wanted(geometry) ? P::now_ns() : 0;
}

}  // namespace moeos
