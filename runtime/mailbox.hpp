// How a descriptor reaches the scheduler: one mailbox a task kind, one reader in order.
//
// A kind with one writer (Gemm0) has its slots numbered by that writer; those of Gemm1, which any
// processor may post, and of Combine, which several warps of the OS block do, are given out by
// ticket. The reader consumes slots in order and recognises a filled one by its epoch. Slots are
// never reused within a call, so there is nothing to acknowledge. Route and Dispatch have no
// mailbox: processors and couriers find their parts without the scheduler. May not know: what a
// task does.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Fills a slot with a descriptor that this actor has written.
template <Platform P>
void fill_slot(const Rank<P>& rank, const Call& call, TaskKind kind, u32 slot, u32 task,
               u32 parts) {
  // Publishes tasks[task], and everything this actor has acquired or done before (rows that
  // arrived, tiles that were written), to the scheduler; pairs with its poll of the mailbox.
  P::template store_release<Scope::device>(&rank.memory.mailbox(kind).words[slot],
                                           ReadyWord(call.epoch, kind, task, parts).sealed());
}

/// Posts a Gemm1, from any processor, in the next slot that no other has taken.
template <Platform P>
void post_gemm1(const Rank<P>& rank, const Call& call, u32 task, u32 parts) {
  const u32 slot =
      take_slot(rank, call, Actor::processor, &rank.memory.call(call.epoch).gemm1_posted.value,
                rank.memory.mailbox(TaskKind::gemm1).capacity);
  if (slot != kNone) {
    fill_slot(rank, call, TaskKind::gemm1, slot, task, parts);
  }
}

}  // namespace moeos
