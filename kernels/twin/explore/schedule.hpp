// SPDX-License-Identifier: Apache-2.0
// Actors of many ranks as fibers of one thread, which take turns as a seed determines.
//
// Every atomic access is a point at which another fiber may go on, so a run visits one of the
// orders in which real threads could have met; the seed reproduces it. Time is virtual: it passes
// when every fiber has found nothing to do, so a deadline ends only a run in which nothing can
// move. All memory accesses are ordered here: ThreadSanitizer and a witness (witness.hpp) find
// accesses that lack an order. Must not depend on: ranks, what an actor does.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#include "kernels/twin/crew.hpp"
#include "kernels/twin/explore/draw.hpp"
#include "kernels/twin/explore/witness.hpp"
#include "runtime/platform/twin/interposer.hpp"
#include "runtime/words/base.hpp"

namespace moeos::twin {

/// How the next fiber is chosen.
enum class Strategy : u32 {
  random = 0,  ///< any fiber that has something to do, now and then
  /// The fiber of the highest priority, which changes at few points: finds errors that need few
  /// switches at the right points (Burckhardt et al., "A Randomized Scheduler with Probabilistic
  /// Guarantees of Finding Bugs", ASPLOS 2010).
  priority = 1,
};
inline constexpr u32 kStrategies = 2;

/// Something other than a fiber that acts between fibers' accesses: a network card, a fault.
class Device {
 public:
  virtual ~Device() = default;
  /// Acts once, or not; but if all fibers wait, it must act if it can. True: it has acted, or can.
  virtual bool act(Random& random, bool all_wait) = 0;
};

class Schedule : public Interposer {
 public:
  Schedule(u64 seed, Strategy strategy);
  ~Schedule() override;
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// Adds a fiber and returns its number. `group` (a rank) can be stopped as a whole.
  u64 spawn(u32 group, std::function<void()> body);
  bool ended(u64 fiber) const;
  /// Informs the witness, if there is one, that the running fiber has waited for one that has
  /// ended.
  void note_join(u64 fiber) const;
  /// `device` acts between accesses, and must outlive the run.
  void attach(Device* device) { devices_.push_back(device); }

  /// Runs until every fiber has ended that is not stopped. False: that took more than `points`
  /// accesses, and nothing of the schedule can be used again.
  bool run(u64 points);

  /// No fiber of the group goes on: its process has died.
  void stop(u32 group);
  /// The group's fibers go on at this time.
  void hold(u32 group, u64 until_ns);
  /// No group is held any longer.
  void release();

  /// Atomic accesses so far, of all fibers.
  u64 points() const { return points_; }
  u64 switches() const { return switches_; }

  void at_access() override;
  bool at_pause() override;
  u64 now_ns() override { return now_ns_; }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<u8[]> stack;
    std::function<void()> body;
    u64 number = 0;
    u32 group = 0;
    u64 priority = 0;
    u64 held_until_ns = 0;
    bool resting = false;  // it has looked and found nothing
    bool ended = false;
    bool stopped = false;
  };

  static constexpr u64 kTickNs = 2'000;  // in which every fiber looks once more
  /// Early looks of fibers, at most, before all must rest. Without a bound, many fibers that look
  /// often never rest at once, and time stands still.
  static constexpr u32 kEarlyLooksMost = 1024;

  static void enter(u32 low, u32 high);
  bool may_go_on(const Fiber& fiber) const;
  /// The fiber that goes on; null when none is left.
  Fiber* choose();
  Fiber* choose_among(const std::vector<Fiber*>& fibers);
  bool act_devices(bool all_wait);
  void switch_to_next();

  Random random_;
  Strategy strategy_;
  u32 switch_one_in_;    // accesses
  u32 wake_one_in_;      // accesses, at one of which a fiber looks again that had found nothing
  u32 early_looks_ = 0;  // such looks since all rested
  std::vector<std::unique_ptr<Fiber>> fibers_;  // fibers that have not ended, in the order of their
                                                // numbers
  std::vector<std::unique_ptr<Fiber>> ended_;   // fibers whose stacks can be used again
  std::vector<u64> witnessed_;                  // [number]: the witness's numbers of all fibers
  std::vector<Device*> devices_;
  std::vector<Fiber*> candidates_;
  Fiber* running_ = nullptr;
  ucontext_t main_;
  u64 now_ns_ = kTickNs;
  u64 spawned_ = 0;
  u64 points_ = 0;
  u64 points_most_ = 0;
  u64 switches_ = 0;
};

/// A crew whose workers are fibers, new ones for each call.
class FiberCrew : public Crew {
 public:
  FiberCrew(Schedule& schedule, u32 group, u32 workers, std::function<void(u32)> share)
      : schedule_(schedule), group_(group), workers_(workers), share_(std::move(share)) {}
  void start() override;
  void join() override;

 private:
  Schedule& schedule_;
  u32 group_;
  u32 workers_;
  std::function<void(u32)> share_;
  std::vector<u64> fibers_;
};

}  // namespace moeos::twin
