// Algorithm 4: the actor that runs parts of tasks, and what follows from a part's end.
//
// claim() takes the next part from the ready ring; run() computes it through the kernels;
// complete() makes its effects visible: a chunk's flag, the next GEMM of a tile, credits to owners.
// On the GPU a fetch warp claims ahead while other warps compute; on the twin one thread does all
// three in turn. A part never waits for another task: it was posted because its inputs are here.
// May not know: arithmetic, element types.
#pragma once

#include "runtime/base.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/packet.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_finish.hpp"
#include "runtime/routing_map.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// What a processor computes with. One object a processor; every function is called by all lanes,
/// and runs to its end without waiting.
template <class K>
concept Kernels = requires(K& kernels, const Task& task, u32 index, u8* destination) {
  {
    kernels.route(index)
  } -> SameAs<u32>;  // block of tokens -> first token with logits not finite, or kNone
  kernels.copy_row(index, destination);  // token -> its row's place in a cell
  kernels.gemm0(task, index);            // tile, N-part
  kernels.gemm1(task, index);
  kernels.combine(index);  // token whose rows are all back, or that sent none
};

template <Platform P, Kernels K>
class Processor {
 public:
  Processor(const Rank<P>& rank, const Call& call, K& kernels, u32 index)
      : rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        kernels_(kernels),
        tally_(rank.memory.tallies[index]),
        map_(rank.geometry(), rank.memory, call.tokens, call.pair_limit) {
    if (P::lane() == 0) {
      tally_ = Tally{};
    }
    P::sync_lanes();
  }

  /// Fetch, run, repeat, until the scheduler interrupts or the call is aborted.
  void start() {
    ReadyWord word;
    while (claim(word)) {
      const Task& task = rank_.memory.tasks[word.task()];
      MOEOS_CHECK(task.epoch == call_.epoch && task.kind == word.kind());
      const u64 begin = P::now_ns();
      if (!run(task, word.part())) {
        return;
      }
      complete(task, word.task());
      if (P::lane() == 0) {
        ++tally_.tasks[static_cast<u32>(task.kind)];
        tally_.busy_ns += P::now_ns() - begin;
      }
    }
  }

 private:
  /// Takes a ticket and waits for its slot. False: leave.
  bool claim(ReadyWord& word) {
    // Relaxed: a ticket publishes nothing; the slot does.
    const u32 ticket = by_one_lane(
        [this] { return P::template add_relaxed<Scope::device>(&state_.ring_claimed.value, 1U); });
    MOEOS_CHECK(ticket < rank_.memory.ring_slots());
    Watch<P> watch(2 * rank_.deadline_ns);  // the OS block notices a late peer first, and says more
    u32 heartbeat = 0;
    u32 idle = 0;
    for (;;) {
      // Pairs with Scheduler::publish_up_to: the descriptor and the inputs of its parts are here.
      word = ReadyWord(P::template load_acquire<Scope::device>(&rank_.memory.ring[ticket]));
      if (word.epoch() == call_.epoch) {
        return true;
      }
      // Pairs with Scheduler::interrupt.
      if (P::template load_acquire<Scope::device>(&state_.interrupt.value) != 0 ||
          rank_.leaving()) {
        return false;
      }
      const u32 beat = P::template load_relaxed<Scope::device>(&state_.heartbeat.value);
      if (beat != heartbeat) {
        heartbeat = beat;
        watch.progress();
      }
      if (watch.expired()) {
        Failure failure = failure_of(rank_, call_, FailureKind::os_silent, Actor::processor);
        failure.seen = beat;
        failure.waited_ns = watch.waited_ns();
        rank_.fail(failure);
        return false;
      }
      P::pause(idle);
    }
  }

  /// Computes one part. False: the call cannot go on, and a failure has been raised.
  bool run(const Task& task, u32 part) {
    switch (task.kind) {
      case TaskKind::route:
        return route(part);
      case TaskKind::dispatch:
        dispatch(task.peer, task.first_chunk + part);
        return true;
      case TaskKind::gemm0:
        kernels_.gemm0(task, part);
        return true;
      case TaskKind::gemm1:
        kernels_.gemm1(task, part);
        return true;
      case TaskKind::combine:
        if (task.peer == kNone) {
          combine_unsent(part);
        } else {
          combine(task.peer, task.first_chunk);
        }
        return true;
    }
    return false;
  }

  /// Makes a finished part's effects visible.
  void complete(const Task& task, u32 index) {
    switch (task.kind) {
      case TaskKind::route:
        // Acquire-release: publishes this block's routing, and gives the last part every block's.
        if (by_one_lane([this] {
              return P::template add_acquire_release<Scope::device>(&state_.route_parts_done.value,
                                                                    1U);
            }) + 1 ==
            task.parts) {
          finish_routing(rank_, call_, tally_);
        }
        break;
      case TaskKind::dispatch:
        // Relaxed: the scheduler only counts how many are under way.
        by_one_lane([this] {
          return P::template add_relaxed<Scope::device>(&state_.dispatch_parts_done.value, 1U);
        });
        break;
      case TaskKind::gemm0:
        if (last_part(rank_.memory.gemm0_parts_done, task) && P::lane() == 0) {
          post_gemm1(task, index);
        }
        break;
      case TaskKind::gemm1:
        if (last_part(rank_.memory.gemm1_parts_done, task) && P::lane() == 0) {
          return_rows(rank_, task, tally_);
          tally_.padding_rows += task.padded_rows - task.rows;
          // Relaxed: the scheduler compares a number; the rows themselves were published to their
          // owners.
          P::template add_relaxed<Scope::device>(&state_.rows_returned.value, task.rows);
        }
        break;
      case TaskKind::combine:
        break;  // counted row by row
    }
  }

  bool route(u32 block) {
    const u32 token = kernels_.route(block);
    if (token == kNone) {
      return true;
    }
    Failure failure = failure_of(rank_, call_, FailureKind::logits_not_finite, Actor::processor);
    failure.chunk = token;
    rank_.fail(failure);
    return false;
  }

  void dispatch(u32 peer, u32 chunk) {
    const Geometry& geometry = rank_.geometry();
    const u32 rows = rows_in_chunk(geometry, rank_.memory.rows_sent(peer), chunk);
    const u32* starts = rank_.memory.send_starts(peer);
    for (u32 i = 0; i < rows; ++i) {
      const RoutingMap::Place place = map_.place_at(peer, chunk * geometry.chunk_rows + i);
      const u32 row = rank_.layout.row(place.local_expert, place.slot, starts[place.local_expert]);
      kernels_.copy_row(map_.pair_at(place) / geometry.top_k,
                        outgoing_row(rank_, peer, Round::dispatch, row));
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      send_chunk(rank_, call_, map_, peer, chunk, tally_);
    }
  }

  /// Counts a part of a tile; true for the one that completes it.
  bool last_part(u32* parts_done, const Task& task) {
    // Acquire-release: publishes this part's columns, and gives the last part all others' before it
    // announces them.
    u32* done = &parts_done[task.tile];
    if (by_one_lane([done] { return P::template add_acquire_release<Scope::device>(done, 1U); }) +
            1 !=
        task.parts) {
      return false;
    }
    // For the next call. Relaxed: nobody counts this tile again in this one.
    P::template store_relaxed<Scope::device>(done, 0U);
    return true;
  }

  void post_gemm1(const Task& gemm0, u32 index) {
    const u32 next = rank_.memory.first_task(TaskKind::gemm1) +
                     (index - rank_.memory.first_task(TaskKind::gemm0));
    Task task = gemm0;
    task.kind = TaskKind::gemm1;
    task.parts = static_cast<u16>(rank_.geometry().gemm1_parts);
    rank_.memory.tasks[next] = task;
    post(rank_, call_, TaskKind::gemm1, next, task.parts, Actor::processor);
  }

  /// Counts every row of a returned chunk for its token; whoever counts a token's last row sums it.
  void combine(u32 peer, u32 chunk) {
    const Geometry& geometry = rank_.geometry();
    const u32 rows = rows_in_chunk(geometry, rank_.memory.rows_sent(peer), chunk);
    u32 combined = 0;
    for (u32 i = 0; i < rows; ++i) {
      const u32 token =
          map_.pair_at(map_.place_at(peer, chunk * geometry.chunk_rows + i)) / geometry.top_k;
      u32* seen = &rank_.memory.rows_seen[token];
      // Acquire-release: publishes that this row is here (acquired through the ring), and gives the
      // one who counts the last row all of the token's rows.
      if (by_one_lane([seen] { return P::template add_acquire_release<Scope::device>(seen, 1U); }) +
              1 ==
          map_.rows_of(token)) {
        P::template store_relaxed<Scope::device>(
            seen, 0U);  // for the next call; nobody else counts it in this one
        kernels_.combine(token);
        ++combined;
      }
    }
    count_combined(combined);
  }

  void combine_unsent(u32 block) {
    const Geometry& geometry = rank_.geometry();
    const u32 end = minimum(call_.tokens, (block + 1) * geometry.route_tokens);
    u32 combined = 0;
    for (u32 token = block * geometry.route_tokens; token < end; ++token) {
      if (map_.rows_of(token) == 0) {
        kernels_.combine(token);
        ++combined;
      }
    }
    count_combined(combined);
  }

  void count_combined(u32 tokens) {
    // Relaxed: the scheduler compares a number; the end of the call publishes the output.
    by_one_lane([&] {
      return P::template add_relaxed<Scope::device>(&state_.tokens_combined.value, tokens);
    });
  }

  /// An atomic done once for the warp, after everything its lanes did before, and before anything
  /// they do after.
  template <class Atomic>
  static u32 by_one_lane(Atomic atomic) {
    P::sync_lanes();
    const u32 before = P::lane() == 0 ? atomic() : 0;
    P::sync_lanes();
    return P::broadcast(before, 0);
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  K& kernels_;
  Tally& tally_;
  RoutingMap map_;
};

}  // namespace moeos
