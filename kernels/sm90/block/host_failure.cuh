// SPDX-License-Identifier: Apache-2.0
// How the host learns of a failure without waiting for the stream: the record is copied into the
// host's memory, where the host looks before the next call. Must not depend on: what a failure
// means.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "runtime/platform/team.hpp"

namespace moeos::sm90 {

/// Shows the host the failure for which this rank left its call, if it did, unless the host has
/// been shown an earlier one. One warp, when it leaves.
inline void show_failure(const RankArguments& mine, const Rank<Machine>& rank, const Call& call) {
  if (!agreed<Machine>(rank.leaving(call.epoch))) {
    return;
  }
  auto* shown = reinterpret_cast<u32*>(mine.host_failure);
  // Relaxed: only this warp of this rank, in one call after the other, writes the word that it
  // reads.
  if (agreed<Machine>(Machine::load_relaxed<Scope::system>(shown)) != 0) {
    return;
  }
  // One word for all lanes: an earlier call's failure may replace it meanwhile, and the record
  // would mix two failures.
  const u64 word = agreed<Machine>(Machine::poll<Scope::system>(
      reinterpret_cast<const u64*>(rank.heap + rank.layout.abort_word())));
  // Pairs with the release in raise_word: the record of the rank named by the word is complete.
  Machine::acquire_fence<Scope::system>();
  const auto* record =
      reinterpret_cast<const u32*>(rank.heap + rank.layout.failure(static_cast<u32>(word) - 1));
  const u32 lane = Machine::lane();
  static_assert(sizeof(Failure) == 4 * Machine::kLanes, "a lane copies a word");
  if (lane > 0) {
    shown[lane] = record[lane];
  }
  Machine::sync_lanes();
  if (lane == 0) {
    // The kind comes last: publishes the lanes' words to the host, which reads the kind first
    // (host/moeos/engines/cuda/records.py, HostFailure.read).
    Machine::store_release<Scope::system>(shown, record[0]);
  }
}

}  // namespace moeos::sm90
