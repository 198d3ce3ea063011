// SPDX-License-Identifier: Apache-2.0
// A part of a tile, as a consumer warpgroup computes it: from the stages to memory.
//
// products.cuh says what is multiplied. May not know: where operands come from; who runs it.
#pragma once

#include "kernels/sm90/block.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/mainloop.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/stored_weights.cuh"

namespace moeos::sm90 {

/// Notes when the consumers have a part's results.
inline void stamp_computed(Shared& shared, u32 slot) {
  if constexpr (kTraced) {
    if (threadIdx.x == kFirstConsumerWarp * 32) {
      shared.stamps[slot].computed_ns = Machine::now_ns();
    }
    __syncwarp();
  }
}

/// A warpgroup's 64 rows of a part: of a tile, of a wide tile that is cut into narrow parts, or of
/// a narrow tile, of which there is one. `word`: what the slot was given;
/// `place`: which slot it is.
inline void compute_tile(const RankArguments& arguments, const Slot& slot, ReadyWord word,
                         const Task& task, u32 group, u32 place, Shared& shared,
                         RingPosition<kStages>& stage) {
  StoredRow row(arguments, task, word.part());
  const auto prepare = [&](Stage& of, u32 step) { row.decode(of, task, step); };
  if (task.padded_rows != 0 && group * kConsumerRows >= task.padded_rows) {
    skip_tile(steps_of(task), shared, stage, prepare);
  } else if (has_narrow_parts(task)) {
    // The part is read again behind the products: no register is kept for it.
    float d[kNarrowColumns / 2];
    start_accumulators(d, arguments, task, word.part());
    if (task.narrow != 0) {
      multiply_narrow(d, steps_of(task), shared, stage, prepare);
    } else {
      multiply_tile(d, steps_of(task), group, shared, stage, prepare);
    }
    stamp_computed(shared, place);
    finish_tile(d, task, slot, slot.word.part());
  } else {
    float d[kTileColumns / 2];
    start_accumulators(d, arguments, task, word.part());
    multiply_tile(d, steps_of(task), group, shared, stage, prepare);
    stamp_computed(shared, place);
    finish_tile(d, task, slot, slot.word.part());
  }
}

}  // namespace moeos::sm90
