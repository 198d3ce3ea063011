// SPDX-License-Identifier: Apache-2.0
// The kernel of a forward call. call.cuh says what its blocks do, products.cuh what they multiply.
#include "kernels/sm90/operands/operands.cuh"
#include "kernels/sm90/tile.cuh"
// call.cuh uses load_tile and compute_tile of the files above.
#include "kernels/sm90/call.cuh"

namespace moeos::sm90 {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moeos_forward(const __grid_constant__ Arguments arguments) {
  run_block(arguments);
}

}  // namespace moeos::sm90
