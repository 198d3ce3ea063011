// SPDX-License-Identifier: Apache-2.0
// One event of a trace, as it lies in memory.
//
// May not know: who notes events, and when.
#pragma once

#include "runtime/base.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// What the OS block's actors note beside the parts of tasks: steps that found something.
enum class TraceKind : u32 {
  // 0 to kTaskKinds - 1: a part, as TaskKind
  schedule = kTaskKinds,  ///< the scheduler published parts, or saw that some were claimed
  counts,                 ///< a source's counts were decoded
  arrivals,               ///< flags were seen, and tiles planned
  returns,                ///< chunks came back
};

inline constexpr u32 kTraceKinds = kTaskKinds + Geometry::kTracedOsActors;

/// One part of a task, or one step of an actor. 64 bytes; the host reads it as it lies.
struct alignas(64) TraceEvent {
  u64 begin_ns;  // a part: claimed, and its inputs here
  u64 end_ns;    // a part: its effects are visible
  u32 kind;
  u32 part;    // of a task; dispatch: which of the pieces of its chunk comes first in it; of tokens
               // (spread.hpp): the first pair's number
  u32 peer;    // dispatch: the destination; replicate: the source
  u32 expert;  // GEMMs: the local expert
  u32 place;   // route: the slice, and `part` the block; GEMMs: the tile; dispatch: the part's
               // chunk; replicate: the chunk; combine: the first token's place among the complete
               // ones, and `part` the returns subscriber that had it; of awaited tokens the first
               // one's number, and 0; or kNone for tokens that sent
               // no row, and `part` the block
  u32 rows;    // GEMMs: of the tile; dispatch: 1 for the part that announced the chunk;
               // replicate: 1; combine: tokens written
  // Of a part, in ns behind begin_ns; 0 where a machine has no such moment.
  u32 loading;    // its loads begin
  u32 computing;  // its first operands are here
  u32 computed;   // its products or sums are done
  u32 stored;     // its results are in memory
  u32 carried;    // dispatch: rows that went; replicate: rows that were copied here
  u32 awaited;    // GEMMs, combine: 1 where the processor waited for its inputs itself, which were
                  // here when it was `claimed`

  /// A moment, as the fields above have it.
  constexpr u32 since(u64 moment_ns) const {
    return moment_ns == 0 ? 0 : static_cast<u32>(moment_ns - begin_ns);
  }
};
static_assert(sizeof(TraceEvent) == 64);

/// What the event of a processor's finished part says of its task; `done`: tokens that a Combine
/// part has written.
constexpr TraceEvent event_of(const Geometry& geometry, const Task& task, ReadyWord word,
                              u32 done) {
  TraceEvent event{};
  event.kind = static_cast<u32>(task.kind);
  event.part = word.part();
  event.peer = event.expert = kNone;
  event.awaited = task.awaits;
  if (task.kind == TaskKind::gemm0 || task.kind == TaskKind::gemm1) {
    event.expert = task.local_expert;
    event.place = task.tile;
    event.rows = task.rows;
  } else if (task.kind == TaskKind::route) {
    event.place = word.task();  // the slice
  } else if (task.kind == TaskKind::combine) {
    event.part = task.rows == 0 ? task.first_ready : task.first_ready / geometry.max_tokens;
    event.place = task.rows == 0 ? kNone : task.first_ready;
    event.rows = done;
  }
  return event;
}

/// And a courier's of its part, of whose rows it has copied `carried`.
constexpr TraceEvent event_of(const Geometry& geometry, const CourierPart& part, u32 carried,
                              bool announced) {
  TraceEvent event{};
  event.kind = static_cast<u32>(part.kind);
  event.part = part.first % geometry.chunk_rows / geometry.piece_rows();
  event.peer = part.peer;
  event.expert = kNone;
  event.place = part.chunk(geometry);
  event.rows = announced ? 1 : 0;
  event.carried = carried;
  return event;
}

}  // namespace moeos
