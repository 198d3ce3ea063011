// SPDX-License-Identifier: Apache-2.0
// Layers of several random shapes in one workspace, without Python: each result is checked in
// double precision, and ThreadSanitizer sees rows of one shape lie where another's lay in the call
// before.
//
// Usage: test_workspaces SEED WORKSPACES. Prints what failed and exits with 1.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/twin/explore/random_world.hpp"
#include "tests/native/worlds.hpp"

namespace {

using namespace moeos;
using namespace moeos::twin;

constexpr u32 kShapes = 3;
constexpr u32 kCalls = 10;

/// A shape that can share a workspace with `first`.
RandomWorld draw_like(Random& random, const RandomWorld& first) {
  for (;;) {
    const RandomWorld drawn = draw_world(random, WorldScale::threads);
    if (drawn.geometry.world == first.geometry.world &&
        drawn.geometry.processors == first.geometry.processors &&
        drawn.settings.ranks_per_node == first.settings.ranks_per_node &&
        drawn.settings.split_os == first.settings.split_os) {
      return drawn;
    }
  }
}

/// Where the shapes lie, as host/moeos/engines/shared_heap.py has it: [header][words of
/// each][cells][results].
struct Plan {
  explicit Plan(const std::vector<RandomWorld>& shapes) {
    u64 words = Layout(shapes[0].geometry).header_bytes();
    u64 stride = 0;
    u64 wide = 0;
    u64 tail = 0;
    u64 results = 0;
    for (const RandomWorld& shape : shapes) {
      const Geometry& g = shape.geometry;
      places.push_back(HeapPlace{words, 0, 0, 0});
      words += Layout(g).words_bytes();
      wide = std::max<u64>(wide, g.sent_bytes);
      stride = std::max<u64>(stride, u64{g.cell_places()} * g.sent_bytes);
      tail = std::max<u64>(tail, u64{g.tile_rows} * g.sent_bytes);
      results = std::max<u64>(results, Layout(g).results_bytes());
      between = std::max(between, g.between_bytes());
    }
    const u32 cells = Layout(shapes[0].geometry).cells();
    stride += cells * wide;  // a shape's cells are whole rows, and begin so much earlier at most
    for (u32 s = 0; s < shapes.size(); ++s) {
      places[s].rows_at = words;
      places[s].results_at = words + cells * stride + tail;
      places[s].stride_rows = static_cast<u32>(stride / shapes[s].geometry.sent_bytes);
    }
    bytes = words + cells * stride + tail + results;
  }

  std::vector<HeapPlace> places;
  u64 bytes = 0;
  u64 between = 0;
};

/// A rank: its part of the workspace, and a layer of each shape.
struct SharedRank {
  SharedRank(const std::vector<RandomWorld>& shapes, const Plan& plan, const Heaps& heaps, u32 rank)
      : shared(std::make_shared<TwinShared>(rank, heaps.addresses(), plan.bytes,
                                            RankMemory::bytes_of_parts(shapes[0].geometry).control,
                                            plan.between)) {
    for (u32 s = 0; s < shapes.size(); ++s) {
      const RandomWorld& shape = shapes[s];
      layers.push_back(std::make_unique<TwinRank>(shape.geometry, shape.shape, rank, plan.places[s],
                                                  shared, shape.settings));
      records.push_back(
          std::make_unique<TwinRecords>(shape.geometry, FaultPlan{}, shape.settings.table));
    }
  }

  std::shared_ptr<TwinShared> shared;
  std::vector<std::unique_ptr<TwinRank>> layers;
  std::vector<std::unique_ptr<TwinRecords>> records;
};

bool run_workspace(u64 seed) {
  Random random(seed);
  std::vector<RandomWorld> shapes = {draw_world(random, WorldScale::threads)};
  while (shapes.size() < kShapes) {
    shapes.push_back(draw_like(random, shapes[0]));
  }
  const u32 world = shapes[0].geometry.world;
  std::vector<Experts> experts;
  for (const RandomWorld& shape : shapes) {
    experts.push_back(draw_experts(random, shape));
  }
  std::vector<u32> order;  // of the calls' shapes, the same on all ranks
  std::vector<std::vector<RankCall>> calls(world);
  for (u32 c = 0; c < kCalls; ++c) {
    order.push_back(draw(random, 0, kShapes - 1));
    for (u32 p = 0; p < world; ++p) {
      calls[p].push_back(draw_call(random, shapes[order[c]]));
    }
  }
  const Plan plan(shapes);
  const Heaps heaps(world, plan.bytes);
  std::vector<std::unique_ptr<SharedRank>> ranks;
  for (u32 p = 0; p < world; ++p) {
    ranks.push_back(std::make_unique<SharedRank>(shapes, plan, heaps, p));
  }
  std::vector<Failure> failures(world);
  std::vector<std::thread> threads;
  for (u32 p = 0; p < world; ++p) {
    threads.emplace_back([&, p] {  // no barrier between calls
      for (u32 c = 0; c < kCalls; ++c) {
        const u32 s = order[c];
        RankCall& call = calls[p][c];
        const Operands operands = operands_of(shapes[s], experts[s], p, call);
        failures[p] = ranks[p]->layers[s]->forward(*ranks[p]->records[s], operands, call.tokens,
                                                   shapes[s].geometry.capacity, s + 1, 0);
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
  for (u32 p = 0; p < world; ++p) {
    if (failures[p].kind != FailureKind::none) {
      std::printf("seed %llu: rank %u failed with kind %u in call %u\n", seed, p,
                  static_cast<u32>(failures[p].kind), failures[p].epoch);
      good = false;
      continue;
    }
    for (u32 c = 0; c < kCalls; ++c) {
      const u32 s = order[c];
      const double error = largest_error(shapes[s], experts[s], calls[p][c]);
      if (!(error < kErrorMost)) {
        std::printf("seed %llu: rank %u call %u of shape %u: error %g\n", seed, p, c, s, error);
        good = false;
      }
    }
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  return moeos::run_seeds(count, arguments, "workspaces", run_workspace);
}
