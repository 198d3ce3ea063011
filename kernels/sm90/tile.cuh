// SPDX-License-Identifier: Apache-2.0
// A part of a tile, as a consumer warpgroup computes it: from the stages to memory.
//
// products.cuh says what is multiplied. Must not depend on: where operands come from; the caller.
#pragma once

#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/products.cuh"
#include "kernels/sm90/epilogue/epilogue.cuh"
#include "kernels/sm90/mainloop/coded_products.cuh"
#include "kernels/sm90/mainloop/mainloop.cuh"
#include "kernels/sm90/mainloop/token_columns.cuh"
#include "kernels/sm90/mainloop/weights_in_registers.cuh"
#include "kernels/sm90/operands/gathered_rows.cuh"
#include "kernels/sm90/operands/stored_weights.cuh"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

/// Computes a part whose rows and weights are quantized.
template <const Product& kProduct>
inline void compute_coded(const RankArguments& arguments, const Slot& slot, ReadyWord word,
                          const Task& task, u32 group, u32 place, Shared& shared,
                          RingPosition<kStages>& stage) {
  float d[kCodedSums];
  start_accumulators(d, arguments, task, word.part());
  if (task.narrow != 0) {
    multiply_coded<kProduct, kNarrowDepth>(d, arguments, task, word.part(), group, shared, stage);
  } else {
    multiply_coded<kProduct, 1>(d, arguments, task, word.part(), group, shared, stage);
  }
  stamp_computed(shared, place);
  if constexpr (kFormat == WeightFormat::fp8_channel) {
    scale_channels<kProduct>(d, arguments, task, slot.word.part());
  }
  finish_tile(d, task, slot, slot.word.part());
}

/// compute_coded with tokens as columns. By both warpgroups, also for a tile of 64 rows or fewer.
/// `kUsed`: whether a kernel has such parts.
template <bool kUsed>
inline void compute_columns(const RankArguments& arguments, const Slot& slot, ReadyWord word,
                            const Task& task, u32 group, u32 place, Shared& shared,
                            RingPosition<kStages>& stage) {
  if constexpr (kUsed) {
    float sums[kColumnHalves][kColumnSums] = {};
    if (product_of(task).activated) {
      if (task.narrow != 0) {
        multiply_narrow_columns<kFirst>(sums, arguments, task, word.part(), group, shared, stage);
      } else {
        multiply_by_columns<kFirst, 2>(sums, arguments, task, word.part(), group, shared, stage);
      }
    } else if (task.narrow != 0) {
      multiply_narrow_columns<kSecond>(sums, arguments, task, word.part(), group, shared, stage);
    } else {
      multiply_by_columns<kSecond, 2>(sums, arguments, task, word.part(), group, shared, stage);
    }
    stamp_computed(shared, place);
    float d[kCodedSums] = {};
    exchange_sums(d, sums, task.padded_rows, group, shared);
    if (task.padded_rows == 0 || group * kConsumerRows < task.padded_rows) {
      float biased[kCodedSums];
      start_accumulators(biased, arguments, task, slot.word.part());
#pragma unroll
      for (u32 i = 0; i < kCodedSums; ++i) {
        biased[i] += d[i];
      }
      finish_tile(biased, task, slot, slot.word.part());
    }
  }
}

/// Computes a warpgroup's 64 rows of a part: of a tile, of a wide tile that is cut into narrow
/// parts, or of a narrow tile, which has only one such group. `word`: the slot's word; `place`: the
/// slot's number.
MOEOS_INLINED void compute_tile(const RankArguments& arguments, const Slot& slot, ReadyWord word,
                                const Task& task, u32 group, u32 place, Shared& shared,
                                RingPosition<kStages>& stage) {
  if constexpr (kTokensAreColumns) {
    if (is_coded(task)) {
      compute_columns<kTokensAreColumns>(arguments, slot, word, task, group, place, shared, stage);
      return;
    }
  }
  StoredRow row(arguments, task, word.part());
  const auto prepare = [&](Stage& of, u32 step) {
    row.decode(of, task, step);
    if constexpr (kGathers) {
      // The load warp has copied these rows, not by TMA, but wgmma reads them through the async
      // proxy. The stage's barrier has acquired them, and the fence comes after it.
      fence_proxy_async_shared();
    }
  };
  const bool has_rows = task.padded_rows == 0 || group * kConsumerRows < task.padded_rows;
  if (!has_rows && !is_in_warps(task)) {
    if (!MOEOS_PLANTED(skipped_stages_are_not_followed)) {
      skip_tile(steps_of(task), shared, stage, prepare);
    }
  } else if (is_coded(task)) {
    if constexpr (kCoded && !kTokensAreColumns) {
      if (product_of(task).activated) {
        compute_coded<kFirst>(arguments, slot, word, task, group, place, shared, stage);
      } else {
        compute_coded<kSecond>(arguments, slot, word, task, group, place, shared, stage);
      }
    }
  } else if (has_narrow_parts(task)) {
    // The part is read again after the products: no register is kept for it.
    float d[kNarrowColumns / 2];
    if (is_in_warps(task)) {
      multiply_in_warps<kWeightsInRegisters>(d, arguments, task, word.part(), group, shared, stage);
    } else {
      start_accumulators(d, arguments, task, word.part());
      if (task.narrow != 0) {
        multiply_narrow(d, steps_of(task), shared, stage, prepare);
      } else {
        multiply_tile(d, steps_of(task), group, shared, stage, prepare);
      }
    }
    stamp_computed(shared, place);
    if constexpr (kSaves) {
      save_rows(d, arguments, task, slot.word.part());
    }
    if (has_rows) {
      finish_tile(d, task, slot, slot.word.part());
    }
  } else {
    float d[kTileColumns / 2];
    start_accumulators(d, arguments, task, word.part());
    multiply_tile(d, steps_of(task), group, shared, stage, prepare);
    stamp_computed(shared, place);
    if constexpr (kSaves) {
      save_rows(d, arguments, task, slot.word.part());
    }
    finish_tile(d, task, slot, slot.word.part());
  }
}

}  // namespace moeos::sm90
