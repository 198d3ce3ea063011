// SPDX-License-Identifier: Apache-2.0
// Calls of gradients without Python: random layers through the whole protocol, each gradient
// checked in double precision.
//
// Built and run by tests/native/test_native.py with each sanitizer, as test_virtual_ranks.cpp is.
//
// Usage: test_gradients SEED WORLDS. Prints what failed and exits with 1.
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/twin/explore/gradient_world.hpp"
#include "tests/native/worlds.hpp"

namespace {

using namespace moeos;
using namespace moeos::twin;

constexpr u32 kCalls = 3;

bool run_world(u64 seed) {
  Random random(seed);
  RandomWorld world = draw_world(random, WorldScale::threads);
  draw_slices(random, world, 2);
  make_gradient_world(world);
  const Geometry& g = world.geometry;
  const Experts experts = draw_experts(random, world);
  std::vector<std::vector<RankCall>> calls = draw_calls(random, world, kCalls);
  std::vector<std::vector<CallGradients>> gradients = draw_gradients(random, world, calls);
  std::vector<WeightSums<float>> found;
  for (u32 p = 0; p < g.ranks(); ++p) {
    found.push_back(no_sums(world, experts, p));
  }
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
      for (u32 c = 0; c < kCalls && failures[p].kind == FailureKind::none; ++c) {
        const GradientOperands its = gradients_of(world, gradients[p][c], found[p]);
        Operands operands = operands_of(world, experts, p, calls[p][c]);
        operands.gradients = &its;
        failures[p] = ranks[p]->forward(operands, calls[p][c].tokens, g.capacity);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  bool good = true;
  WeightSums<double> right = no_sums(experts);
  const auto require = [&](bool holds, u32 rank, const char* what, double error) {
    if (!holds) {
      std::printf("seed %llu: rank %u, %s: error %g (world %u slices %u experts %u k %u)\n", seed,
                  rank, what, error, g.world, g.slices, g.experts, g.top_k);
      good = false;
    }
  };
  for (u32 p = 0; p < g.ranks(); ++p) {
    require(failures[p].kind == FailureKind::none, p, "a failure of kind",
            static_cast<u32>(failures[p].kind));
    for (u32 c = 0; c < kCalls; ++c) {
      const double error = error_of_call(world, experts, p, calls[p][c], gradients[p][c], right);
      require(error < kErrorMost, p, "x or topk_weights", error);
    }
  }
  const double error = error_of_sums(world, experts, found, right);
  require(error < kErrorMost, 0, "w1 or w2 of all ranks", error);
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  return moeos::run_seeds(count, arguments, "worlds", run_world);
}
