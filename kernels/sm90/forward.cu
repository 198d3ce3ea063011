// SPDX-License-Identifier: Apache-2.0
// The kernel of a forward call. call.cuh says what its blocks do, products.cuh what they multiply.
#include "kernels/sm90/operands.cuh"
#include "kernels/sm90/tile.cuh"
// It takes load_tile and compute_tile from those above.
#include "kernels/sm90/call.cuh"

namespace moeos::sm90 {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moeos_forward(const __grid_constant__ Arguments arguments) {
  const u32 rank = kVirtualRanks == 1 ? 0 : blockIdx.x / kBlocks;
  const RankArguments& mine = arguments.ranks[rank];
  const u32 index = blockIdx.x - rank * kBlocks;
  if (threadIdx.x == kCompleteWarp * 32) {  // which has nothing else to do yet
    prefetch_code(arguments.ranks[0]);
  }
  if (index < kGeometry.processors) {
    run_processor_block(mine, index, *reinterpret_cast<Shared*>(dynamic_shared_memory()));
  } else {
    run_os(mine, *reinterpret_cast<OsShared*>(dynamic_shared_memory()));
  }
  __syncthreads();  // no warp of this block is in the call any more
  if (threadIdx.x == 0) {
    depart<Machine>(rank_memory(mine));
  }
}

}  // namespace moeos::sm90
