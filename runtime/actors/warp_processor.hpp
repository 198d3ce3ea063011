// SPDX-License-Identifier: Apache-2.0
// A processor that is one warp: fetches a part, runs it and completes it, one after the other, and
// is also a courier.
//
// The twin's threads run it. (On the GPU each warp of a block has its role: kernels/sm90.) Must not
// depend on: arithmetic, element types.
#pragma once

#include "runtime/actors/courier.hpp"
#include "runtime/actors/processor.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/record/trace.hpp"
#include "runtime/rows/inputs.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/rows/token_dispatch.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// What a processor of one warp computes; every function runs to its end without waiting.
template <class K>
concept Kernels = requires(K& kernels, const Task& task, u32 index, const u8* from, u8* row) {
  kernels.copy_row(index, row);      // the token's row of x, to its slot in a cell
  kernels.replicate_row(from, row);  // a row of a cell, to another slot there
  // A token whose rows are all back, or that sent none, to its output row; with slices, to its
  // owner.
  kernels.combine(index);
  // block of tokens -> first token whose gate logits are not finite, or kNone
  { kernels.route(index) } -> SameAs<u32>;
  kernels.product(task, index);  // tile, N-part
};

/// Additional kernels where experts are sliced.
template <class K>
concept SlicedKernels = requires(K& kernels, const Task& task, u32 index) {
  kernels.add_slices(task, index);  // a token's sums over slices, to its output row
};

/// Copies the rows of a part of Dispatch to the cell of the rank that owns their experts (or to the
/// send buffer), from `begun` on, or later if a link is slow. Returns how many go there.
template <Platform P, Kernels K>
u32 copy_rows(const Rank<P>& rank, const Call& call, const RoutingMap& map, K& kernels,
              const Courier<P>& courier, const CourierPart& part, u64& begun) {
  MOEOS_CHECK(part.rows <= SentChunk::kRows);
  OutgoingRow going[SentChunk::kRows];
  u32 count = 0;
  for (u32 i = 0; i < part.rows; ++i) {
    going[count] = look_up_row(rank, map, part, part.first + i);
    count += going[count].goes() && copies_rows(rank, part.peer) ? 1 : 0;
  }
  courier.begin(part, count);
  begun += wait_for_links(rank, call, [&](u32 peer) {
    return peer == part.peer ? u64{count} * rank.geometry().sent_bytes : 0;
  });
  const bool twice = writes_twice(rank, part.peer, part.chunk(rank.geometry()));
  for (u32 i = 0; i < count; ++i) {
    const u32 token = going[i].pair / rank.geometry().top_k;
    u8* const place = outgoing_row(rank, part.peer, going[i].number);
    kernels.copy_row(token, place);
    if (twice) {
      kernels.copy_row(token, place + rank.layout.ring_bytes());
    }
  }
  return count;
}

/// Copies the rows that did not cross the link, of a chunk whose source sends each token once.
/// Returns how many.
template <Platform P, Kernels K>
u32 replicate_rows(const Rank<P>& rank, const Call& call, K& kernels, const CourierPart& part) {
  u32 copied = 0;
  for (u32 i = 0; i < part.rows; ++i) {
    const LandedRow row = look_up_landed(rank, call, part.peer, part.first + i);
    if (!row.came()) {
      kernels.replicate_row(arrived_row(rank, part.peer, row.origin),
                            arrived_row(rank, part.peer, row.number));
      ++copied;
    }
  }
  return copied;
}

/// Writes the tokens of a part of Combine. Returns how many.
template <Platform P, Kernels K>
u32 combine_tokens(const Rank<P>& rank, const Call& call, const RoutingMap& map, K& kernels,
                   const Task& task) {
  if constexpr (SlicedKernels<K>) {
    if (summands_of(rank.geometry(), task) != Summands::pairs) {
      for (u32 i = 0; i < task.rows; ++i) {
        kernels.add_slices(task, task.first_ready + i);
      }
      return task.rows;
    }
  }
  if (task.rows > 0) {
    for (u32 i = 0; i < task.rows; ++i) {
      // Acquired with the part's word.
      kernels.combine(task.awaits != 0 ? task.first_ready + i
                                       : rank.memory.ready_tokens[task.first_ready + i]);
    }
    return task.rows;
  }
  u32 combined = 0;
  find_unsent(rank, call, map, task.first_ready, [&](u32 token, bool unsent) {
    if (unsent) {
      kernels.combine(token);
      ++combined;
    }
  });
  return combined;
}

/// Runs a part of Dispatch, or completes a chunk, if there is one.
template <Platform P, Kernels K>
bool run_dispatch(const Rank<P>& rank, const Call& call, const RoutingMap& map,
                  const Processor<P>& processor, K& kernels, Courier<P>& courier, Trace<P>& trace) {
  CourierPart part;
  if (!courier.take(part)) {
    return false;
  }
  processor.pace().begin_part(rank, call);
  u64 begin = P::now_ns();
  const u32 carried = part.sends() ? copy_rows(rank, call, map, kernels, courier, part, begin)
                                   : replicate_rows(rank, call, kernels, part);
  const u64 end = P::now_ns();
  const u64 longer = processor.pace().slow_down(rank, call);
  const bool announced = courier.complete(part, carried, end - begin + longer);
  processor.pace().end_part();
  TraceEvent event = event_of(rank.geometry(), part, carried, announced);
  event.begin_ns = begin;
  event.end_ns = trace_time<P>(rank.geometry());
  event.computed = event.stored = since_begin(event, end);
  trace.note(event);
  return true;
}

/// Sends the rows of some tokens, once it is known where they go, if there are tokens left.
template <Platform P, Kernels K>
bool run_token_dispatch(const Rank<P>& rank, const Call& call, const RoutingMap& map,
                        const Processor<P>& processor, K& kernels, TokenDispatch<P>& by_token,
                        Trace<P>& trace) {
  constexpr u32 kAtOnce = 32;  // rows that are copied before any is counted
  const Geometry& geometry = rank.geometry();
  TokenRange tokens;
  if (!by_token.routed() || !by_token.take(tokens) || !by_token.begin_part()) {
    return false;
  }
  const u32 end_pair = tokens.end * geometry.top_k;
  u64 busy_ns = 0;
  for (u32 first = tokens.first * geometry.top_k; first < end_pair; first += kAtOnce) {
    const u32 pairs = minimum(kAtOnce, end_pair - first);
    TokenRow rows[kAtOnce];
    processor.pace().begin_part(rank, call);
    u64 begin = P::now_ns();
    for (u32 i = 0; i < pairs; ++i) {
      rows[i] = by_token.look_up(map, first + i, true);
      begin += wait_for_links(rank, call, [&](u32 peer) {
        return rows[i].goes && peer == rows[i].peer ? u64{geometry.sent_bytes} : 0;
      });
      if (rows[i].goes && copies_rows(rank, rows[i].peer)) {
        kernels.copy_row((first + i) / geometry.top_k,
                         outgoing_row(rank, rows[i].peer, rows[i].number));
      }
    }
    const u64 end = P::now_ns();
    busy_ns += end - begin + processor.pace().slow_down(rank, call);
    for (u32 i = 0; i < pairs; ++i) {
      const TokenChunk chunk = by_token.count(rows[i]);
      if (chunk.rows > 0) {
        TraceEvent event = event_of_token_row(rows[i], chunk, first + i);
        event.begin_ns = begin;
        event.end_ns = trace_time<P>(geometry);
        event.computed = event.stored = since_begin(event, end);
        trace.note(event);
        begin = end;  // the first event has the time of all
      }
    }
    processor.pace().end_part();
  }
  by_token.end_part(busy_ns);
  return true;
}

/// Fetch, run, repeat, until the scheduler interrupts or the call is aborted. Dispatch goes before
/// everything else: other ranks wait for it.
template <Platform P, Kernels K>
void run_processor(const Rank<P>& rank, const Call& call, K& kernels, u32 index) {
  forget_last_call(rank, index);
  Processor<P> processor(rank, call, index);
  Courier<P> courier(rank, call, index);
  TokenDispatch<P> by_token(rank, call, index);
  Trace<P> trace(rank, index);
  const RoutingMap map(rank.geometry(), rank.memory, call);
  const auto dispatch = [&] {
    return run_token_dispatch(rank, call, map, processor, kernels, by_token, trace) ||
           run_dispatch(rank, call, map, processor, kernels, courier, trace);
  };
  MOEOS_CHECK(rank.geometry().route_slices == 1);
  ReadyWord word;
  for (;;) {
    while (dispatch()) {
    }
    Task task;
    if (!processor.claim(processor.take_ticket(), word, task, dispatch)) {
      return;
    }
    MOEOS_CHECK(task.epoch == call.epoch && task.kind == word.kind());
    const auto found = [&](u32, u32 pair, u32 row) {
      if (rank.geometry().reads_in_place(call.tokens)) {  // else the sender notes it
        rank.memory.pair_row[pair] = row;
      }
    };
    if (waits_for_inputs(task) &&
        !processor.await(Inputs<P>(rank, call, map, task, found), dispatch)) {
      return;
    }
    if (rank.geometry().shares() && task.kind == TaskKind::combine &&
        !MOEOS_PLANTED(shared_results_are_not_awaited) &&
        !processor.await_shared(rank.memory, dispatch)) {
      return;
    }
    processor.begin_part(task);
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
    } else if (is_product(task.kind)) {
      kernels.product(task, word.part());
    } else {
      combined = combine_tokens(rank, call, map, kernels, task);
    }
    const u64 end = P::now_ns();
    processor.complete(task, word, end - begin, combined);
    TraceEvent event = event_of(rank.geometry(), task, word, combined);
    event.begin_ns = begin;
    event.end_ns = trace_time<P>(rank.geometry());
    event.computed = event.stored = since_begin(event, end);
    trace.note(event);
  }
}

}  // namespace moeos
