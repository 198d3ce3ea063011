// SPDX-License-Identifier: Apache-2.0
// Calls of gradients without Python: random layers through the whole protocol, each gradient
// checked in double precision.
//
// Built and run by tests/native/test_native.py with each sanitizer, as test_virtual_ranks.cpp is.
//
// Usage: test_gradients SEED WORLDS. Prints what failed and exits with 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/twin/explore/random_world.hpp"
#include "kernels/twin/gradient_rows.hpp"

namespace {

using namespace moeos;
using namespace moeos::twin;

constexpr u32 kCalls = 3;

/// What a call of gradients gets and makes beside what a forward call has.
struct Gradients {
  std::vector<float> d_out, d_topk_weights;
};
/// Of weights, of all calls of all ranks; float of one rank's experts, double of all.
template <class Number>
struct OfWeights {
  std::vector<Number> w1, w2;
};

/// A world whose calls are of gradients, of plain layers without shared experts.
RandomWorld draw_gradient_world(Random& random) {
  RandomWorld world = draw_world(random, Extent::threads);
  LayerShape& shape = world.shape;
  Geometry& g = world.geometry;
  shape.weight_format = WeightFormat::plain;
  shape.activation_format = ActivationFormat::plain;
  shape.shared_experts = shape.shared_intermediate = 0;
  shape.shared_gate = false;
  g.shared_bytes = g.shared0_parts = g.shared0_narrow_parts = 0;
  g.narrow_rows = g.gemm0_narrow_parts = g.gemm1_narrow_parts = 0;
  const GradientRows rows(g, shape, Element::kFloat32);
  g.row_bytes = g.sent_bytes = rows.sent_bytes();
  g.hidden_bytes = rows.kept_bytes();
  g.alters_rows = 1;
  g.between_rows = 0;
  world.settings.gradients = true;
  return world;
}

std::vector<float> draw_numbers(Random& random, u64 count) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    number = normal(random);
  }
  return numbers;
}

/// The largest difference, by the largest of what is right, or 1: sums of large products cancel.
/// Infinite for what is no number.
double error_of(const float* found, const double* right, u64 count) {
  double worst = 0.0;
  double largest = 1.0;
  for (u64 i = 0; i < count; ++i) {
    const double error = std::fabs(found[i] - right[i]);
    worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    largest = std::fmax(largest, std::fabs(right[i]));
  }
  return worst / largest;
}

void add(const float* from, u64 count, float* to) {
  std::transform(from, from + count, to, to, std::plus<float>());
}

/// One pair's, by the definition: adds to the gradient of x and to those of weights, and returns
/// that of the pair's weight.
double add_pair(const RandomWorld& world, const Experts& experts, u32 expert, const float* x,
                const float* d_out, double weight, double* d_x, OfWeights<double>& d_weights) {
  const u32 hidden = world.shape.hidden;
  const u32 inner = world.shape.intermediate;
  const u32 rows = world.shape.w1_rows();
  const bool gated = world.shape.gated();
  double d_weight = 0.0;
  for (u32 i = 0; i < inner; ++i) {
    const u64 gate_row = (u64{rows} * expert + i) * hidden;
    const u64 up_row = (u64{rows} * expert + inner + i) * hidden;
    double gate = 0.0;
    double up = 0.0;
    double d_value = 0.0;
    for (u32 h = 0; h < hidden; ++h) {
      gate += double{x[h]} * experts.w1[gate_row + h];
      up += gated ? double{x[h]} * experts.w1[up_row + h] : 0.0;
      d_value += double{d_out[h]} * experts.w2[(u64{hidden} * expert + h) * inner + i];
    }
    const double share = 1.0 / (1.0 + std::exp(-gate));
    const double value = gated ? gate * share * up : std::fmax(gate, 0.0);
    const double by_gate = gated ? share * (1.0 + gate * (1.0 - share)) * up : gate > 0.0;
    d_weight += d_value * value;
    const double d_gate = weight * d_value * by_gate;
    const double d_up = gated ? weight * d_value * gate * share : 0.0;
    for (u32 h = 0; h < hidden; ++h) {
      d_x[h] += d_gate * experts.w1[gate_row + h];
      d_weights.w1[gate_row + h] += d_gate * x[h];
      if (gated) {
        d_x[h] += d_up * experts.w1[up_row + h];
        d_weights.w1[up_row + h] += d_up * x[h];
      }
      d_weights.w2[(u64{hidden} * expert + h) * inner + i] += weight * value * d_out[h];
    }
  }
  return d_weight;
}

/// The error of one call's gradients of x and of weights of experts.
double check_call(const RandomWorld& world, const Experts& experts, const RankCall& call,
                  const Gradients& gradients, OfWeights<double>& d_weights) {
  const Geometry& g = world.geometry;
  const u32 hidden = world.shape.hidden;
  std::vector<u32> used(g.experts, 0);
  double worst = 0.0;
  for (u32 token = 0; token < call.tokens; ++token) {
    std::vector<double> d_x(hidden, 0.0);
    std::vector<double> d_topk(g.top_k, 0.0);
    const u64 first = u64{token} * hidden;
    for (u32 j = 0; j < g.top_k; ++j) {
      const u32 pair = token * g.top_k + j;
      const i32 expert = call.ids[pair];
      if (expert >= 0 && used[expert]++ < g.capacity) {
        d_topk[j] = add_pair(world, experts, static_cast<u32>(expert), &call.x[first],
                             &gradients.d_out[first], call.weights[pair], d_x.data(), d_weights);
      }
    }
    worst = std::fmax(worst, error_of(&call.out[first], d_x.data(), hidden));
    worst = std::fmax(
        worst, error_of(&gradients.d_topk_weights[u64{token} * g.top_k], d_topk.data(), g.top_k));
  }
  return worst;
}

bool run_world(u64 seed) {
  Random random(seed);
  const RandomWorld world = draw_gradient_world(random);
  const Geometry& g = world.geometry;
  const Experts experts = draw_experts(random, world);
  std::vector<std::vector<RankCall>> calls(g.world);
  std::vector<std::vector<Gradients>> gradients(g.world);
  std::vector<OfWeights<float>> found(g.world);
  const u64 of_expert1 = experts.w1.size() / g.routed_experts();
  const u64 of_expert2 = experts.w2.size() / g.routed_experts();
  for (u32 p = 0; p < g.world; ++p) {
    for (u32 c = 0; c < kCalls; ++c) {
      calls[p].push_back(draw_call(random, world));
      const RankCall& call = calls[p].back();
      gradients[p].push_back(
          {draw_numbers(random, call.x.size()), std::vector<float>(call.weights.size(), NAN)});
    }
    const u32 own = g.first_expert(p + 1) - g.first_expert(p);
    found[p] = {std::vector<float>(own * of_expert1), std::vector<float>(own * of_expert2)};
  }
  const Heaps heaps(g);
  std::vector<std::unique_ptr<TwinRank>> ranks;
  for (u32 p = 0; p < g.world; ++p) {
    ranks.push_back(
        std::make_unique<TwinRank>(g, world.shape, p, heaps.addresses(), world.settings));
  }
  std::vector<Failure> failures(g.world);
  std::vector<std::thread> threads;
  for (u32 p = 0; p < g.world; ++p) {
    threads.emplace_back([&, p] {
      for (u32 c = 0; c < kCalls && failures[p].kind == FailureKind::none; ++c) {
        const GradientOperands its{
            gradients[p][c].d_out.data(), gradients[p][c].d_topk_weights.data(),
            found[p].w1.data(),           nullptr,
            found[p].w2.data(),           nullptr};
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
  OfWeights<double> right{std::vector<double>(experts.w1.size()),
                          std::vector<double>(experts.w2.size())};
  const auto require = [&](bool holds, u32 rank, const char* what, double error) {
    if (!holds) {
      std::printf("seed %llu: rank %u, %s: error %g (world %u experts %u k %u)\n", seed, rank, what,
                  error, g.world, g.experts, g.top_k);
      good = false;
    }
  };
  for (u32 p = 0; p < g.world; ++p) {
    require(failures[p].kind == FailureKind::none, p, "a failure of kind",
            static_cast<u32>(failures[p].kind));
    for (u32 c = 0; c < kCalls; ++c) {
      const double error = check_call(world, experts, calls[p][c], gradients[p][c], right);
      require(error < kErrorMost, p, "x or topk_weights", error);
    }
  }
  // A replica has the part of an expert's gradient that is of its own rows.
  OfWeights<float> sums{std::vector<float>(experts.w1.size()),
                        std::vector<float>(experts.w2.size())};
  const PlaceTable& table = world.settings.table;
  for (u32 expert = 0; expert < g.routed_experts(); ++expert) {
    const u32 first = g.placed() ? table.from[expert] : expert;
    const u32 end = g.placed() ? table.from[expert + 1] : expert + 1;
    for (u32 i = first; i < end; ++i) {
      const u32 place = g.placed() ? table.places[i] : i;
      const u32 rank = g.owner_of(place);
      const u32 local = place - g.first_expert(rank);
      add(&found[rank].w1[local * of_expert1], of_expert1, &sums.w1[expert * of_expert1]);
      add(&found[rank].w2[local * of_expert2], of_expert2, &sums.w2[expert * of_expert2]);
    }
  }
  double error = error_of(sums.w1.data(), right.w1.data(), sums.w1.size());
  require(error < kErrorMost, 0, "w1 of all ranks", error);
  error = error_of(sums.w2.data(), right.w2.data(), sums.w2.size());
  require(error < kErrorMost, 0, "w2 of all ranks", error);
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
