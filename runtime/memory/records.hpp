// SPDX-License-Identifier: Apache-2.0
// The records of records.def as structs, and the types of their fields.
//
// Must not depend on: the writers of a record, and when they write.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// The actor that noticed a failure.
enum class Actor : u32 { host = 0, scheduler = 1, subscriber = 2, processor = 3, sender = 4 };

/// What went wrong. The host turns it into an exception (host/moeos/engines/failure.py has the
/// messages).
enum class FailureKind : u32 {
#define KIND(name) name,
#include "runtime/memory/failure_kinds.def"
};

/// Where a rank can be held: before the first part of a call, or before a part of a kind.
enum class Stage : u32 { start = 0 };
constexpr Stage stage_of(TaskKind kind) { return static_cast<Stage>(static_cast<u32>(kind) + 1); }

/// Entries of a fault plan, of each sort. No variable, which would lie in every kernel.
enum : u32 { kFaultsMost = 16 };

#define RECORD(name, alignment) struct alignas(alignment) name {
#define FIELD(type, name) type name;
#define FIELDS(type, name, count) type name[count];
#define END_RECORD \
  }                \
  ;
#include "runtime/memory/records.def"

static_assert(sizeof(TraceEvent) == 64);
static_assert(sizeof(Failure) == kCacheLine, "one cache line in the heap");

}  // namespace moeos
