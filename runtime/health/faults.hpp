// SPDX-License-Identifier: Apache-2.0
// Faults on demand: how an actor does what its rank's plan (records.def) says.
//
// Nothing is compiled on a machine without P::has_faults(). Every wait here ends at its time, or
// when the call has failed, which the scheduler's Watch ensures: a fault that lasts longer than the
// deadline is noticed like any other silence. The loops over a plan's entries are not unrolled, to
// keep code small. Must not depend on: how a plan came here; what a part computes.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/records.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Waits until time `ns`, or until the call must be left. One lane.
template <Platform P>
void wait_until(const Rank<P>& rank, const Call& call, u64 ns) {
  u32 idle = 0;
  while (P::now_ns() < ns && !rank.leaving(call.epoch)) {
    P::pause(idle);
  }
}

/// The end of a hold, which begins with the first actor that asks. One lane.
template <Platform P>
u64 held_until(const FaultPlan& plan, Hold& hold) {
  const u64 now = P::now_ns();
  // Publishes nothing: of the actors that come here, it elects the one whose time counts.
  const bool first =
      P::template compare_exchange_release<Scope::system>(&hold.since_ns, u64{0}, now);
  // Relaxed: only the word itself is used.
  const u64 since = P::template load_relaxed<Scope::system>(&hold.since_ns);
  if (first && hold.kills != 0) {
    // Publishes nothing; asks a thread of the host.
    P::template store_release<Scope::system>(plan.kill_word, 1U);
  }
  const u64 end = since + hold.hold_ns;
  return end < since ? ~u64{0} : end;
}

/// Calls visit(plan, hold) for each hold of the plan that concerns a part of a stage, in its order.
template <Platform P, class Visit>
void for_each_hold(const Rank<P>& rank, Stage stage, Visit visit) {
  if constexpr (P::has_faults()) {
    FaultPlan& plan = *rank.memory.faults;
    // Relaxed: it changes only between calls (Scheduler::interrupt).
    const u32 call = P::template load_relaxed<Scope::device>(rank.memory.calls) + 1;
#pragma unroll 1
    for (u32 i = 0; i < plan.holds; ++i) {
      Hold& hold = plan.hold[i];
      if (hold.call == call && (hold.stage == stage || hold.stage == Stage::start)) {
        visit(plan, hold);
      }
    }
  }
}

/// Keeps a processor from beginning a part of a stage, or any part of a call, as long as the plan
/// says. One warp. False: the call must be left.
template <Platform P>
bool hold_back(const Rank<P>& rank, const Call& call, Stage stage) {
  bool go = true;
  for_each_hold(rank, stage, [&](const FaultPlan& plan, Hold& hold) {
    if (P::lane() == 0) {
      wait_until(rank, call, held_until<P>(plan, hold));
    }
    P::sync_lanes();
    go = go && !agreed<P>(rank.leaving(call.epoch));
  });
  return go;
}

/// hold_back for an actor that must not wait, but comes back: whether it is held back now. A hold
/// begins when the hold before it is over, as there.
template <Platform P>
bool is_held_back(const Rank<P>& rank, Stage stage) {
  bool held = false;
  for_each_hold(rank, stage, [&](const FaultPlan& plan, Hold& hold) {
    held = held || agreed<P>(P::lane() == 0 && P::now_ns() < held_until<P>(plan, hold));
  });
  return held;
}

/// Bytes of results that a part of a tile sends to a peer: the bytes of the tile's rows are divided
/// among its parts.
inline u64 result_bytes_to(const Geometry& geometry, const Task& task, u32 peer) {
  u64 rows = 0;
#pragma unroll 1
  for (u32 s = 0; product_of(geometry, task).sink == Sink::owners && s < task.segment_count; ++s) {
    rows += task.segments[s].source == peer ? task.segments[s].rows : 0;
  }
  return rows * geometry.returned_bytes / task.parts;
}

/// Called before a part begins that sends bytes_to(peer) bytes to a peer: a slow link lets them
/// through later. Here and not where they are announced, since the warp that fetches parts has room
/// for more code. Returns how many ns it has waited. One warp.
template <Platform P, class Bytes>
u64 wait_for_links(const Rank<P>& rank, const Call& call, Bytes bytes_to) {
  if constexpr (P::has_faults()) {
    const u64 begun = P::now_ns();
    FaultPlan& plan = *rank.memory.faults;
#pragma unroll 1
    for (u32 i = 0; i < plan.links; ++i) {
      SlowLink& link = plan.link[i];
      const u64 bytes = bytes_to(link.peer);
      if (bytes == 0) {
        continue;
      }
      if (P::lane() == 0) {
        const u64 now = P::now_ns();
        u64 through = now;
        if (link.bytes_per_second != 0) {
          const u64 ns = bytes * 1'000'000'000ULL / link.bytes_per_second;
          u64 before = 0;
          // Each retry means that another processor has put rows into the link's queue. Publishes
          // nothing: it only takes a place in that queue.
          do {
            before = P::template load_relaxed<Scope::system>(&link.free_ns);
            through = maximum(before, now) + ns;
          } while (
              !P::template compare_exchange_release<Scope::system>(&link.free_ns, before, through));
        }
        wait_until(rank, call, through + link.latency_ns);
      }
      P::sync_lanes();
    }
    return P::now_ns() - begun;
  }
  return 0;
}

/// A processor's pace: this one is as fast as it can be.
template <Platform P, bool = P::has_faults()>
class Pace {
 public:
  Pace(const Rank<P>& /*rank*/, u32 /*index*/) {}
  void begin_part(const Rank<P>& /*rank*/, const Call& /*call*/) const {}
  u64 slow_down(const Rank<P>& /*rank*/, const Call& /*call*/) const { return 0; }
  void end_part() const {}
};

/// A processor as slow as the plan says. Every function is called by one warp.
template <Platform P>
class Pace<P, true> {
 public:
  Pace(const Rank<P>& rank, u32 index) {
    FaultPlan& plan = *rank.memory.faults;
#pragma unroll 1
    for (u32 i = 0; i < plan.processors; ++i) {
      if (plan.processor[i].index == index) {
        slow_ = &plan.processor[i];
      }
    }
  }

  /// Called before a part begins that will be complete: a slow processor works at one part at a
  /// time, so that the part's time is its own.
  void begin_part(const Rank<P>& rank, const Call& call) const {
    if (slow_ != nullptr && P::lane() == 0) {
      u32 idle = 0;
      // Pairs with end_part: the warp that looked at the time of the part before has done so.
      while (P::template load_acquire<Scope::device>(&slow_->under_way) != 0 &&
             !rank.leaving(call.epoch)) {
        P::pause(idle);
      }
      // Relaxed: the block's own warps learn of the part, and of its time, through its slot.
      P::template store_relaxed<Scope::device>(&slow_->under_way, 1U);
      slow_->since_ns = P::now_ns();
    }
    P::sync_lanes();
  }

  /// Called when a part is done, and before it is announced. Returns by how many nanoseconds it
  /// takes longer, to the first lane.
  u64 slow_down(const Rank<P>& rank, const Call& call) const {
    u64 longer = 0;
    if (slow_ != nullptr && P::lane() == 0) {
      const u64 now = P::now_ns();
      constexpr u64 kOnce = 1000;
      longer = (now - slow_->since_ns) / kOnce * (slow_->factor_milli - kOnce) + slow_->extra_ns;
      wait_until(rank, call, now + longer);
    }
    P::sync_lanes();
    return longer;
  }

  /// Called when the part has been announced.
  void end_part() const {
    if (slow_ != nullptr && P::lane() == 0) {
      // Publishes that no warp looks at the part's time any more; pairs with begin_part.
      P::template store_release<Scope::device>(&slow_->under_way, 0U);
    }
  }

 private:
  SlowProcessor* slow_ = nullptr;
};

}  // namespace moeos
