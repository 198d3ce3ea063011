// SPDX-License-Identifier: Apache-2.0
// What the blocks of a call's kernel do: every block of the grid is a processor of some rank, and
// each rank's last block is its OS block.
//
// Launched cooperatively, because actors of different blocks wait for each other. With virtual
// ranks the grid is divided equally among them. An image (forward.cu, backward.cu) first includes
// the definitions of its products: prefetch_maps, load_tile, compute_tile. Must not depend on:
// element types and products.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/block/host_failure.cuh"
#include "kernels/sm90/block/token_count.cuh"
#include "kernels/sm90/combine/combine.cuh"
#include "kernels/sm90/epilogue/sinks.cuh"
#include "kernels/sm90/move/courier.cuh"
#include "kernels/sm90/ptx/code.cuh"
#include "kernels/sm90/route/route.cuh"
#include "runtime/actors/os.hpp"
#include "runtime/actors/processor.hpp"
#include "runtime/health/attendance.hpp"
#include "runtime/record/trace.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

static_assert(Platform<Machine>);

// Where several ranks share a GPU, the OS block's code is a function, and needs no stack. Inlined,
// it would take registers from the processors' code, which would then need a stack.
#if MOEOS_VIRTUAL_RANKS == 1
#define MOEOS_OS_BLOCK MOEOS_INLINED
#else
#define MOEOS_OS_BLOCK __attribute__((noinline)) inline
#endif

/// Hands a fetched part to the block's other warps; a word of epoch 0 makes them leave.
inline void fill_slot(Slot& slot, ReadyWord word, Stamps& stamps, u64 claimed_ns) {
  if (Machine::lane() == 0) {
    slot.word = word;
    slot.bad_token = kNone;
    slot.last_part = 0;
    slot.last_block = 0;
    if constexpr (kTraced) {
      stamps = Stamps{claimed_ns, 0, 0};
    }
  }
  __syncwarp();
}

/// Finds the part of a ticket and its descriptor, and waits for its inputs if they may not be here.
/// Looks up where its rows lie or its results go, while the block computes the part before. False:
/// leave.
MOEOS_INLINED bool fetch_part(const RankArguments& arguments, const Rank<Machine>& rank,
                              const Call& call, const RoutingMap& map,
                              Processor<Machine>& processor, u32 ticket, Task& task, Slot& slot,
                              Stamps& stamps) {
  ReadyWord word;
  const auto nothing = [] { return false; };
  bool more = processor.claim(ticket, word, task, nothing);
  u64 claimed_ns = trace_time<Machine>(kGeometry);
  if constexpr (kShares) {
    const Rank<Machine> here = rank_of_look(arguments);
    more = more && (task.kind != TaskKind::combine || processor.await_shared(here.memory, nothing));
  }
  if (more) {
    find_results(arguments, rank, task, slot);
    look_up_rows(arguments, rank, call, map, task, slot.rows);
    if (kGeometry.up_front_rows != 0 && waits_for_inputs(task)) {
      // For this part only: otherwise the addresses below would take registers for all parts.
      const Rank<Machine> here = rank_of_look(arguments);
      const auto found = [&](u32 number, u32 pair, u32 row) {
        note_awaited_row(here, number, pair, MOEOS_PLANTED(awaited_rows_lie_elsewhere) ? 0 : row,
                         slot.rows);
      };
      const RoutingMap routed(kGeometry, here.memory, call);
      more = processor.await(Inputs<Machine>(here, call, routed, task, found), nothing);
      claimed_ns = trace_time<Machine>(kGeometry);
    }
    if constexpr (kSliced) {
      note_partials(arguments, call, task, slot.rows);
    }
  }
  fill_slot(slot, more ? word : ReadyWord(), stamps, claimed_ns);
  return more;
}

/// Fetches a block's first part, if it is one of Route, as it mostly is: everything in a call waits
/// for Route, and this path to it has little code. False: the ticket is for another part.
inline bool fetch_first_route(const Rank<Machine>& rank, const Call& call,
                              Processor<Machine>& processor, u32 ticket, Task& task, Slot& slot,
                              Stamps& stamps) {
  ReadyWord word;
  if (Machine::has_faults() || !processor.is_route(ticket, word, task)) {
    return false;
  }
  fill_slot(slot, word, stamps, trace_time<Machine>(kGeometry));
  return true;
}

/// Takes a ticket, at an address for this look only: otherwise the address takes registers for all
/// parts.
inline u32 take_ticket(const RankArguments& arguments, const Call& call) {
  MemoryParts<u8*> memory = arguments.memory;
  asm volatile("" : "+l"(memory.control));
  return Processor<Machine>::take_ticket(RankMemory(kGeometry, memory).call(call.epoch));
}

/// Keeps the block's slots filled: claims a part when nearly all loads of the part before are under
/// way. Leaves last.
MOEOS_INLINED void run_fetch(const RankArguments& arguments, const Rank<Machine>& rank,
                             const Call& call, Processor<Machine>& processor, Shared& shared) {
  const RoutingMap map(rank.geometry(), rank.memory, call);
  RingPosition<kSlots> at;
  RingPosition<1> claim;
  claim.parity = 1;  // nothing is before the first part
  u32 ticket = processor.take_ticket();
  bool taken = true;
  if (fetch_first_route(rank, call, processor, ticket, shared.tasks[at.index],
                        shared.slots[at.index], shared.stamps[at.index])) {
    shared.slot_full[at.index].arrive();  // every lane, as below
    taken = false;
    at.advance();
    claim.advance();
  }
  for (bool more = true; more; at.advance(), claim.advance()) {
    wait_watched(rank, call, shared.claim, claim.parity);
    wait_watched(rank, call, shared.slot_empty[at.index], at.parity ^ 1);
    ticket = taken ? ticket : take_ticket(arguments, call);
    taken = false;
    more = fetch_part(arguments, rank, call, map, processor, ticket, shared.tasks[at.index],
                      shared.slots[at.index], shared.stamps[at.index]);
    if (more) {
      processor.begin_part(shared.tasks[at.index]);
    }
    shared.slot_full[at.index].arrive();  // every lane, to publish what it has copied
  }
  for (u32 i = 0; i < kSlots; ++i, at.advance()) {
    wait_watched(rank, call, shared.slot_empty[at.index], at.parity ^ 1);
  }
}

/// Whether a warp that waits for its block's next part has time to rehearse: to run its code for a
/// tile, with one of no rows. Code that is then in the instruction cache need not come from L2 when
/// rows wait for it: consumers have some 30 KB, for which a block's first part took 13 us longer
/// than the others.
inline bool may_rehearse(Barrier& full, u32 parity) {
  constexpr u64 kPatienceNs = 4'000;  // Route's parts are there sooner
  const u64 begin_ns = Machine::now_ns();
  bool waits = true;
  while (waits && Machine::now_ns() - begin_ns < kPatienceNs) {
    waits = !full.done(parity);
  }
  return agreed<Machine>(waits);
}

/// Waits for the block's next part, in slot `at`, or has time to rehearse first; returns the slot
/// of the part, or of the rehearsal, kSlots. A warp that knows tiles does not rehearse.
inline u32 next_place(Shared& shared, const RingPosition<kSlots>& at, bool knows_tiles) {
  Barrier& full = shared.slot_full[at.index];
  if (!knows_tiles && may_rehearse(full, at.parity)) {
    return kSlots;
  }
  full.wait(at.parity);
  return at.index;
}

/// Issues the loads of every part that has any, as soon as stages are free.
inline void run_load(const RankArguments& arguments, const Rank<Machine>& rank, const Call& call,
                     Shared& shared) {
  const RoutingMap map(rank.geometry(), rank.memory, call);
  RingPosition<kSlots> at;
  Loader loader(shared);
  prefetch_maps(arguments);
  bool knows_tiles = false;
  for (;;) {
    const u32 place = next_place(shared, at, knows_tiles);
    const bool rehearses = place == kSlots;
    Slot& slot = shared.slots[place];
    const Task& task = shared.tasks[place];
    const ReadyWord word = slot.word;
    if (word.epoch() == 0) {
      release_slot(shared, at.index);
      return;
    }
    // Other actors, here or at peers, wrote the inputs, and the fetch warp acquired them; TMA reads
    // them through the async proxy.
    fence_proxy_async();
    loader.begin_part(place);
    const RankArguments& its = arguments_of_look(arguments);
    if (is_product(task.kind)) {
      knows_tiles = true;
      load_tile(its, rank.layout, task, word.part(), loader);
    } else if (task.kind == TaskKind::route && gate_routes(its)) {
      load_route(its, RouteShare(call, word), loader);
    } else {
      if (Machine::lane() == 0) {
        loader.let_claim();
      }
      if (task.kind == TaskKind::combine) {
        load_tokens(arguments, rank, call, map, task, slot, loader);
      }
    }
    if (rehearses) {
      continue;
    }
    if (Machine::lane() == 0) {
      loader.end_part();
    }
    release_slot(shared, at.index);
    at.advance();
  }
}

/// Makes the effects of finished parts visible, while the consumers compute the next part.
inline void run_complete(const RankArguments& arguments, const Rank<Machine>& rank,
                         Processor<Machine>& processor, u32 index, Shared& shared) {
  Trace<Machine> trace(rank, index);
  u64 busy_until_ns = 0;  // parts overlap: time is counted once
  RingPosition<kSlots> at;
  for (;; at.advance()) {
    shared.slot_full[at.index].wait(at.parity);
    const Slot& slot = shared.slots[at.index];
    const ReadyWord word = slot.word;
    if (word.epoch() == 0) {
      release_slot(shared, at.index);
      return;
    }
    shared.slot_done[at.index].wait(at.parity);
    // A copy, so that the slot is free for the next part while this one is made visible.
    reinterpret_cast<u32*>(&shared.finished)[Machine::lane()] =
        reinterpret_cast<const u32*>(&shared.tasks[at.index])[Machine::lane()];
    const u64 begun_ns = slot.begun_ns;
    const u32 combined = slot.combined;
    const u32 bad_token = slot.bad_token;
    const Stamps stamps = kTraced ? shared.stamps[at.index] : Stamps{};
    const u64 stored_ns = trace_time<Machine>(kGeometry);
    release_slot(shared, at.index);
    if (bad_token != kNone) {
      const bool of_ids =
          arguments.topk_ids != nullptr && reject_given_routing(arguments, processor, bad_token);
      if (!of_ids && Machine::lane() == 0) {
        processor.reject_logits(bad_token);
      }
    } else {
      const u64 now = Machine::now_ns();
      processor.complete(shared.finished, word, now - maximum(begun_ns, busy_until_ns), combined);
      busy_until_ns = now;
    }
    if (kTraced && Machine::lane() == 0) {
      TraceEvent event = event_of(kGeometry, shared.finished, word, combined);
      event.begin_ns = stamps.claimed_ns;
      event.end_ns = Machine::now_ns();
      event.loading = since_begin(event, begun_ns);
      event.computing = since_begin(event, stamps.computing_ns);
      event.computed = since_begin(event, stamps.computed_ns);
      event.stored = since_begin(event, stored_ns);
      trace.note(event);
    }
    __syncwarp();
  }
}

/// Notes when the consumers have a part's first operands.
inline void stamp_computing(Shared& shared, u32 slot, const RingPosition<kStages>& stage) {
  if constexpr (kTraced) {
    if (threadIdx.x == kFirstConsumerWarp * 32) {
      shared.stage_full[stage.index].wait(stage.parity);
      shared.stamps[slot].computing_ns = Machine::now_ns();
    }
    __syncwarp();
  }
}

/// Products, epilogues, Route and the sums of Combine, by two warpgroups.
MOEOS_INLINED void run_consumers(const RankArguments& arguments, const Call& call, u32 index,
                                 Shared& shared) {
  const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
  const u32 group = warp / 4;
  RingPosition<kStages> stage;
  RingPosition<kSlots> at;
  // A gated tile has half as many activations: rehearsing saves 2 us, which is not worth it.
  bool knows_tiles = kShape.gated();
  for (;;) {
    const u32 place = next_place(shared, at, knows_tiles);
    const bool rehearses = place == kSlots;
    Slot& slot = shared.slots[place];
    const ReadyWord word = slot.word;
    if (word.epoch() == 0) {
      release_slot(shared, at.index);
      return;
    }
    const Task& task = shared.tasks[place];
    const TaskKind kind = task.kind;
    if (!rehearses && (kind != TaskKind::route || gate_routes(arguments))) {
      stamp_computing(shared, at.index, stage);
    }
    if (is_product(kind)) {
      knows_tiles = true;
      compute_tile(arguments, slot, word, task, of_part(group), place, shared, stage);
      if (task.padded_rows == 0) {
        continue;
      }
      __syncwarp();
      if (Machine::lane() == 0) {
        shared.slot_done[at.index].arrive();
      }
    } else {
      if (kind == TaskKind::route) {
        run_route(arguments, call, index, slot, task, shared, stage);
      } else {
        sum_tokens(arguments, call, task, slot.rows, shared, stage);
      }
      stamp_computed(shared, place);
      named_barrier(kConsumersBarrier, kConsumerThreads);
      if (threadIdx.x == kFirstConsumerWarp * 32) {
        shared.slot_done[at.index].arrive(kConsumerWarps);
      }
    }
    release_slot(shared, at.index);
    at.advance();
  }
}

inline constexpr u32 kBlocks = kGeometry.processors + 1;  // of a rank

/// Asks L2 for this block's share of the kernel's instructions, of which there is one copy for all
/// ranks of a launch. In a call of few tokens most of them run once, and the kernel before this one
/// had L2 for itself: each line would come from memory when some block first needs it. One thread.
inline void prefetch_code(const RankArguments& first_rank) {
  constexpr u64 kAll = u64{kVirtualRanks} * kBlocks;
  const u64 share = align_up(ceil_div(first_rank.code_bytes, kAll), u64{kCacheLine});
  const u64 first = blockIdx.x * share;
  if (first < first_rank.code_bytes) {
    const u64 bytes = minimum(share, first_rank.code_bytes - first);
    prefetch_bytes(first_rank.code + first, static_cast<u32>(bytes));
  }
}

MOEOS_INLINED void run_processor_roles(const RankArguments& arguments, const Call& call, u32 index,
                                       Shared& shared) {
  const u32 warp = threadIdx.x / 32;
  if (warp >= kFirstConsumerWarp) {
    raise_registers<kConsumerRegisters>();
    clear_rows_beyond(arguments, call.tokens, index);
    run_consumers(arguments, call, index, shared);
    return;
  }
  const Rank<Machine> rank = rank_of(arguments, nullptr);
  Processor<Machine> processor(rank, call, index);
  lower_registers<kOtherRegisters>();
  if (warp == kFetchWarp) {
    run_fetch(arguments, rank, call, processor, shared);
  } else if (warp == kLoadWarp) {
    run_load(arguments, rank, call, shared);
  } else if (warp == kCourierWarp) {
    run_courier(arguments, index, shared);
  } else {
    run_complete(arguments, rank, processor, index, shared);
  }
}

inline Call call_of(const RankArguments& mine) {
  const u32 tokens = tokens_of(mine);
  const u32 pair_limit = pair_limit_of(tokens);
  const bool may_be_unsent =
      mine.topk_ids != nullptr || pair_limit < kGeometry.max_tokens || kShape.zero_experts > 0;
  Call call{*rank_memory(mine).epoch, tokens, pair_limit, may_be_unsent ? 1U : 0U, mine.identity};
  if constexpr (kSliced) {
    call.leaves_partials = mine.leaves_partials;
    // A caller that adds up all rows needs the same number from each slice.
    call.inputs = mine.leaves_partials * (mine.rows + 1) * kRowsApart;
  }
  return call;
}

/// The call, as thread 0 of a processor finds it: none if this block's launch is not alone. Then
/// the OS block reports it.
inline Call attended_call(const RankArguments& mine, u32 index) {
  Call call = call_of(mine);
  if (!attend<Machine>(rank_memory(mine), call.epoch, index)) {
    call.epoch = 0;
  }
  return call;
}

/// Whether the OS block attends the call, as its thread 0 finds. If the launch is not alone, all
/// ranks that wait for this call must end.
inline bool os_attends(const RankArguments& mine, const Call& call) {
  const RankMemory memory = rank_memory(mine);
  // Both are evaluated, always: every block counts.
  const bool attends = attend<Machine>(memory, call.epoch, kGeometry.processors);
  const bool alone = is_alone<Machine>(memory, call.epoch, kBlocks);
  if (attends && alone) {
    return true;
  }
  const Rank<Machine> rank = rank_of(mine, nullptr);
  if (rank.leaving(call.epoch)) {  // its blocks may have left for that reason, or it is launched
                                   // again
    return attends;
  }
  rank.fail(failure_of(rank, call, FailureKind::calls_at_once, Actor::scheduler));
  return false;
}

MOEOS_INLINED void run_processor_block(const RankArguments& mine, u32 index, Shared& shared) {
  if (threadIdx.x == 0) {
    shared.call = attended_call(mine, index);
  }
  if (threadIdx.x == 0 && shared.call.epoch != 0) {
    const Rank<Machine> rank = rank_of(mine, nullptr);
    shared.tasks[kSlots] = Task{};
    shared.tasks[kSlots].kind = kFirstProduct.kind;
    shared.slots[kSlots].word = ReadyWord(shared.call.epoch, kFirstProduct.kind, 0, 0);
    forget_last_call(rank, index);
    forget_last_call(rank, kGeometry.processors + index);  // the courier
    for (u32 i = 0; i < kStages; ++i) {
      shared.stage_full[i].initialise(1);
      shared.stage_empty[i].initialise(kConsumerWarps);
    }
    for (u32 i = 0; i < kSlots; ++i) {
      shared.slot_full[i].initialise(Machine::kLanes);
      shared.slot_done[i].initialise(1 + kConsumerWarps);  // the load warp, too
      shared.slot_empty[i].initialise((2 + kConsumerWarps) * Machine::kLanes);  // all readers
    }
    shared.claim.initialise(1);
    for (Barrier& full : shared.parcels.full) {
      full.initialise(1);
    }
    fence_barrier_initialisation();
  }
  __syncthreads();
  const Call call = shared.call;
  if (call.epoch != 0) {
    run_processor_roles(mine, call, index, shared);
  }
}

MOEOS_OS_BLOCK void run_os(const RankArguments& mine, OsShared& shared) {
  const u32 warp = threadIdx.x / 32;
  // The shared memory may hold what another block left there: clear it.
  for (u32 i = threadIdx.x; i < OsMemory::bytes(kGeometry) / 4; i += kThreads) {
    reinterpret_cast<u32*>(shared.memory())[i] = 0;
  }
  if (threadIdx.x == 0) {
    shared.call = call_of(mine);
    shared.attends = os_attends(mine, shared.call);
  }
  __syncthreads();
  const Rank<Machine> rank = rank_of(mine, shared.memory());
  const Call call = shared.call;
  if (shared.attends) {
    if (warp == 0) {
      begin_call(rank, call);
    }
    if (threadIdx.x == 0) {
      check_count(mine, rank, call);
    }
    __syncthreads();
    if (warp < os_warps<Machine>(kGeometry)) {
      run_os_warp(rank, call, warp);
    }
  }
  if (warp == 0) {
    show_failure(mine, rank, call);
  }
}

/// Runs a block of a launch: as its rank's processor, or as its OS block.
template <class Launch>
MOEOS_INLINED void run_block(const Launch& arguments) {
  const u32 rank = kVirtualRanks == 1 ? 0 : blockIdx.x / kBlocks;
  const RankArguments& mine = arguments.ranks[rank];
  const u32 index = blockIdx.x - rank * kBlocks;
  if (threadIdx.x == kCompleteWarp * 32) {  // this warp has nothing else to do yet
    prefetch_code(arguments.ranks[0]);
  }
  if (index < kGeometry.processors) {
    run_processor_block(mine, index, *reinterpret_cast<Shared*>(dynamic_shared_memory()));
  } else {
    run_os(mine, *reinterpret_cast<OsShared*>(dynamic_shared_memory()));
  }
  __syncthreads();  // no warp of this block is in the call any more
  if (threadIdx.x == 0) {
    depart<Machine>(rank_memory(mine));
  }
}

}  // namespace moeos::sm90
