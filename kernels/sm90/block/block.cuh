// SPDX-License-Identifier: Apache-2.0
// Shared memory of a processor block, and the roles of its warps.
//
//   warp 0       fetch: claims parts and copies their descriptors here, one ahead of the loads
//   warp 1       load: issues the TMA loads of the current part and the next
//   warp 2       courier: copies rows of this rank to their experts' ranks, next to all other roles
//   warp 3       complete: makes a finished part's effects visible
//   warps 4-11   two consumer warpgroups: products, epilogues, Route and the sums of Combine
//
// A part passes through its slot: full (fetched), done (its loads have begun and its results are in
// memory), empty. What is loaded passes through the stages, in the order of parts. Every consumer
// warp follows every stage, even those that it does not use: a barrier's parity distinguishes a
// phase from the one before it, but not from an older one. Must not depend on: what an epilogue
// computes.
#pragma once

#include "kernels/sm90/block/config.cuh"
#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/memory/rank.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/task.hpp"

namespace moeos::sm90 {

inline constexpr u32 kThreads = 384;
inline constexpr u32 kConsumerThreads = 256;
inline constexpr u32 kConsumerWarps = 8;
inline constexpr u32 kFetchWarp = 0;
inline constexpr u32 kLoadWarp = 1;
inline constexpr u32 kCourierWarp = 2;
inline constexpr u32 kCompleteWarp = 3;
inline constexpr u32 kFirstConsumerWarp = 4;

// A block is launched with the same number of registers for every thread, a multiple of 8, and can
// redistribute only those: a raise beyond them would wait forever. Accumulators take 128 of a
// consumer thread's; the rest is what each role's code needs without spilling.
inline constexpr u32 kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr u32 kConsumerRegisters = 208;
inline constexpr u32 kOtherRegisters = 88;
static_assert(kConsumerRegisters * kConsumerThreads +
                  kOtherRegisters * (kThreads - kConsumerThreads) <=
              kLaunchRegisters * kThreads);

// Named barriers.
inline constexpr u32 kConsumersBarrier = 1;

/// Counts through a ring of `kSize` entries and their phases.
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

/// One K-step of both operands, as TMA lands it.
struct Stage {
  alignas(1024) u8 rows[kTileRows * kSwizzleBytes];
  alignas(1024) u8 weights[kStageColumns * kSwizzleBytes];
};
inline constexpr u32 kWeightsPlace = kTileRows * kSwizzleBytes;  // in a stage, in bytes
static_assert(sizeof(Stage) == kWeightsPlace + kStageColumns * kSwizzleBytes);

/// An assignment's row among this rank's results, or kNone: it was not sent; and its weight.
struct PairRow {
  u32 row;
  float weight;
};

/// Rows that are added up for a token: from its experts; and in any Combine, at most.
inline constexpr u32 kExpertSummands = kGeometry.top_k + (kShares ? 1 : 0);
inline constexpr u32 kSummands =
    kSliced && !kGradients ? maximum(kExpertSummands, kGeometry.slices) : kExpertSummands;
/// Tokens of a Combine part, at most.
inline constexpr u32 kCombined =
    kSliced ? maximum(kGeometry.combine_tokens(kGeometry.max_tokens), kGeometry.sum_group_most())
            : kGeometry.combine_tokens(kGeometry.max_tokens);

/// What a Combine part sums: tokens that have sent rows, or sums of them over slices.
struct CombineRows {
  static constexpr u32 kTokens = kCombined;
  static constexpr u32 kRows = kTokens * kSummands;
  u32 token[kTokens];  // or, where the output is a partial sum, its row (place_of_partial)
  PairRow row[kRows];  // [token of the part * kSummands + j]: its pairs' rows, then the shared
                       // experts', then none; or those of slices, except for gradients
};

/// A claimed part, whose descriptor lies in Shared::tasks; a `word` of epoch 0 means: leave.
struct Slot {
  ReadyWord word;
  u64 begun_ns;
  u32 combined;                         // Combine: tokens that the part writes
  u32 bad_token;                        // Route: a token with bad logits or bad given ids, or kNone
  u32 last_part;                        // Route: 1 when this part was its block's last one
  u32 last_block;                       // Route: 1 when that block was the call's last one
  u8* results[Geometry::kMaxSegments];  // products: where each segment's first row goes
  CombineRows rows;                     // Combine
};
inline constexpr u32 kSlots = 2;
/// Steps of a part that are still to be loaded when the next part is claimed: its descriptor must
/// be here before they are loaded. No more, because a block that claims early takes a part from
/// idle blocks: a claim when the part before begins made large calls 2 to 7 % slower.
inline constexpr u32 kClaimSteps = 8;

/// Times of what happened to a slot's part, for a trace; unused without one.
struct Stamps {
  u64 claimed_ns;
  u64 computing_ns;
  u64 computed_ns;
};
inline constexpr bool kTraced = kGeometry.trace_events != 0;

/// What Route keeps of its block while it sorts the pairs by expert, in its memory. A token has at
/// most one pair of an expert, so a byte counts a block's pairs.
struct RouteScratch {
  u8 of_warp[kConsumerWarps][sorted_places()];  // [expert]: pairs in a warp's share of the block,
                                                // then those in the shares before it
  u16 first[sorted_places()];                   // [expert]: its first index among the block's pairs
  u16 expert[kRouteTokens * kGeometry.top_k];   // [pair of the block]; kNoExpert: unused slot
  u8 rank[kRouteTokens * kGeometry.top_k];      // [pair of the block]: earlier ones in the share
};
static_assert(kRouteTokens <= 0xFF, "so many pairs of an expert are counted in a byte");
inline constexpr u16 kNoExpert = 0xFFFF;

/// Shared memory that only Route uses, in bytes, and the memory of the courier's buffers: as much
/// as the stages leave. A gradient call gets its routing, so Route needs little.
inline constexpr u32 kRouteMemory = kGradients ? align_up(u32{sizeof(RouteScratch)}, 1024U) : 16384;
inline constexpr u32 kParcelMemory = 32768 - kRouteMemory;
static_assert(sizeof(RouteScratch) <= kRouteMemory);

/// The courier's rows under way: each buffer holds some rows, or a piece of one. Few large buffers,
/// because a copy takes the warp 0.3 us whatever its size. Rows of a gradient call are twice as
/// long, and its products wait for them: it has three.
struct Parcels {
  static constexpr u32 kBuffers = kGradients ? 3 : 2;
  static constexpr u32 kBufferBytes = kParcelMemory / kBuffers / 128 * 128;
  alignas(128) u8 buffers[kBuffers][kBufferBytes];
  Barrier full[kBuffers];
};

struct Shared {
  Stage stages[kStages];
  alignas(16) u8 route[kRouteMemory];
  Parcels parcels;
  Task tasks[kSlots + 1];  // the last is a tile of no rows, for rehearsals (call.cuh)
  Task finished;           // the complete warp's copy, so that it holds up no slot
  Slot slots[kSlots + 1];
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
  Barrier slot_full[kSlots];
  Barrier slot_done[kSlots];   // the part's loads have begun, and its results are in memory
  Barrier slot_empty[kSlots];  // every warp that reads the slot is done with it
  Barrier claim;               // once a part: most of its loads are under way, so fetch the next
  Call call;
  Stamps stamps[kSlots + 1];
};

static_assert(sizeof(Shared) <= 232448, "shared memory of a block on sm_90");

/// Notes when the consumers have a part's results.
inline void stamp_computed(Shared& shared, u32 slot) {
  if constexpr (kTraced) {
    if (threadIdx.x == kFirstConsumerWarp * 32) {
      shared.stamps[slot].computed_ns = Machine::now_ns();
    }
    __syncwarp();
  }
}

/// A consumer warp has used a stage, or skips it. Every warp arrives for itself: one that lags
/// behind the others of its group must not find the stage two phases later.
template <class Stages>
inline void release_stage(Stages& shared, u32 index) {
  __syncwarp();
  if (Machine::lane() == 0) {
    shared.stage_empty[index].arrive();
  }
}

/// release_stage for a stage that this warp has read by ordinary loads. The load warp fills it
/// again through the async proxy, and its wait for the barrier does not order accesses of two
/// proxies: so each thread that has read issues a fence after its loads (PTX ISA, "async proxy").
inline void release_read_stage(Shared& shared, u32 index) {
  fence_proxy_async_shared();
  release_stage(shared, index);
}

/// A warp is done with a part's slot, also with the slot that makes it leave. Every lane arrives:
/// that is rare, and tools can follow it (tests/gpu/test_sanitizer.py).
inline void release_slot(Shared& shared, u32 index) {
  __syncwarp();
  shared.slot_empty[index].arrive();
}

/// A watched wait: the fetch warp's for a slot and for permission to claim, and the courier's for
/// its loads. Slots pass through every other warp in turn, so a warp that waits at a barrier for
/// something that does not come also holds up the fetch warp. After its deadline the OS block then
/// finds that this rank's processors do not finish, and the call fails; warps that can leave do so
/// at once. If the barrier has not completed long after that, it never will, and the kernel ends
/// with the driver's error. A look lasts as long as the hardware suspends it.
inline void wait_watched(const Rank<Machine>& rank, const Call& call, Barrier& barrier,
                         u32 parity) {
  constexpr u32 kLooksEach = 32;
  constexpr u64 kLongNs = 5'000'000;
  u64 failed_since = 0;
  for (u32 looks = 1; !barrier.done(parity); ++looks) {
    if (looks % kLooksEach == 0 && rank.leaving(call.epoch)) {
      failed_since = failed_since == 0 ? Machine::now_ns() : failed_since;
      if (Machine::now_ns() - failed_since > kLongNs) {
        trap();
      }
    }
  }
}

/// The load warp's position in the stages. A part has begun when its first stage is free.
class Loader {
 public:
  explicit Loader(Shared& shared) : shared_(shared) {}

  void begin_part(u32 slot) {
    slot_ = slot;
    begun_ = false;
  }
  /// One lane, once a part: allows the next part to be claimed.
  void let_claim() { shared_.claim.arrive(); }
  /// One lane, for each stage in turn: waits until it is free.
  void wait() {
    shared_.stage_empty[at_.index].wait(at_.parity ^ 1);
    note_begin();
  }
  Stage& stage() const { return shared_.stages[at_.index]; }
  Barrier& full() const { return shared_.stage_full[at_.index]; }
  void advance() { at_.advance(); }
  /// One lane, when all of a part's loads are under way.
  void end_part() {
    note_begin();
    shared_.slot_done[slot_].arrive();
  }

 private:
  void note_begin() {
    if (!begun_) {
      shared_.slots[slot_].begun_ns = Machine::now_ns();
      begun_ = true;
    }
  }

  Shared& shared_;
  RingPosition<kStages> at_;
  u32 slot_ = 0;
  bool begun_ = false;  // used only by the one lane
};

/// A consumer thread's number, or its warpgroup's, for one part. Where tokens are columns it is
/// opaque to the compiler: otherwise what follows from it would take registers for all parts.
inline u32 of_part(u32 number) {
  return kTokensAreColumns || kWeightsInRegisters ? Machine::opaque(number) : number;
}

/// Shared memory of an OS block: the actors' own state.
struct alignas(16) OsShared {
  Call call;
  bool attends;
  /// OsMemory::bytes() bytes after this object; the host checks that they fit.
  u8* memory() { return reinterpret_cast<u8*>(this + 1); }
};

}  // namespace moeos::sm90
