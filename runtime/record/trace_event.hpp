// SPDX-License-Identifier: Apache-2.0
// What a part's event says; records.def has its fields.
//
// Must not depend on: the actors that note events, and when they do.
#pragma once

#include "runtime/memory/records.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/dimensions.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// What an actor noted: a part, whose kind is a TaskKind, or a step of an actor of the OS block
/// that found something.
enum class TraceKind : u32 {
  last_task = kTaskKinds - 1,
#define KIND(name) name,
#include "runtime/record/trace_kinds.def"
};
inline constexpr u32 kTraceKinds = kTaskKinds + Dimensions::kTracedOsActors;
static_assert(kTraceKinds == kTaskKinds
#define KIND(name) +1
#include "runtime/record/trace_kinds.def"
);

/// A moment of a part, as its event has it; 0 where a machine has no such moment.
constexpr u32 since_begin(const TraceEvent& event, u64 moment_ns) {
  return moment_ns == 0 ? 0 : static_cast<u32>(moment_ns - event.begin_ns);
}

/// The event of a processor's finished part; `done`: tokens that a Combine part has written.
constexpr TraceEvent event_of(const Dimensions& dimensions, const Task& task, ReadyWord word,
                              u32 done) {
  TraceEvent event{};
  event.kind = static_cast<u32>(task.kind);
  event.part = word.part();
  event.peer = event.expert = kNone;
  event.awaited = task.awaits != 0 ? 1 : 0;
  if (is_product(task.kind)) {
    event.expert = task.local_expert;
    event.place = task.tile;
    event.rows = task.rows;
  } else if (task.kind == TaskKind::route) {
    event.place = word.task();  // the slice
  } else if (task.kind == TaskKind::combine) {
    event.part = task.rows == 0 ? task.first_ready : task.first_ready / dimensions.max_tokens;
    event.place = task.rows == 0 ? kNone : task.first_ready;
    event.rows = done;
    if (summands_of(dimensions, task) != Summands::pairs) {
      event.part = word.part();
    }
  }
  return event;
}

/// The event of a courier's part, of which the courier has copied `carried` rows.
constexpr TraceEvent event_of(const Dimensions& dimensions, const CourierPart& part, u32 carried,
                              bool announced) {
  TraceEvent event{};
  event.kind = static_cast<u32>(part.kind);
  event.part = part.first % dimensions.chunk_rows / dimensions.quarter_rows();
  event.peer = part.peer;
  event.expert = kNone;
  event.place = part.chunk(dimensions);
  event.rows = announced ? 1 : 0;
  event.carried = carried;
  return event;
}

}  // namespace moeos
