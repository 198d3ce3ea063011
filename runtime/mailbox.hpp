// How a descriptor reaches the scheduler: one mailbox a task kind, many writers, one reader in
// order.
//
// A writer reserves a slot by ticket and fills it; the reader consumes slots in order and
// recognises a filled one by its epoch. Slots are never reused within a call, so there is nothing
// to acknowledge. May not know: what a task does.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Reserves `count` consecutive slots of a kind's mailbox; returns the first. More than the mailbox
/// holds is a broken bound: the call fails and nothing is written.
template <Platform P>
u32 reserve_slots(const Rank<P>& rank, const Call& call, TaskKind kind, u32 count, Actor actor) {
  u32* posted = &rank.memory.call(call.epoch).mailbox_posted[static_cast<u32>(kind)].value;
  // Relaxed: the ticket only makes the slots ours; the word written into a slot publishes the
  // descriptor.
  const u32 first = P::template add_relaxed<Scope::device>(posted, count);
  const u32 capacity = rank.memory.mailbox(kind).capacity;
  if (first + count > capacity) {
    Failure failure = failure_of(rank, call, FailureKind::overflow, actor);
    failure.expected = capacity;
    failure.seen = first + count;
    rank.fail(failure);
    return kNone;
  }
  return first;
}

/// Fills a reserved slot with a descriptor that this actor has written.
template <Platform P>
void fill_slot(const Rank<P>& rank, const Call& call, TaskKind kind, u32 slot, u32 task,
               u32 parts) {
  // Publishes tasks[task], and everything this actor has acquired or done before (rows that
  // arrived, tiles that were written), to the scheduler; pairs with its poll of the mailbox.
  P::template store_release<Scope::device>(&rank.memory.mailbox(kind).words[slot],
                                           ReadyWord(call.epoch, kind, task, parts).sealed());
}

/// Posts one descriptor.
template <Platform P>
void post(const Rank<P>& rank, const Call& call, TaskKind kind, u32 task, u32 parts, Actor actor) {
  const u32 slot = reserve_slots(rank, call, kind, 1, actor);
  if (slot != kNone) {
    fill_slot(rank, call, kind, slot, task, parts);
  }
}

}  // namespace moeos
