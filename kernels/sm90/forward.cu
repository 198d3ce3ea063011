// The one kernel: every block of the grid is a processor of some rank, and each rank's last block
// is its OS block.
//
// Launched cooperatively, because actors of different blocks wait for each other. With virtual
// ranks the grid is divided equally among them.
#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/host_failure.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/route.cuh"
#include "kernels/sm90/rows.cuh"
#include "kernels/sm90/token_count.cuh"
#include "runtime/os.hpp"
#include "runtime/processor.hpp"

namespace moeos::sm90 {

static_assert(Platform<Machine>);

/// Claims parts and copies their descriptors into the block's slots, one ahead of the consumers.
inline void run_fetch(const Rank<Machine>& rank, const Call& call, Processor<Machine>& processor,
                      Shared& shared) {
  RingPosition<kSlots> at;
  for (;; at.advance()) {
    shared.slot_empty[at.index].wait(at.parity ^ 1);
    Slot& slot = shared.slots[at.index];
    ReadyWord word;
    const bool more = processor.claim(word);
    if (more) {
      const auto* from = reinterpret_cast<const u32*>(&rank.memory.tasks[word.task()]);
      reinterpret_cast<u32*>(&slot.task)[Machine::lane()] = from[Machine::lane()];
    }
    if (Machine::lane() == 0) {
      slot.word = more ? word.bits() : 0;
      slot.bad_token = kNone;
    }
    __syncwarp();
    if (Machine::lane() == 0) {
      shared.slot_full[at.index].arrive();
    }
    if (!more) {
      return;
    }
  }
}

/// Issues the loads of every part that multiplies, as soon as stages are free.
inline void run_load(const RankArguments& arguments, const Rank<Machine>& rank, Shared& shared) {
  RingPosition<kSlots> at;
  RingPosition<kStages> stage;
  const bool given = arguments.topk_ids != nullptr;
  for (;; at.advance()) {
    shared.slot_full[at.index].wait(at.parity);
    const Slot& slot = shared.slots[at.index];
    const ReadyWord word{slot.word};
    if (word.epoch() == 0) {
      return;
    }
    // The inputs were written through the generic proxy, here or by peers, and acquired by the
    // fetch warp; TMA reads them through the async proxy.
    fence_proxy_async();
    if (multiplies(slot.task.kind) && !(given && slot.task.kind == TaskKind::route) &&
        Machine::lane() == 0) {
      load_tile(arguments, rank.layout, slot.task, word.part(), shared, stage);
    }
    if (Machine::lane() == 0) {  // which alone keeps the stages' positions
      shared.slot_empty[at.index].arrive();
    }
    __syncwarp();
  }
}

/// Makes the effects of finished parts visible, while the consumers are at the next one.
inline void run_complete(const RankArguments& arguments, Processor<Machine>& processor,
                         Shared& shared) {
  RingPosition<kSlots> at;
  for (;; at.advance()) {
    shared.slot_full[at.index].wait(at.parity);
    const Slot& slot = shared.slots[at.index];
    const ReadyWord word{slot.word};
    if (word.epoch() == 0) {
      return;
    }
    shared.slot_done[at.index].wait(at.parity);
    if (slot.bad_token != kNone && arguments.topk_ids != nullptr) {
      reject_given_routing(arguments, processor, slot.bad_token);
    } else if (slot.bad_token != kNone) {
      if (Machine::lane() == 0) {
        processor.reject_logits(slot.bad_token);
      }
    } else {
      processor.complete(slot.task, word, Machine::now_ns() - slot.begun_ns);
    }
    __syncwarp();
    if (Machine::lane() == 0) {
      shared.slot_empty[at.index].arrive();
    }
  }
}

/// Where each row of the tile's result goes: rows of the intermediate buffer, or of the owners'
/// combine cells.
inline void write_destinations(const RankArguments& arguments, const Rank<Machine>& rank,
                               const Task& task, Shared& shared) {
  const u32 row = threadIdx.x % kConsumerThreads;
  if (row >= kTileRows) {
    return;
  }
  u64 destination = 0;
  if (task.kind == TaskKind::gemm0) {
    // Padding rows too: the second product reads them, and must not read another call's NaN...
    // which would stay in their own rows anyway; but uninitialised memory is not read.
    destination = row < task.padded_rows
                      ? reinterpret_cast<u64>(arguments.intermediate_rows) +
                            (u64{task.first_result} + row) * kGeometry.hidden_bytes
                      : 0;
  } else {
    u32 first = 0;
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment segment = task.segments[s];
      if (row >= first && row < first + segment.rows) {
        destination = reinterpret_cast<u64>(
            outgoing_row(rank, segment.source, Round::combine, segment.first_row + row - first));
      }
      first += align_up(u32{segment.rows}, Geometry::kSegmentAlign);
    }
  }
  shared.destinations[row] = destination;
}

/// Products, epilogues and row moves, by two warpgroups.
inline void run_consumers(const RankArguments& arguments, const Rank<Machine>& rank,
                          const Call& call, Processor<Machine>& processor, Shared& shared) {
  const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
  const u32 group = warp / 4;
  RingPosition<kSlots> at;
  RingPosition<kStages> stage;
  Rows rows(rank, call, arguments);
  float d[128];
  for (;; at.advance()) {
    shared.slot_full[at.index].wait(at.parity);
    Slot& slot = shared.slots[at.index];
    const ReadyWord word{slot.word};
    if (word.epoch() == 0) {
      return;
    }
    const Task& task = slot.task;
    const u32 part = word.part();
    if (threadIdx.x == kFirstConsumerWarp * 32) {
      slot.begun_ns = Machine::now_ns();
    }
    if (task.kind == TaskKind::route) {
      const u32 first = part * kTileRows;
      const u32 end = minimum(call.tokens, first + kTileRows);
      const u32 pairs = first < end ? (end - first) * kGeometry.top_k : 0;
      auto& scratch = *reinterpret_cast<RouteScratch*>(shared.staging);
      if (arguments.topk_ids != nullptr) {
        copy_given_routing(arguments, rank.memory, first, end, &slot.bad_token);
      } else {
        multiply_tile(d, steps_of(task.kind), group, shared, stage);
        route_rows(d, arguments, rank.memory, first + group * kConsumerRows, end, &slot.bad_token);
      }
      named_barrier(kConsumersBarrier, kConsumerThreads);
      gather_choices(rank.memory, scratch, first * kGeometry.top_k, pairs);
      named_barrier(kConsumersBarrier, kConsumerThreads);
      if (warp == 0 && pairs > 0) {
        sort_block_by_warp(rank.memory, scratch, part, pairs);
      }
    } else if (multiplies(task.kind)) {
      write_destinations(arguments, rank, task, shared);
      multiply_tile(d, steps_of(task.kind), group, shared, stage);
      named_barrier(kConsumersBarrier, kConsumerThreads);  // destinations are written
      const u32 first = group * kConsumerRows;
      const u32 group_rows =
          task.padded_rows > first ? minimum(kConsumerRows, task.padded_rows - first) : 0;
      if (task.kind == TaskKind::gemm0) {
        finish_gemm0(d, arguments, task, part, group, group_rows, shared);
      } else {
        finish_gemm1(d, arguments, task, part, group, group_rows, shared);
      }
    } else {
      processor.move_rows(task, part, rows, Team{warp, kConsumerWarps});
    }
    // What TMA will read, here or on a peer, was written through the generic proxy.
    fence_proxy_async();
    named_barrier(kConsumersBarrier, kConsumerThreads);
    if (threadIdx.x == kFirstConsumerWarp * 32) {
      shared.slot_done[at.index].arrive();
    }
  }
}

inline void run_processor_roles(const RankArguments& arguments, const Rank<Machine>& rank,
                                const Call& call, u32 index, Shared& shared) {
  const u32 warp = threadIdx.x / 32;
  Processor<Machine> processor(rank, call, index);
  if (warp >= kFirstConsumerWarp) {
    raise_registers<kConsumerRegisters>();
    clear_rows_beyond(arguments, call.tokens, index);
    run_consumers(arguments, rank, call, processor, shared);
    return;
  }
  lower_registers<kOtherRegisters>();
  if (warp == kFetchWarp) {
    run_fetch(rank, call, processor, shared);
  } else if (warp == kLoadWarp) {
    run_load(arguments, rank, shared);
  } else if (warp == kCompleteWarp) {
    processor.begin();
    run_complete(arguments, processor, shared);
  }
}

/// Builds the objects that every actor of the block is handed. One thread.
inline void make_rank(const RankArguments& mine, u8* rank, u8* os_memory, Call& call) {
  new (rank) Rank<Machine>{Machine(mine.peers),
                           Layout(kGeometry),
                           RankMemory(kGeometry, mine.memory),
                           OsMemory(kGeometry, os_memory),
                           mine.heap,
                           mine.rank,
                           mine.deadline_ns};
  const u32 tokens = tokens_of(mine);
  const u32 pair_limit = pair_limit_of(tokens);
  const bool may_be_unsent = mine.topk_ids != nullptr || pair_limit < kGeometry.max_tokens;
  call = Call{*reinterpret_cast<const Rank<Machine>*>(rank)->memory.epoch, tokens, pair_limit,
              may_be_unsent ? 1U : 0U};
}

inline void run_processor_block(const RankArguments& mine, u32 index, Shared& shared) {
  if (threadIdx.x == 0) {
    make_rank(mine, shared.rank, nullptr, shared.call);
    for (u32 i = 0; i < kStages; ++i) {
      shared.stage_full[i].initialise(1);
      shared.stage_empty[i].initialise(kConsumers);
    }
    for (u32 i = 0; i < kSlots; ++i) {
      shared.slot_full[i].initialise(1);
      shared.slot_done[i].initialise(1);
      shared.slot_empty[i].initialise(2);  // the complete warp and the load warp
    }
    fence_barrier_initialisation();
  }
  __syncthreads();
  run_processor_roles(mine, *reinterpret_cast<const Rank<Machine>*>(shared.rank), shared.call,
                      index, shared);
}

inline void run_os(const RankArguments& mine, OsShared& shared) {
  const u32 warp = threadIdx.x / 32;
  // What a call starts from is not what another block left in this memory: clear it.
  for (u32 i = threadIdx.x; i < OsMemory::bytes(kGeometry) / 4; i += kThreads) {
    reinterpret_cast<u32*>(shared.memory())[i] = 0;
  }
  if (threadIdx.x == 0) {
    make_rank(mine, shared.rank, shared.memory(), shared.call);
  }
  __syncthreads();
  const Rank<Machine>& rank = *reinterpret_cast<const Rank<Machine>*>(shared.rank);
  if (warp == 0) {
    begin_call(rank, shared.call);
  }
  if (threadIdx.x == 0) {
    check_count(mine, rank, shared.call);
  }
  __syncthreads();
  if (warp < kOsWarps) {
    run_os_warp(rank, shared.call, warp);
  }
  if (warp == 0) {
    show_failure(mine, rank, shared.call);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moeos_forward(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  const u32 blocks = gridDim.x / kVirtualRanks;
  const RankArguments& mine = arguments.ranks[blockIdx.x / blocks];
  const u32 index = blockIdx.x % blocks;
  if (index + 1 < blocks) {
    run_processor_block(mine, index, *reinterpret_cast<Shared*>(shared_memory));
  } else {
    run_os(mine, *reinterpret_cast<OsShared*>(shared_memory));
  }
}

}  // namespace moeos::sm90
