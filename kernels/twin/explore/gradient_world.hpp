// SPDX-License-Identifier: Apache-2.0
// Gradient calls in random worlds, and their results in double precision.
//
// Must not depend on: how ranks run.
#pragma once

#include <vector>

#include "kernels/twin/explore/random_world.hpp"

namespace moeos::twin {

/// Makes a world's calls gradient calls of a plain layer without shared experts; its experts may be
/// cut into slices.
void make_gradient_world(RandomWorld& world);

/// What a gradient call gets and makes in addition to a forward call's tensors.
struct CallGradients {
  std::vector<float> d_out, d_topk_weights, d_shared;
};
/// For each rank's calls; those of ranks with the same tokens are equal.
std::vector<std::vector<CallGradients>> draw_gradients(
    Random& random, const RandomWorld& world, const std::vector<std::vector<RankCall>>& calls);

/// Gradients of weights, summed over all calls of all ranks.
template <class Number>
struct WeightSums {
  std::vector<Number> w1, w2;
};
/// Zeros: for one rank's experts, or its slices, and for all experts.
WeightSums<float> no_sums(const RandomWorld& world, const Experts& experts, u32 rank);
WeightSums<double> no_sums(const Experts& experts);

/// What a rank passes to TwinRank::forward in addition to its operands_of(); clears what an earlier
/// call has left in `gradients`.
GradientOperands gradients_of(const RandomWorld& world, CallGradients& gradients,
                              WeightSums<float>& sums);

/// The error of one call's gradients of x and of weights of experts, which kErrorMost bounds: the
/// largest difference divided by the largest right value, or by 1, as sums of large products
/// cancel; infinite for values that are no numbers. Adds the call's share to the gradients of w1
/// and w2; among ranks with the same tokens only the first one adds it.
double error_of_call(const RandomWorld& world, const Experts& experts, u32 rank,
                     const RankCall& call, const CallGradients& gradients,
                     WeightSums<double>& right);
/// The error of the gradients of w1 and w2 that ranks have found; a replica has those of its own
/// rows.
double error_of_sums(const RandomWorld& world, const Experts& experts,
                     const std::vector<WeightSums<float>>& found, const WeightSums<double>& right);

}  // namespace moeos::twin
