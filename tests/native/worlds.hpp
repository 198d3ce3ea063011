// SPDX-License-Identifier: Apache-2.0
// The command line of programs that run random worlds, one a seed: SEED and how many.
//
// Must not depend on: what a world is.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "runtime/words/base.hpp"

namespace moeos {

/// run(seed) says whether a world's calls end as they must, and prints what does not. `what`:
/// plural, what these worlds are called. Returns the program's status.
template <class Run>
int run_seeds(int count, char** arguments, const char* what, Run run) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s SEED NUMBER\n", arguments[0]);
    return 2;
  }
  const u64 first = std::strtoull(arguments[1], nullptr, 10);
  const u64 number = std::strtoull(arguments[2], nullptr, 10);
  u64 failed = 0;
  for (u64 seed = first; seed < first + number; ++seed) {
    failed += run(seed) ? 0 : 1;
  }
  std::printf("%llu %s, %llu failed\n", number, what, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace moeos
