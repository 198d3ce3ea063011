// SPDX-License-Identifier: Apache-2.0
// Runs of the explorer without Python, for tests that break the runtime and want it noticed.
//
// Usage: test_explore SEED RUNS. Prints what must not have happened and exits with 1 at the first
// run, in any scenario and strategy, that is wrong.
#include <cstdio>
#include <cstdlib>

#include "kernels/twin/explore/explore.hpp"

int main(int count, char** arguments) {
  using namespace moeos::twin;
  if (count != 3) {
    std::fprintf(stderr, "usage: %s SEED RUNS\n", arguments[0]);
    return 2;
  }
  const moeos::u64 first = std::strtoull(arguments[1], nullptr, 10);
  const moeos::u64 runs = std::strtoull(arguments[2], nullptr, 10);
  for (moeos::u64 seed = first; seed < first + runs; ++seed) {
    for (moeos::u32 scenario = 0; scenario < kScenarios; ++scenario) {
      for (moeos::u32 strategy = 0; strategy < kStrategies; ++strategy) {
        const Outcome outcome =
            explore(seed, static_cast<Strategy>(strategy), static_cast<Scenario>(scenario));
        if (!outcome.wrong.empty()) {
          std::printf("seed %llu, scenario %u, strategy %u: %s\n", seed, scenario, strategy,
                      outcome.wrong.c_str());
          return 1;
        }
      }
    }
  }
  std::printf("nothing is wrong\n");
  return 0;
}
