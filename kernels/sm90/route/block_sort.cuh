// SPDX-License-Identifier: Apache-2.0
// Sorts (permutes) a block's assignments by expert, by all consumer warps; sort_block of
// runtime/memory/routing_map.hpp does it on one thread.
//
// Must not depend on: why an expert was chosen.
#pragma once

#include "kernels/sm90/block/block.cuh"
#include "runtime/memory/memory.hpp"

namespace moeos::sm90 {

/// Loads the experts that this block has chosen into shared memory. Called by all consumer threads,
/// between two barriers.
inline void gather_choices(const RankMemory& memory, RouteScratch& scratch, u32 first_pair,
                           u32 pairs) {
  for (u32 i = threadIdx.x % kConsumerThreads; i < pairs; i += kConsumerThreads) {
    scratch.expert[i] = static_cast<u16>(memory.pair_expert[first_pair + i]);
  }
}
static_assert(static_cast<u16>(kNone) == kNoExpert);

/// Sorts a block's pairs, from `first_pair` on, by expert. By all consumer warps, each with a share
/// of the pairs; sync() is their barrier. A pair's rank is the number of earlier pairs of its
/// expert: in earlier shares, and in its own share in earlier rounds and lanes.
template <class Sync>
inline void sort_block_by_warps(const RankMemory& memory, RouteScratch& scratch, u32 block,
                                u32 first_pair, u32 pairs, u32 warp, Sync sync) {
  const u32 lane = threadIdx.x % 32;
  const u32 share = align_up(ceil_div(pairs, kConsumerWarps), 32U);
  const u32 begin = minimum(pairs, warp * share);
  const u32 end = minimum(pairs, begin + share);
  u8(&mine)[sorted_places()] = scratch.of_warp[warp];
  for (u32 expert = lane; expert < kGeometry.experts; expert += 32) {
    mine[expert] = 0;
  }
  __syncwarp();
  for (u32 first = begin; first < end; first += 32) {
    const u32 i = first + lane;
    const u32 expert = i < end ? scratch.expert[i] : kNoExpert;
    const u32 same = __match_any_sync(~0U, expert);
    const u32 before = Machine::lanes_before(same);
    const u32 rank = expert != kNoExpert ? mine[expert] + before : 0;
    __syncwarp();
    if (expert != kNoExpert) {
      scratch.rank[i] = static_cast<u8>(rank);
      if (before == 0) {
        mine[expert] = static_cast<u8>(rank + Machine::count(same));
      }
    }
    __syncwarp();
  }
  sync();
  if (warp == 0) {
    u32 start = 0;
    u32* firsts = memory.block_first + u64{block} * kGeometry.experts;
    u32* counts = memory.block_base + u64{block} * kGeometry.experts;
    for (u32 base = 0; base < kGeometry.experts; base += 32) {
      const u32 expert = base + lane;
      u32 count = 0;
      if (expert < kGeometry.experts) {
#pragma unroll
        for (auto& of_warp : scratch.of_warp) {
          const u32 in_share = of_warp[expert];
          of_warp[expert] = static_cast<u8>(count);
          count += in_share;
        }
      }
      const u32 inclusive = Machine::inclusive_scan(count);
      if (expert < kGeometry.experts) {
        counts[expert] = count;
        firsts[expert] = start + inclusive - count;
        scratch.first[expert] = static_cast<u16>(start + inclusive - count);
      }
      start += Machine::broadcast(inclusive, 31);
    }
  }
  sync();
  u32* sorted = memory.block_pairs + first_pair;
  for (u32 i = begin + lane; i < end; i += 32) {
    const u32 expert = scratch.expert[i];
    if (expert != kNoExpert) {
      const u32 rank = mine[expert] + scratch.rank[i];
      memory.pair_rank[first_pair + i] = rank;
      sorted[scratch.first[expert] + rank] = first_pair + i;
    }
  }
}

}  // namespace moeos::sm90
