// A processor that is one warp: fetches a part, runs it and completes it, one after the other, and
// is a courier besides.
//
// What the twin's threads are. (On the GPU a block's warps have a role each: kernels/sm90.) May not
// know: arithmetic, element types.
#pragma once

#include "runtime/base.hpp"
#include "runtime/courier.hpp"
#include "runtime/packet.hpp"
#include "runtime/processor.hpp"
#include "runtime/rank.hpp"
#include "runtime/routing_map.hpp"
#include "runtime/row_tasks.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"
#include "runtime/trace.hpp"

namespace moeos {

/// What a processor of one warp computes; every function runs to its end without waiting.
template <class K>
concept Kernels = requires(K& kernels, const Task& task, u32 index, u8* row) {
  kernels.copy_row(index, row);  // the token's row of x, to its place in a cell
  kernels.combine(index);  // a token whose rows are all back, or that sent none, to its output row
  // block of tokens -> first token with logits that are not finite, or kNone
  { kernels.route(index) } -> SameAs<u32>;
  kernels.gemm0(task, index);  // tile, N-part
  kernels.gemm1(task, index);
};

/// Copies the rows of a part of Dispatch to the cell of the rank that owns their experts (or to the
/// staging copy).
template <Platform P, Kernels K>
void copy_rows(const Rank<P>& rank, const RoutingMap& map, K& kernels, const Task& task, u32 part) {
  const Geometry& geometry = rank.geometry();
  const SentRows rows = rows_in_part(geometry, rank.memory.rows_sent(task.peer), task, part);
  for (u32 i = 0; i < rows.count; ++i) {
    const OutgoingRow row = look_up_row(rank, map, task.peer, rows.first + i);
    kernels.copy_row(row.pair / geometry.top_k,
                     outgoing_row(rank, task.peer, Round::dispatch, row.number));
  }
}

/// Runs a part of Dispatch, if there is one.
template <Platform P, Kernels K>
bool run_dispatch(const Rank<P>& rank, const Call& call, const RoutingMap& map,
                  const Processor<P>& processor, K& kernels, Courier<P>& courier,
                  const Trace<P>& trace) {
  ReadyWord word;
  Task task;
  if (!courier.take(word, task)) {
    return false;
  }
  processor.pace().begin_part(rank, call);
  wait_for_links(rank, call, task, word.part());
  const u64 begin = P::now_ns();
  copy_rows(rank, map, kernels, task, word.part());
  const u64 end = P::now_ns();
  const u64 longer = processor.pace().slow_down(rank, call);
  const bool announced = courier.complete(task, word, end - begin + longer);
  processor.pace().end_part();
  TraceEvent event = event_of(rank.geometry(), task, word, announced ? 1 : 0);
  event.begin_ns = begin;
  event.end_ns = trace_time<P>(rank.geometry());
  event.computed = event.stored = event.since(end);
  trace.note(event);
  return true;
}

/// Fetch, run, repeat, until the scheduler interrupts or the call is aborted. Dispatch goes before
/// everything: other ranks wait for it.
template <Platform P, Kernels K>
void run_processor(const Rank<P>& rank, const Call& call, K& kernels, u32 index) {
  forget_last_call(rank, index);
  Processor<P> processor(rank, call, index);
  Courier<P> courier(rank, call, index);
  const Trace<P> trace(rank, index);
  const RoutingMap map(rank.geometry(), rank.memory, call);
  const auto dispatch = [&] {
    return run_dispatch(rank, call, map, processor, kernels, courier, trace);
  };
  MOEOS_CHECK(rank.geometry().route_slices == 1);
  ReadyWord word;
  for (;;) {
    while (dispatch()) {
    }
    if (!processor.claim(word, dispatch)) {
      return;
    }
    Task task;
    if (!get_task(rank, call, word, task)) {
      return;
    }
    MOEOS_CHECK(task.epoch == call.epoch && task.kind == word.kind());
    processor.begin_part(task, word);
    const u64 begin = P::now_ns();
    u32 combined = 0;
    if (task.kind == TaskKind::route) {
      const u32 bad_token = kernels.route(word.part());
      if (bad_token != kNone) {
        processor.reject_logits(bad_token);
        return;
      }
      if (processor.count_block(task)) {
        processor.finish_routing(Team{0, 1}, NobodyElse{});
      }
    } else if (task.kind == TaskKind::gemm0) {
      kernels.gemm0(task, word.part());
    } else if (task.kind == TaskKind::gemm1) {
      kernels.gemm1(task, word.part());
    } else {
      for_each_token(rank, call, map, task, [&](u32 token, bool exists) {
        if (exists) {
          kernels.combine(token);
          ++combined;
        }
      });
    }
    const u64 end = P::now_ns();
    processor.complete(task, word, end - begin, combined);
    TraceEvent event = event_of(rank.geometry(), task, word, combined);
    event.begin_ns = begin;
    event.end_ns = trace_time<P>(rank.geometry());
    event.computed = event.stored = event.since(end);
    trace.note(event);
  }
}

}  // namespace moeos
