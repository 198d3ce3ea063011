// SPDX-License-Identifier: Apache-2.0
// The explorer's clock passes however many fibers wait, and however often they look. Must not
// depend on: ranks, what an actor does.
#include "kernels/twin/explore/schedule.hpp"
#include "tests/native/expect.hpp"

namespace {

using namespace moeos;
using namespace moeos::twin;

/// Fibers that look and find nothing, at so many words each, until a deadline has passed.
void expect_end(u64 seed, Strategy strategy, u32 fibers, u32 words) {
  constexpr u64 kDeadlineNs = 1'000'000;
  constexpr u64 kPointsMost = 4'000'000;
  Schedule schedule(seed, strategy);
  for (u32 fiber = 0; fiber < fibers; ++fiber) {
    schedule.spawn(fiber, [&schedule, words] {
      while (schedule.now_ns() < kDeadlineNs) {
        for (u32 word = 0; word < words; ++word) {
          schedule.at_access();
        }
        schedule.at_pause();
      }
    });
  }
  expect(schedule.run(kPointsMost), "a deadline passes");
}

}  // namespace

int main() {
  for (u64 seed = 1; seed <= 12; ++seed) {  // looks are early in all proportions
    expect_end(seed, Strategy::random, 28, 16);
    expect_end(seed, Strategy::priority, 28, 16);
  }
  return failed == 0 ? 0 : 1;
}
