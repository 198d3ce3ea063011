// Virtual ranks without Python: random layers through the whole protocol, each result checked in
// double precision.
//
// Built and run by tests/native/test_native.py, once plainly with MOEOS_DEBUG_CHECKS and once with
// each sanitizer. It is small on purpose: ThreadSanitizer sees every access of the runtime, and
// nothing else.
//
// Usage: test_virtual_ranks SEED WORLDS. Prints what failed and exits with 1.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "kernels/twin/forward.hpp"
#include "runtime/layout.hpp"

namespace {

using moeos::Activation;
using moeos::ceil_div;
using moeos::Failure;
using moeos::FailureKind;
using moeos::Geometry;
using moeos::i32;
using moeos::LayerShape;
using moeos::Layout;
using moeos::minimum;
using moeos::RowMap;
using moeos::Scoring;
using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Element;
using moeos::twin::Operands;
using moeos::twin::TwinRank;
using moeos::twin::TwinSettings;

using Random = std::mt19937_64;

struct World {
  Geometry geometry;
  LayerShape shape;
  TwinSettings settings;
};

u32 draw(Random& random, u32 low, u32 high) {
  return std::uniform_int_distribution<u32>(low, high)(random);
}

World draw_world(Random& random) {
  World world{};
  Geometry& g = world.geometry;
  const u32 worlds[] = {1, 2, 3, 4, 8};
  g.world = worlds[draw(random, 0, 4)];
  g.experts = g.world * draw(random, 1, 4);
  g.top_k = draw(random, 1, minimum(g.experts, 8U));
  // Now and then more than eight Route blocks: look-ups among them then take more than one round.
  g.max_tokens = draw(random, 0, 9) == 0 ? draw(random, 300, 600) : draw(random, 1, 150);
  world.shape = LayerShape{8 * draw(random, 1, 5),
                           8 * draw(random, 1, 5),
                           draw(random, 0, 1) == 0 ? Activation::swiglu : Activation::relu,
                           INFINITY,
                           Scoring::softmax,
                           true,
                           1.0F,
                           1,
                           1};
  g.row_bytes = world.shape.hidden * sizeof(float);
  g.hidden_bytes = world.shape.intermediate * sizeof(float);
  g.row_map = draw(random, 0, 1) == 0 ? RowMap::ragged : RowMap::capacity;
  g.capacity = draw(random, 0, 2) == 0 ? draw(random, 1, g.max_tokens) : g.max_tokens;
  g.chunk_rows = 32;
  g.tile_rows = draw(random, 0, 1) == 0 ? 128 : 16;
  g.route_tokens = 32;
  g.gemm0_parts = ceil_div(world.shape.intermediate, moeos::twin::gemm0_columns(world.shape));
  g.gemm1_parts = ceil_div(world.shape.hidden, moeos::twin::kPlainColumns);
  g.narrow_rows = draw(random, 0, 1) == 0 ? 0 : 8 * draw(random, 1, 8);
  g.gemm0_narrow_parts = ceil_div(world.shape.intermediate, moeos::twin::kNarrowColumns);
  g.gemm1_narrow_parts = ceil_div(world.shape.hidden, moeos::twin::kNarrowColumns);
  g.processors = draw(random, 1, 3);
  // All peers on one node, each on its own, or a mix of direct and remote peers.
  const u32 ranks_per_node = draw(random, 0, 2) == 0 ? g.world : draw(random, 1, g.world);
  g.remote = ranks_per_node < g.world ? 1 : 0;
  g.window_rows = draw(random, 0, 1) == 0 ? 0 : draw(random, 1, 400);  // 0: as small as it may be
  world.settings = TwinSettings{20'000'000'000ULL, draw(random, 0, 1) == 1,
                                draw(random, 0, 3) == 0 ? 50.0 : 0.0, 1, ranks_per_node};
  return world;
}

std::vector<float> draw_floats(Random& random, u64 count, float scale) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

/// All experts' weights, and one call's routing of one rank: given by the caller, so that a
/// near-tie in the router cannot be mistaken for an error.
struct Experts {
  std::vector<float> gate, w1, w2;
};

struct RankCall {
  u32 tokens = 0;
  std::vector<float> x, weights, out;
  std::vector<i32> ids;
};

RankCall draw_call(Random& random, const World& world) {
  const Geometry& g = world.geometry;
  RankCall call;
  call.tokens = draw(random, 0, 3) == 0 ? 0 : draw(random, 0, g.max_tokens);
  call.x = draw_floats(random, u64{call.tokens} * world.shape.hidden, 1.0F);
  call.weights = draw_floats(random, u64{call.tokens} * g.top_k, 1.0F);
  call.out.assign(u64{call.tokens} * world.shape.hidden, NAN);
  const bool hot = draw(random, 0, 2) == 0;  // the same few experts for everyone
  for (u32 token = 0; token < call.tokens; ++token) {
    std::vector<i32> experts(g.experts);
    for (u32 e = 0; e < g.experts; ++e) {
      experts[e] = static_cast<i32>(e);
    }
    if (!hot) {
      std::shuffle(experts.begin(), experts.end(), random);
    }
    for (u32 j = 0; j < g.top_k; ++j) {
      call.ids.push_back(draw(random, 0, 9) == 0 ? -1 : experts[j]);
    }
  }
  return call;
}

/// The layer's definition, in double precision, one pair at a time.
double largest_error(const World& world, const Experts& experts, const RankCall& call) {
  const Geometry& g = world.geometry;
  const u32 hidden = world.shape.hidden;
  const u32 inner = world.shape.intermediate;
  const u32 rows = world.shape.w1_rows();
  std::vector<u32> used(g.experts, 0);
  double worst = 0.0;
  for (u32 token = 0; token < call.tokens; ++token) {
    const float* x = &call.x[u64{token} * hidden];
    std::vector<double> sum(hidden, 0.0);
    for (u32 j = 0; j < g.top_k; ++j) {
      const i32 expert = call.ids[token * g.top_k + j];
      if (expert < 0 || used[expert]++ >= g.capacity) {
        continue;
      }
      std::vector<double> inside(inner);
      for (u32 i = 0; i < inner; ++i) {
        double gate = 0.0;
        double up = 0.0;
        for (u32 h = 0; h < hidden; ++h) {
          gate += double{x[h]} * experts.w1[(u64{rows} * expert + i) * hidden + h];
          up += world.shape.gated()
                    ? double{x[h]} * experts.w1[(u64{rows} * expert + inner + i) * hidden + h]
                    : 0.0;
        }
        inside[i] =
            world.shape.gated() ? gate / (1.0 + std::exp(-gate)) * up : std::fmax(gate, 0.0);
      }
      for (u32 h = 0; h < hidden; ++h) {
        double value = 0.0;
        for (u32 i = 0; i < inner; ++i) {
          value += inside[i] * experts.w2[(u64{hidden} * expert + h) * inner + i];
        }
        sum[h] += value * call.weights[token * g.top_k + j];
      }
    }
    for (u32 h = 0; h < hidden; ++h) {
      const double error =
          std::fabs(sum[h] - call.out[u64{token} * hidden + h]) / (1.0 + std::fabs(sum[h]));
      worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    }
  }
  return worst;
}

class Heap {
 public:
  explicit Heap(u64 bytes)
      : bytes_(bytes),
        memory_(static_cast<u8*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~Heap() { munmap(memory_, bytes_); }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  u8* get() const { return memory_; }

 private:
  u64 bytes_;
  u8* memory_;
};

bool run_world(u64 seed) {
  constexpr u32 kCalls = 6;
  Random random(seed);
  const World world = draw_world(random);
  const Geometry& g = world.geometry;
  Experts experts{
      draw_floats(random, u64{g.experts} * world.shape.hidden, 1.0F),
      draw_floats(random, u64{g.experts} * world.shape.w1_rows() * world.shape.hidden, 0.3F),
      draw_floats(random, u64{g.experts} * world.shape.hidden * world.shape.intermediate, 0.3F)};
  std::vector<std::vector<RankCall>> calls(g.world);
  for (auto& rank_calls : calls) {
    for (u32 c = 0; c < kCalls; ++c) {
      rank_calls.push_back(draw_call(random, world));
    }
  }
  std::vector<std::unique_ptr<Heap>> heaps;
  std::vector<u8*> addresses;
  for (u32 p = 0; p < g.world; ++p) {
    heaps.push_back(std::make_unique<Heap>(Layout(g).bytes()));
    addresses.push_back(heaps.back()->get());
  }
  std::vector<std::unique_ptr<TwinRank>> ranks;
  for (u32 p = 0; p < g.world; ++p) {
    ranks.push_back(std::make_unique<TwinRank>(g, world.shape, p, addresses, world.settings));
  }
  std::vector<Failure> failures(g.world);
  std::vector<std::thread> threads;
  for (u32 p = 0; p < g.world; ++p) {
    threads.emplace_back([&, p] {
      const u64 x_first = u64{p} * g.local_experts();
      for (RankCall& call :
           calls[p]) {  // no barrier between calls: ranks run as far ahead as the protocol allows
        const Operands operands{
            Element::kFloat32,
            call.x.data(),
            experts.gate.data(),
            nullptr,
            call.ids.empty() ? reinterpret_cast<const i32*>(&call) : call.ids.data(),
            call.weights.data(),
            &experts.w1[x_first * world.shape.w1_rows() * world.shape.hidden],
            nullptr,
            &experts.w2[x_first * world.shape.hidden * world.shape.intermediate],
            nullptr,
            call.out.data()};
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
  for (u32 p = 0; p < g.world; ++p) {
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
      const double error = largest_error(world, experts, calls[p][c]);
      if (!(error < 1e-4)) {
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
  if (count != 3) {
    std::fprintf(stderr, "usage: %s SEED WORLDS\n", arguments[0]);
    return 2;
  }
  const u64 first = std::strtoull(arguments[1], nullptr, 10);
  const u64 worlds = std::strtoull(arguments[2], nullptr, 10);
  u64 failed = 0;
  for (u64 seed = first; seed < first + worlds; ++seed) {
    failed += run_world(seed) ? 0 : 1;
  }
  std::printf("%llu worlds, %llu failed\n", worlds, failed);
  return failed == 0 ? 0 : 1;
}
