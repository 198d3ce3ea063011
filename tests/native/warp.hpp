// SPDX-License-Identifier: Apache-2.0
// The twin's machine with a warp of 32 lanes, as the GPU has, which take turns in one thread.
//
// A lane goes on until it asks for something of the others, and then the next one does. What only
// some of the lanes ask for is an error. Must not depend on: what lanes compute.
#pragma once

#include <ucontext.h>

#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/platform/twin/platform.hpp"

class Warp : public moeos::twin::Machine {
  using u32 = moeos::u32;
  using u64 = moeos::u64;

 public:
  static constexpr u32 kLanes = 32;

  explicit Warp(const Machine& machine) : Machine(machine) {}

  /// Each lane does `body`.
  static void run(std::function<void()> body) {
    its.body = std::move(body);
    std::vector<std::array<char, kStack>> stacks(kLanes);
    for (u32 lane = 0; lane < kLanes; ++lane) {
      ucontext_t& context = its.contexts[lane];
      getcontext(&context);
      context.uc_stack.ss_sp = stacks[lane].data();
      context.uc_stack.ss_size = kStack;
      context.uc_link = lane + 1 < kLanes ? &its.contexts[lane + 1] : &its.caller;
      makecontext(&context, &begin, 0);
    }
    its.lane = its.ended = 0;
    swapcontext(&its.caller, &its.contexts[0]);
  }

  static u32 lane() { return its.lane; }
  template <class T>
  static T broadcast(T value, u32 source_lane) {
    return static_cast<T>(exchange(Asked::broadcast, value)[source_lane]);
  }
  static u32 ballot(bool predicate) {
    const Words& words = exchange(Asked::ballot, predicate ? 1 : 0);
    u32 lanes = 0;
    for (u32 i = 0; i < kLanes; ++i) {
      lanes |= static_cast<u32>(words[i]) << i;
    }
    return lanes;
  }
  static u32 lanes_before(u32 ballot) { return count(ballot & ((1U << lane()) - 1)); }
  static u32 count(u32 ballot) { return static_cast<u32>(std::popcount(ballot)); }
  static u32 first_lane(u32 ballot) {
    return ballot == 0 ? 0 : static_cast<u32>(std::countr_zero(ballot));
  }
  static u32 inclusive_scan(u32 value) {
    const Words& words = exchange(Asked::scan, value);
    u32 sum = 0;
    for (u32 i = 0; i <= lane(); ++i) {
      sum += static_cast<u32>(words[i]);
    }
    return sum;
  }
  static u32 exclusive_or(u32 value) {
    u64 all = 0;
    for (const u64 word : exchange(Asked::exclusive_or, value)) {
      all ^= word;
    }
    return static_cast<u32>(all);
  }
  static u32 alike(u32 value) {
    const Words& words = exchange(Asked::alike, value);
    u32 lanes = 0;
    for (u32 i = 0; i < kLanes; ++i) {
      lanes |= (words[i] == value ? 1U : 0U) << i;
    }
    return lanes;
  }
  static void sync_lanes() { exchange(Asked::sync, 0); }

 private:
  static constexpr u32 kStack = 64 * 1024;
  enum class Asked : u32 { broadcast, ballot, scan, exclusive_or, alike, sync };
  using Words = std::array<u64, kLanes>;

  struct State {  // zeros, as all that is static
    std::function<void()> body;
    std::array<ucontext_t, kLanes> contexts;
    ucontext_t caller;
    u32 lane;
    u32 ended;  // lanes
    // Of this time and the one before, which lanes after this one have yet to read.
    std::array<Words, 2> words;
    std::array<std::array<Asked, kLanes>, 2> asked;
    std::array<u32, kLanes> times;
  };
  static inline State its;

  static void begin() {
    its.body();
    ++its.ended;
    ++its.lane;  // who goes on
  }

  /// What each lane has brought, once all have.
  static const Words& exchange(Asked asked, u64 value) {
    const u32 me = its.lane;
    const u32 time = its.times[me]++ % 2;
    its.words[time][me] = value;
    its.asked[time][me] = asked;
    require(its.ended == 0, "a lane asks others that have ended");
    its.lane = (me + 1) % kLanes;
    swapcontext(&its.contexts[me], &its.contexts[its.lane]);
    for (const Asked others : its.asked[time]) {
      require(others == asked, "lanes ask for different things at once");
    }
    return its.words[time];
  }
  static void require(bool holds, const char* what) {
    if (!holds) {
      std::printf("FAILED: %s\n", what);
      std::exit(1);
    }
  }
};
static_assert(moeos::Platform<Warp>);
