// SPDX-License-Identifier: Apache-2.0
// Products of Route: a block's tokens times the router's weights, cut into slices of the depth.
//
// load_route() brings steps of the depth into the stages, multiply_logits() consumes them. Must not
// depend on: what is chosen by gate logits.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/mainloop/mainloop.cuh"
#include "kernels/sm90/operands/boxes.cuh"

namespace moeos::sm90 {

static_assert(kRouteDepth <= kNarrowDepth);

/// Slices of a block's Route: the slices of each bank's depth in order, one bank after the other.
/// Steps are counted in this order, too.
inline constexpr u32 kRouteSteps = ceil_div(kShape.hidden, kRouteStepColumns);  // of a bank
inline constexpr u32 kBankSlices = kGeometry.route_slices / kRouteBanks;
inline constexpr u32 kSliceSteps = ceil_div(kRouteSteps, kBankSlices);
static_assert(kBankSlices * kRouteBanks == kGeometry.route_slices, "banks have as many slices");
static_assert((kBankSlices - 1) * kSliceSteps < kRouteSteps, "each slice has a step");
inline u32 first_step_of(u32 slice) {
  return slice / kBankSlices * kRouteSteps + slice % kBankSlices * kSliceSteps;
}
inline u32 steps_of_slice(u32 slice) { return first_step_of(slice + 1) - first_step_of(slice); }

/// The share of a Route part: a block's tokens, over some slices.
struct RouteShare {
  TokenRange tokens;
  u32 first_slice;
  u32 end_slice;

  RouteShare(const Call& call, ReadyWord word)
      : tokens(tokens_of_block(kGeometry, call, word.part())) {
    const u32 slices = kGeometry.route_slices_of_part(call.tokens);
    first_slice = word.task() * slices;
    end_slice = minimum(kGeometry.route_slices, first_slice + slices);
  }
  u32 steps() const { return first_step_of(end_slice) - first_step_of(first_slice); }
};

/// Loads a Route part's operands: slices of a block's tokens, and of the router's weights.
inline void load_route(const RankArguments& arguments, const RouteShare& share, Loader& loader) {
  const u32 n = Machine::lane() / 2;
  const bool of_gate = Machine::lane() % 2 != 0;
  Box box;
  if (n < (of_gate ? kRouteDepth : kTokenBoxes)) {
    box.map = of_gate ? &arguments.gate : &arguments.x;
    box.row = of_gate ? 0 : share.tokens.first;
    box.column = n * (of_gate ? kGateBoxColumns : kTileDepth);
    box.place = of_gate ? kWeightsPlace + n * kRouteColumns * kSwizzleBytes
                        : n * kRouteRows * kSwizzleBytes;
  }
  const u32 first = first_step_of(share.first_slice);
  fill_stages(
      share.steps(), (kTokenBoxes * kRouteRows + kRouteDepth * kRouteColumns) * kSwizzleBytes, box,
      loader, [&](u32 step) {
        const u32 bank = kRouteBanks == 1 ? 0 : (first + step) / kRouteSteps;
        return BoxPlace{box.row + (of_gate ? bank * kRouteColumns : 0),
                        box.column + (first + step - bank * kRouteSteps) * kRouteStepColumns};
      });
}

/// d += a block's 64 tokens times the router's weights, over `steps` steps of the depth and this
/// warpgroup's half of each.
inline void multiply_logits(float (&d)[kRouteSums], u32 steps, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  constexpr u32 kInstructions = kTileDepth / 16;
  constexpr u32 kShare = kRouteDepth * kInstructions / kConsumers;
  for_each_step(d, steps, shared, stage, kAsLanded, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kShare; ++k) {
      const u32 n = (group * kShare + k) / kInstructions;
      multiply(d, from.rows + n * kRouteRows * kSwizzleBytes,
               from.weights + n * kRouteColumns * kSwizzleBytes,
               (group * kShare + k) % kInstructions);
    }
  });
}

}  // namespace moeos::sm90
