// SPDX-License-Identifier: Apache-2.0
// Which launch a block belongs to, and whether that launch has its rank to itself.
//
// A launch is the next call of its rank, and the calls of a rank follow each other. Two launches at
// once, such as replays of a graph on two streams, would share every queue and counter. No launch
// knows its own number, but each block can count: in call n it begins for the n-th time. A block
// that finds itself in another call takes no part. Must not depend on: what a call does.
#pragma once

#include "runtime/memory/memory.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// Counts that block `block` of a rank's launch begins; `epoch` as the block has read it. False:
/// another launch's block of this number is in that call, which runs or has failed. Then this block
/// must not access anything of the rank except these numbers and, to report it, a failure. So a
/// call has one block of each number, and one OS block. One thread.
template <Platform P>
bool attend(const RankMemory& memory, u32 epoch, u32 block) {
  // Relaxed: it publishes nothing, and nothing is read because of it. The end of the last launch's
  // kernel makes what it wrote visible here; a launch that does not wait for that end is the error
  // that these numbers reveal. The addition does not wait for the epoch: both are asked for
  // together.
  return P::template add_relaxed<Scope::device>(&memory.blocks_begun[block], 1U) + 1 == epoch;
}

/// Whether all blocks of the earlier calls have ended, `blocks` in each, and no other block.
/// Otherwise another launch runs at the same time: some of its blocks are still there, or have left
/// because they were in no call. By the OS block, if it attends: no block of its call ends well
/// before it.
template <Platform P>
bool is_alone(const RankMemory& memory, u32 epoch, u32 blocks) {
  // Relaxed, as in attend.
  return P::template load_relaxed<Scope::device>(memory.blocks_ended) == u64{epoch - 1} * blocks;
}

/// Counts that a block ends: none of its warps uses the rank's memory any more. One thread.
template <Platform P>
void depart(const RankMemory& memory) {
  // Relaxed, as in attend. No actor waits for it.
  P::template count_relaxed<Scope::device>(memory.blocks_ended, u64{1});
}

}  // namespace moeos
