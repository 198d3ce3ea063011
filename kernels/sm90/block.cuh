// Shared memory of a processor block, and the roles of its warps.
//
//   warp 0       fetch: claims parts and copies their descriptors here, one ahead
//   warp 1       load: issues TMA for the products of the part at hand and the next
//   warp 2       complete: makes a finished part's effects visible
//   warps 4-11   two consumer warpgroups: products, epilogues, and the tasks that move rows
// May not know: what an epilogue computes.
#pragma once

#include "kernels/sm90/config.cuh"
#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/platform/cuda/platform.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"

namespace moeos::sm90 {

using cuda::Machine;

inline constexpr u32 kThreads = 384;
inline constexpr u32 kConsumerThreads = 256;
inline constexpr u32 kConsumerWarps = 8;
inline constexpr u32 kFetchWarp = 0;
inline constexpr u32 kLoadWarp = 1;
inline constexpr u32 kCompleteWarp = 2;
inline constexpr u32 kFirstConsumerWarp = 4;

// 64 K registers, of which accumulators take 128 a consumer thread; the rest is what each role's
// code needs without spilling.
inline constexpr u32 kConsumerRegisters = 224;
inline constexpr u32 kOtherRegisters = 56;
static_assert(kConsumerRegisters * kConsumerThreads +
                  kOtherRegisters * (kThreads - kConsumerThreads) <=
              65536);

// Named barriers.
inline constexpr u32 kConsumersBarrier = 1;
inline constexpr u32 kFirstGroupBarrier = 2;  // and 3: one for each consumer warpgroup

/// One K-step of both operands, as TMA lands it.
struct Stage {
  alignas(1024) u8 rows[kTileRows * kSwizzleBytes];
  alignas(1024) u8 weights[kTileColumns * kSwizzleBytes];
};
inline constexpr u32 kStageColumnsBytes = kTileColumns * kSwizzleBytes;

/// A claimed part; `word` of epoch 0 means: leave.
struct Slot {
  Task task;
  u64 word;
  u64 begun_ns;
  u32 bad_token;  // Route: a token whose logits are not finite or whose given ids are wrong, or
                  // kNone
};
inline constexpr u32 kSlots = 2;

/// Results of a consumer warpgroup on their way to memory: 64 rows of 128 two-byte columns.
inline constexpr u32 kStagingColumns = 128;
inline constexpr u32 kStagingBytes = kConsumerRows * kStagingColumns * 2;

/// What Route keeps of its block while it sorts the pairs by expert; in the staging memory, which
/// it does not use.
struct RouteScratch {
  u32 in_block[kTileColumns];               // [expert]: pairs so far, then the first place
  u16 expert[kTileRows * kGeometry.top_k];  // [pair of the block]; kNoExpert: unused slot
  u16 rank[kTileRows * kGeometry.top_k];    // [pair of the block]
};
inline constexpr u16 kNoExpert = 0xFFFF;
static_assert(sizeof(RouteScratch) <= kConsumers * kStagingBytes);

struct Shared {
  Stage stages[kStages];
  alignas(128) u8 staging[kConsumers][kStagingBytes];
  alignas(128) Slot slots[kSlots];
  u64 destinations[kTileRows];  // where each row of the tile's result goes
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
  Barrier slot_full[kSlots];
  Barrier slot_done[kSlots];   // consumers have finished the part
  Barrier slot_empty[kSlots];  // its effects are visible
  alignas(16) u8 rank[sizeof(Rank<Machine>)];
  Call call;
};

/// Shared memory of an OS block: the actors' own state.
struct alignas(16) OsShared {
  alignas(16) u8 rank[sizeof(Rank<Machine>)];
  Call call;
  /// OsMemory::bytes() bytes behind this object; the host checks that they fit.
  u8* memory() { return reinterpret_cast<u8*>(this + 1); }
};

/// Counts through a ring of `kSize` places and their phases.
template <u32 kSize>
struct RingPosition {
  u32 index = 0;
  u32 parity = 0;
  void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace moeos::sm90
