// SPDX-License-Identifier: Apache-2.0
// Gradient calls in random worlds. See gradient_world.hpp.
#include "kernels/twin/explore/gradient_world.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/twin/gradient_rows.hpp"

namespace moeos::twin {

namespace {

/// The largest difference, divided by the largest right value, or by 1: sums of large products
/// cancel. Infinite for values that are no numbers.
double error_of(const float* found, const double* right, u64 count, double largest = 1.0) {
  double worst = 0.0;
  for (u64 i = 0; i < count; ++i) {
    const double error = std::fabs(found[i] - right[i]);
    worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    largest = std::fmax(largest, std::fabs(right[i]));
  }
  return worst / largest;
}

constexpr float kOfShared = 0.25F;  // what each slice adds to the gradient of the shared experts'
                                    // weight

void add(const float* from, u64 count, float* to) {
  std::transform(from, from + count, to, to, std::plus<float>());
}

/// One pair's gradients, by the definition: adds to the gradient of x and to those of weights, and
/// returns the gradient of the pair's weight.
double add_pair(const RandomWorld& world, const Experts& experts, u32 expert, const float* x,
                const float* d_out, double weight, double* d_x, WeightSums<double>& d_weights) {
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

/// One rank's matrices in the plain layout: all rows of an MLP in order.
std::vector<float> plain(const MatrixLayout& layout, u32 halves, const std::vector<float>& lying) {
  const u64 of_mlp = u64{halves} * layout.rows * layout.depth;
  std::vector<float> values(lying.size());
  for_each_element(layout, halves, static_cast<u32>(lying.size() / of_mlp),
                   [&](u64 to, u64 from) { values[to] = lying[from]; });
  return values;
}

}  // namespace

void make_gradient_world(RandomWorld& world) {
  LayerShape& shape = world.shape;
  Geometry& g = world.geometry;
  shape.weight_format = WeightFormat::plain;
  shape.activation_format = shape.result_format = ActivationFormat::plain;
  shape.shared_experts = shape.shared_intermediate = 0;
  shape.shared_gate = false;
  g.shared_bytes = g.shared0_parts = g.shared0_narrow_parts = 0;
  g.narrow_rows = g.product0_narrow_parts = g.product1_narrow_parts = 0;
  const GradientRows rows(g, shape, Element::kFloat32);
  g.row_bytes = g.sent_bytes = g.returned_bytes = rows.sent_bytes();
  g.hidden_bytes = rows.kept_bytes();
  g.alters_rows = 1;
  g.sums_everywhere = g.sliced() ? 1 : 0;
  g.between_rows = 0;
  g.ring_rows = 0;
  world.settings.gradients = true;
}

std::vector<std::vector<CallGradients>> draw_gradients(
    Random& random, const RandomWorld& world, const std::vector<std::vector<RankCall>>& calls) {
  std::vector<std::vector<CallGradients>> drawn(calls.size());
  for (u32 rank = 0; rank < calls.size(); ++rank) {
    const u32 slice = rank % slices_of(world);
    if (slice != 0) {
      drawn[rank] = drawn[rank - slice];
      continue;
    }
    for (const RankCall& call : calls[rank]) {
      drawn[rank].push_back({draw_floats(random, u64{call.tokens} * world.shape.hidden, 1.0F),
                             std::vector<float>(call.weights.size()),
                             std::vector<float>(call.tokens)});
    }
  }
  return drawn;
}

WeightSums<float> no_sums(const RandomWorld& world, const Experts& experts, u32 rank) {
  const Geometry& g = world.geometry;
  const u32 holder = holder_of(world, rank);
  const u64 own = g.first_expert(holder + 1) - g.first_expert(holder);
  const u64 all = u64{slices_of(world)} * g.routed_experts();
  return {std::vector<float>(own * (experts.w1.size() / all)),
          std::vector<float>(own * (experts.w2.size() / all))};
}

WeightSums<double> no_sums(const Experts& experts) {
  return {std::vector<double>(experts.w1.size()), std::vector<double>(experts.w2.size())};
}

GradientOperands gradients_of(const RandomWorld& world, CallGradients& gradients,
                              WeightSums<float>& sums) {
  std::fill(gradients.d_topk_weights.begin(), gradients.d_topk_weights.end(), NAN);
  std::fill(gradients.d_shared.begin(), gradients.d_shared.end(), kOfShared);
  return {.d_out = gradients.d_out.data(),
          .d_topk_weights = gradients.d_topk_weights.data(),
          .d_w1 = sums.w1.data(),
          .d_b1 = nullptr,
          .d_w2 = sums.w2.data(),
          .d_b2 = nullptr,
          .d_w3 = ups_of(world.shape, sums.w1.data(), sums.w1.size()),
          .d_shared = gradients.d_shared.data()};
}

double error_of_call(const RandomWorld& world, const Experts& experts, u32 rank,
                     const RankCall& call, const CallGradients& gradients,
                     WeightSums<double>& right) {
  const Geometry& g = world.geometry;
  WeightSums<double> counted = no_sums(experts);
  const bool first_rank = rank % slices_of(world) == 0;
  WeightSums<double>& sums = first_rank ? right : counted;
  const u32 hidden = world.shape.hidden;
  std::vector<u32> used(g.experts, 0);
  double worst = 0.0;
  for (u32 token = 0; token < call.tokens; ++token) {
    std::vector<double> d_x(hidden, 0.0);
    std::vector<double> d_topk(g.top_k, 0.0);
    double terms = 1.0;  // the largest term that slices add up, whose rounding remains where the
                         // sum cancels
    const u64 first = u64{token} * hidden;
    for (u32 j = 0; j < g.top_k; ++j) {
      const u32 pair = token * g.top_k + j;
      const i32 expert = call.ids[pair];
      if (expert < 0 || used[expert]++ >= g.capacity) {
        continue;
      }
      for (u32 slice = 0; slice < slices_of(world); ++slice) {
        const double of_slice =
            add_pair(world, experts, slice * g.routed_experts() + static_cast<u32>(expert),
                     &call.x[first], &gradients.d_out[first], call.weights[pair], d_x.data(), sums);
        d_topk[j] += of_slice;
        terms = std::fmax(terms, std::fabs(of_slice));
      }
    }
    const double d_shared = double{kOfShared} * slices_of(world);
    worst = std::fmax(worst, error_of(&gradients.d_shared[token], &d_shared, 1));
    worst = std::fmax(worst, error_of(&call.out[first], d_x.data(), hidden));
    worst = std::fmax(worst, error_of(&gradients.d_topk_weights[u64{token} * g.top_k],
                                      d_topk.data(), g.top_k, terms));
  }
  return worst;
}

double error_of_sums(const RandomWorld& world, const Experts& experts,
                     const std::vector<WeightSums<float>>& found, const WeightSums<double>& right) {
  const Geometry& g = world.geometry;
  const u32 all = slices_of(world) * g.routed_experts();
  const u64 of_expert1 = experts.w1.size() / all;
  const u64 of_expert2 = experts.w2.size() / all;
  WeightSums<float> sums{std::vector<float>(experts.w1.size()),
                         std::vector<float>(experts.w2.size())};
  for (u32 expert = 0; expert < all; ++expert) {  // slice by slice
    for (const u32 place : places_of(world, expert % g.routed_experts())) {
      const u32 holder = g.owner_of(place);
      const u32 local = place - g.first_expert(holder);
      const u32 rank = holder * slices_of(world) + expert / g.routed_experts();
      const u32 halves = world.shape.gated() ? 2 : 1;
      const std::vector<float> w1 = plain(w1_layout(world.shape), halves, found[rank].w1);
      const std::vector<float> w2 = plain(w2_layout(world.shape), 1, found[rank].w2);
      add(&w1[local * of_expert1], of_expert1, &sums.w1[expert * of_expert1]);
      add(&w2[local * of_expert2], of_expert2, &sums.w2[expert * of_expert2]);
    }
  }
  return std::fmax(error_of(sums.w1.data(), right.w1.data(), sums.w1.size()),
                   error_of(sums.w2.data(), right.w2.data(), sums.w2.size()));
}

}  // namespace moeos::twin
