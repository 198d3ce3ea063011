// One call of the layer, as its actors are told of it, and the task that it starts with. May not
// know: queues, memory.
#pragma once

#include "runtime/base.hpp"
#include "runtime/geometry.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Fixed for one call; the epoch is read from device memory when the call starts.
struct Call {
  u32 epoch;
  u32 tokens;      // S of this rank
  u32 pair_limit;  // rows we may send to one expert in this call: capacity(S), or max_tokens when
                   // dropless
  u32 may_be_unsent;  // 1: a token may send no row at all (capacity, or routing given by the
                      // caller)
};

/// Whether the call has a Combine of tokens that sent no row, before all others.
constexpr bool combines_unsent(const Call& call) {
  return call.may_be_unsent != 0 && call.tokens > 0;
}

/// Blocks of the call's tokens; a call without tokens has an empty one, which still sends counts.
constexpr u32 route_blocks(const Geometry& geometry, const Call& call) {
  return maximum(1U, ceil_div(call.tokens, geometry.route_tokens));
}

/// Parts of the call's Route, and which they are: the slices of a block one behind the other. In a
/// word, the slice stands in place of the descriptor that Route does not have.
constexpr u32 route_parts(const Geometry& geometry, const Call& call) {
  return route_blocks(geometry, call) * geometry.route_slices;
}
constexpr ReadyWord route_word(const Geometry& geometry, const Call& call, u32 number) {
  return ReadyWord(call.epoch, TaskKind::route, number % geometry.route_slices,
                   number / geometry.route_slices);
}

/// Everyone knows that a call starts with Route, so its descriptor is never posted: processors make
/// it themselves.
constexpr Task route_task(const Geometry& geometry, const Call& call) {
  Task task{};
  task.kind = TaskKind::route;
  task.parts = static_cast<u16>(route_blocks(geometry, call));
  task.epoch = call.epoch;
  return task;
}

}  // namespace moeos
