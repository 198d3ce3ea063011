// SPDX-License-Identifier: Apache-2.0
// Calls of gradients in random worlds, and what they are in double precision.
//
// May not know: how ranks run.
#pragma once

#include <vector>

#include "kernels/twin/explore/random_world.hpp"

namespace moeos::twin {

/// Makes a world's calls ones of gradients, of a plain layer without shared experts; its experts
/// may be cut into slices.
void make_gradient_world(RandomWorld& world);

/// What a call of gradients gets and makes beside what a forward call has.
struct CallGradients {
  std::vector<float> d_out, d_topk_weights, d_shared;
};
/// Of each rank's calls; those of ranks with the same tokens are equal.
std::vector<std::vector<CallGradients>> draw_gradients(
    Random& random, const RandomWorld& world, const std::vector<std::vector<RankCall>>& calls);

/// Of weights, of all calls of all ranks.
template <class Number>
struct WeightSums {
  std::vector<Number> w1, w2;
};
/// Zeros: of one rank's experts, or of its slices, and of all experts.
WeightSums<float> no_sums(const RandomWorld& world, const Experts& experts, u32 rank);
WeightSums<double> no_sums(const Experts& experts);

/// What a rank hands to TwinRank::forward beside its operands_of(); nothing of a call before is
/// left in `gradients`.
GradientOperands gradients_of(const RandomWorld& world, CallGradients& gradients,
                              WeightSums<float>& sums);

/// The error of one call's gradients of x and of weights of experts, which kErrorMost bounds: the
/// largest difference by the largest of what is right, or by 1, as sums of large products cancel;
/// infinite for what is no number. Adds what the call adds to gradients of w1 and w2; of ranks with
/// the same tokens the first one does.
double error_of_call(const RandomWorld& world, const Experts& experts, u32 rank,
                     const RankCall& call, const CallGradients& gradients,
                     WeightSums<double>& right);
/// Of the gradients of w1 and w2 that ranks have found; a replica has those of its own rows.
double error_of_sums(const RandomWorld& world, const Experts& experts,
                     const std::vector<WeightSums<float>>& found, const WeightSums<double>& right);

}  // namespace moeos::twin
