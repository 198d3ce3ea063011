// SPDX-License-Identifier: Apache-2.0
// One call of the layer, as its actors know it, and the task that it starts with. Must not depend
// on: queues, memory.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Fixed for one call; the epoch is read from device memory when the call starts.
struct Call {
  u32 epoch;       // from 1; 0: no call, in which no block takes part
  u32 tokens;      // S of this rank
  u32 pair_limit;  // rows we may send to one expert in this call: capacity(S), or max_tokens when
                   // dropless
  u32 may_be_unsent;  // 1: a token may send no row at all (capacity, or routing given by the
                      // caller)
  u32 identity;    // the host's digest of this call; equal on all ranks, or the call fails; 0: none
  u32 inputs = 0;  // the host's digest of x and the routing; equal on all that hold slices
                   // (slices.hpp)
  u32 leaves_partials = 0;  // 1: each slice's partial sums are its output, and the caller adds them
                            // up
};

/// Whether the call has a Combine of tokens that sent no row, before all others.
constexpr bool combines_unsent(const Call& call) {
  return call.may_be_unsent != 0 && call.tokens > 0;
}

/// Blocks of the call's tokens, which are routed together.
constexpr u32 route_blocks(const Geometry& geometry, const Call& call) {
  return geometry.route_blocks_of(call.tokens);
}

/// Tokens from `first` to before `end`.
struct TokenRange {
  u32 first;
  u32 end;
};
constexpr TokenRange tokens_of_block(const Geometry& geometry, const Call& call, u32 block) {
  const u32 tokens = geometry.route_tokens_of(call.tokens);
  return {minimum(call.tokens, block * tokens), minimum(call.tokens, (block + 1) * tokens)};
}

/// Parts of the call's Route; parts of a block are consecutive. Route has no descriptor: its word
/// has the part's index in its block instead.
constexpr u32 route_parts(const Geometry& geometry, const Call& call) {
  return route_blocks(geometry, call) * geometry.route_parts_of_block(call.tokens);
}
constexpr ReadyWord route_word(const Geometry& geometry, const Call& call, u32 number) {
  const u32 of_block = geometry.route_parts_of_block(call.tokens);
  return ReadyWord(call.epoch, TaskKind::route, number % of_block, number / of_block);
}

/// A call with tokens always starts with Route, so its descriptor is never posted: processors make
/// it themselves.
constexpr Task route_task(const Geometry& geometry, const Call& call) {
  Task task{};
  task.kind = TaskKind::route;
  task.parts = static_cast<u16>(route_blocks(geometry, call));
  task.epoch = call.epoch;
  return task;
}

}  // namespace moeos
