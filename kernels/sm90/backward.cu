// SPDX-License-Identifier: Apache-2.0
// The kernels of a gradient call: the call, which runs the device OS with other rows and products,
// and the gradients of weights, launched after it.
#include "kernels/sm90/gradient_tile.cuh"
#include "kernels/sm90/operands/gradient_operands.cuh"
// call.cuh uses load_tile and compute_tile of the files above.
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/weight_gradients.cuh"

namespace moeos::sm90 {

struct GradientLaunch {
  GradientArguments ranks[kVirtualRanks];
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moeos_backward(const __grid_constant__ GradientLaunch arguments) {
  run_block(arguments);
}

/// Makes the weight gradients of one rank, whose gradient call is the last one that wrote its
/// records.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moeos_weight_gradients(const __grid_constant__ GradientArguments arguments) {
  FactorShared& shared = *reinterpret_cast<FactorShared*>(dynamic_shared_memory());
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kStages; ++i) {
      shared.stage_full[i].initialise(1);
      shared.stage_empty[i].initialise(kConsumerWarps);
    }
    fence_barrier_initialisation();
  }
  __syncthreads();
  const u32 warp = threadIdx.x / 32;
  if (warp >= kFirstConsumerWarp) {
    raise_registers<kConsumerRegisters>();
    multiply_factors(arguments, shared);
    if constexpr (kBias) {
      add_biases(arguments);
    }
    return;
  }
  lower_registers<kOtherRegisters>();
  if (warp == kLoadWarp) {
    load_factors(arguments, shared);
  }
}

}  // namespace moeos::sm90
