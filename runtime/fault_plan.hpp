// SPDX-License-Identifier: Apache-2.0
// What a rank is to do wrong: the bytes that the host writes into a rank's memory before the first
// call of a layer whose world was given a fault plan. host/faults.py packs the same bytes.
//
// All zeros is a rank without faults. May not know: actors; what is done because of it
// (faults.hpp).
#pragma once

#include "runtime/base.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Where a rank can be held: before the first part of a call, or before a part of a kind.
enum class Stage : u32 { start = 0 };
constexpr Stage stage_of(TaskKind kind) { return static_cast<Stage>(static_cast<u32>(kind) + 1); }

/// No part of a stage begins in a call before `hold_ns` have passed since the first was about to.
struct Hold {
  u32 call;  // of the layer, from 1: of those since the last reset that ended well, and this one
  Stage stage;
  u32 kills;  // 1: the host is asked to end the process
  u32 reserved;
  u64 hold_ns;
  u64 since_ns;  // when the first part was about to begin; 0: none has been
};

/// All parts of a processor take longer.
struct SlowProcessor {
  u32 index;
  u32 factor_milli;
  u32 under_way;  // 1: a part has begun and is not complete
  u32 reserved;
  u64 extra_ns;
  u64 since_ns;  // when it has begun
};

/// What is announced to a peer is announced later.
struct SlowLink {
  u32 peer;
  u32 reserved;
  u64 latency_ns;
  u64 bytes_per_second;  // 0: no limit
  u64 free_ns;           // when all rows so far are through
};

struct alignas(kCacheLine) FaultPlan {
  enum : u32 { kMost = 16 };  // of each kind; no constant that would lie in every kernel
  u32 holds;
  u32 processors;
  u32 links;
  u32 reserved;
  u32* kill_word;  // of the host's, for holds that kill
  u64 reserved_too;
  Hold hold[kMost];
  SlowProcessor processor[kMost];
  SlowLink link[kMost];
};

}  // namespace moeos
