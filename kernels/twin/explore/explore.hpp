// SPDX-License-Identifier: Apache-2.0
// One run of the real device OS in a small random world, in an order and with a fault that follow
// from a seed; the run must not give a wrong result, and must end.
#pragma once

#include <string>

#include "kernels/twin/explore/schedule.hpp"
#include "runtime/memory/watchdog.hpp"
#include "runtime/words/base.hpp"

namespace moeos::twin {

/// What happens to a world in addition to its calls.
enum class Scenario : u32 {
  quiet = 0,  ///< nothing: every result is right
  nic = 1,    ///< remote peers' puts go through a hostile network card: every result is right
  // With the card or without:
  die = 2,     ///< a rank stops for good: the others name it within the deadline
  stall = 3,   ///< a rank stands still for up to three deadlines: the others name it, or all is
               ///< right
  damage = 4,  ///< a word of a heap or of a rank's queues is overwritten: an error, or all is right
  late = 5,    ///< ranks begin calls late, by up to a tenth of the deadline: every result is right
  backward = 6,  ///< calls are gradient calls, in one of the other scenarios, chosen by the seed
};
inline constexpr u32 kScenarios = 7;

struct Outcome {
  std::string wrong;  // what must not have happened, or ""
  u32 world;          // ranks
  u32 calls;          // calls that ended well and were compared with the right result
  u32 failed;         // ranks whose calls ended with a failure
  u64 kinds;          // bit FailureKind: kinds of these failures
  u64 points;         // atomic accesses
  u64 switches;       // between fibers
  u64 latency_ns;     // virtual: from the fault to the last error of a rank that is not the faulty
                      // one, or 0
  u64 deadline_ns;
  bool happened;      // the fault fell into the calls
  std::string fault;  // in words
};

/// Equal arguments give equal outcomes.
Outcome explore(u64 seed, Strategy strategy, Scenario scenario);

}  // namespace moeos::twin
