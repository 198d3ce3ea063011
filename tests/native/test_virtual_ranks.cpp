// SPDX-License-Identifier: Apache-2.0
// Virtual ranks without Python: random layers through the whole protocol, each result checked in
// double precision.
//
// Built and run by tests/native/test_native.py, once plainly with MOEOS_DEBUG_CHECKS and once with
// each sanitizer. It is small on purpose: ThreadSanitizer sees every access of the runtime, and
// nothing else.
//
// Usage: test_virtual_ranks SEED WORLDS. Prints what failed and exits with 1.
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/twin/explore/random_world.hpp"
#include "tests/native/worlds.hpp"

namespace {

using moeos::Failure;
using moeos::FailureKind;
using moeos::Geometry;
using moeos::i32;
using moeos::u32;
using moeos::u64;
using moeos::twin::draw_calls;
using moeos::twin::draw_experts;
using moeos::twin::draw_slices;
using moeos::twin::draw_world;
using moeos::twin::Experts;
using moeos::twin::Heaps;
using moeos::twin::holder_of;
using moeos::twin::kErrorMost;
using moeos::twin::largest_error;
using moeos::twin::Operands;
using moeos::twin::operands_of;
using moeos::twin::Random;
using moeos::twin::RandomWorld;
using moeos::twin::RankCall;
using moeos::twin::settings_of;
using moeos::twin::TwinRank;
using moeos::twin::WorldScale;

bool run_world(u64 seed) {
  constexpr u32 kCalls = 6;
  Random random(seed);
  RandomWorld world = draw_world(random, WorldScale::threads);
  draw_slices(random, world, 2);
  const Geometry& g = world.geometry;
  const Experts experts = draw_experts(random, world);
  std::vector<std::vector<RankCall>> calls = draw_calls(random, world, kCalls);
  const Heaps heaps(g);
  std::vector<std::unique_ptr<TwinRank>> ranks;
  for (u32 p = 0; p < g.ranks(); ++p) {
    ranks.push_back(std::make_unique<TwinRank>(g, world.shape, holder_of(world, p),
                                               heaps.addresses(), settings_of(world, p)));
  }
  std::vector<Failure> failures(g.ranks());
  std::vector<std::thread> threads;
  for (u32 p = 0; p < g.ranks(); ++p) {
    threads.emplace_back([&, p] {
      for (RankCall& call :
           calls[p]) {  // no barrier between calls: ranks run as far ahead as the protocol allows
        const Operands operands = operands_of(world, experts, p, call);
        failures[p] = ranks[p]->forward(operands, call.tokens, g.capacity);
        if (failures[p].kind != FailureKind::none) {
          return;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  bool good = true;
  for (u32 p = 0; p < g.ranks(); ++p) {
    if (failures[p].kind != FailureKind::none) {
      std::printf(
          "seed %llu: rank %u failed with kind %u: peer %u expert %d chunk %d epoch %u expected "
          "%llu seen %llu\n",
          seed, p, static_cast<u32>(failures[p].kind), failures[p].peer,
          static_cast<i32>(failures[p].expert), static_cast<i32>(failures[p].chunk),
          failures[p].epoch, failures[p].expected, failures[p].seen);
      good = false;
      continue;
    }
    for (u32 c = 0; c < kCalls; ++c) {
      const double error = largest_error(world, experts, calls[p][c], p);
      if (!(error < kErrorMost)) {
        std::printf(
            "seed %llu: rank %u call %u: error %g (world %u experts %u k %u tokens %u of %u)\n",
            seed, p, c, error, g.world, g.experts, g.top_k, calls[p][c].tokens, g.max_tokens);
        good = false;
      }
    }
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  return moeos::run_seeds(count, arguments, "worlds", run_world);
}
