// SPDX-License-Identifier: Apache-2.0
// Which calls a rank of the twin may make: one after the other, and not for ever.
//
// Prints what was wrong and exits with 1.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/twin/explore/random_world.hpp"
#include "tests/native/expect.hpp"

namespace {

using namespace moeos;
using namespace moeos::twin;

/// A world of at least two ranks, and a call of each.
struct World {
  explicit World(u64 seed) : random(seed), world(draw_world(random, WorldScale::threads)) {
    while (world.geometry.world < 2) {
      world = draw_world(random, WorldScale::threads);
    }
    world.settings.deadline_ns = 20'000'000'000;
    experts = draw_experts(random, world);
    heaps = std::make_unique<Heaps>(world.geometry);
    for (u32 p = 0; p < world.geometry.world; ++p) {
      ranks.push_back(std::make_unique<TwinRank>(world.geometry, world.shape, p, heaps->addresses(),
                                                 world.settings));
      calls.push_back(draw_call(random, world));
    }
  }

  Failure call(u32 rank) {
    const Operands operands = operands_of(world, experts, rank, calls[rank]);
    return ranks[rank]->forward(operands, calls[rank].tokens, world.geometry.capacity);
  }

  /// A call of the ranks from `first` on, each in a thread.
  std::vector<Failure> call_from(u32 first) {
    std::vector<Failure> failures(world.geometry.world);
    std::vector<std::thread> threads;
    for (u32 p = first; p < world.geometry.world; ++p) {
      threads.emplace_back([&failures, this, p] { failures[p] = call(p); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return failures;
  }

  Random random;
  RandomWorld world;
  Experts experts;
  std::unique_ptr<Heaps> heaps;
  std::vector<std::unique_ptr<TwinRank>> ranks;
  std::vector<RankCall> calls;
};

void test_the_last_epoch_is_an_error_on_every_rank() {
  World w(1);
  for (auto& rank : w.ranks) {
    *rank->memory().epoch = kNone - 1;
  }
  for (const Failure& failure : w.call_from(0)) {
    expect(failure.kind == FailureKind::none, "the last call but none ends well");
  }
  for (u32 again = 0; again < 2; ++again) {
    for (const Failure& failure : w.call_from(0)) {
      expect(failure.kind == FailureKind::epochs_spent, "there is no further call");
    }
  }
}

void test_a_call_beside_another_is_refused_and_leaves_it_alone() {
  World w(2);
  Failure failures[2] = {};
  std::atomic<u32> returned = 0;
  std::vector<std::thread> threads;
  for (Failure& failure : failures) {
    threads.emplace_back([&] {
      failure = w.call(0);
      ++returned;
    });
  }
  while (returned == 0) {  // the other one waits for its peers
    std::this_thread::yield();
  }
  w.call_from(1);
  for (std::thread& thread : threads) {
    thread.join();
  }
  const bool first = failures[0].kind == FailureKind::none;
  expect(failures[first ? 0 : 1].kind == FailureKind::none, "the first call ends well");
  expect(failures[first ? 1 : 0].kind == FailureKind::calls_at_once, "the second is refused");
  expect(largest_error(w.world, w.experts, w.calls[0]) < kErrorMost, "the first one is right");
}

}  // namespace

int main() {
  test_the_last_epoch_is_an_error_on_every_rank();
  test_a_call_beside_another_is_refused_and_leaves_it_alone();
  return failed == 0 ? 0 : 1;
}
