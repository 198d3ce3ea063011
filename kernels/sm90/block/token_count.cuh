// SPDX-License-Identifier: Apache-2.0
// S, which a call may read from device memory, so that a captured launch serves any number of
// tokens; and the output rows beyond S, which are cleared. Must not depend on: routing.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"

namespace moeos::sm90 {

/// Whether the count that the caller keeps in device memory is valid: 0 to the number of rows of x.
inline bool count_fits(const RankArguments& mine) {
  return mine.token_count == nullptr || static_cast<u32>(*mine.token_count) <= mine.rows;
}

/// S. Every block reads it for itself; it must not change during the launch. 0 for a count that
/// does not fit: the call is still made, because the peers are in it, and ends with a failure.
inline u32 tokens_of(const RankArguments& mine) {
  if (mine.token_count == nullptr) {
    return mine.rows;
  }
  return count_fits(mine) ? static_cast<u32>(*mine.token_count) : 0;
}

/// Rows that one expert takes from this rank: MoEConfig.capacity(S), or max_tokens when dropless.
inline u32 pair_limit_of(u32 tokens) {
  if constexpr (kCapacityDenominator == 0) {
    return kGeometry.max_tokens;
  } else {
    return static_cast<u32>(ceil_div(tokens * kCapacityNumerator, kCapacityDenominator));
  }
}

/// Ends the call, on all ranks, if its number of tokens is impossible. One thread.
inline void check_count(const RankArguments& mine, const Rank<Machine>& rank, const Call& call) {
  if (!count_fits(mine)) {
    Failure failure = failure_of(rank, call, FailureKind::token_count_wrong, Actor::scheduler);
    failure.expected = mine.rows;
    failure.seen = static_cast<u64>(i64{*mine.token_count});
    rank.fail(failure);
  }
}

/// Writes zeros into this processor's share of the output's rows beyond S. Called by all consumer
/// threads.
inline void clear_rows_beyond(const RankArguments& mine, u32 tokens, u32 processor) {
  constexpr u32 kVectors = kGeometry.row_bytes / 16;
  for (u32 row = tokens + processor; row < mine.rows; row += kGeometry.processors) {
    auto* to = reinterpret_cast<uint4*>(mine.out + u64{row} * kGeometry.row_bytes);
    for (u32 i = threadIdx.x % kConsumerThreads; i < kVectors; i += kConsumerThreads) {
      to[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace moeos::sm90
