// SPDX-License-Identifier: Apache-2.0
// How a tile's descriptor reaches the scheduler: a mailbox for each of the two products, one reader
// in order.
//
// Product0 has one writer, and a tile's slot has the tile's number; slots of Product1, which any
// processor may post, are given out by ticket. The reader consumes slots in order and recognises a
// filled one by its epoch. Slots are never reused within a call, so there is nothing to
// acknowledge. Other tasks have no mailbox: processors and couriers find the parts of Route and
// Dispatch themselves, and the returns subscribers hand out those of Combine; nor have tiles that
// processors wait for (ring.hpp). Must not depend on: what a task does.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Posts a product that follows another one, from any processor, in the next free slot. `task`: its
/// tile's descriptor.
template <Platform P>
void post_next(const Rank<P>& rank, const Call& call, TaskKind kind, u32 task, u32 parts) {
  const MailboxView mailbox = rank.memory.mailbox(kind);
  const u32 slot =
      take_slots(rank, call, Actor::processor, &rank.memory.call(call.epoch).product1_posted.value,
                 mailbox.capacity);
  if (slot != kNone) {
    // Publishes what this actor has acquired or done before, the tile's descriptor and the rows
    // between the products, to the scheduler; pairs with its poll of the mailbox.
    P::template store_release<Scope::device>(&mailbox.words[slot],
                                             ReadyWord(call.epoch, kind, task, parts).sealed());
  }
}

}  // namespace moeos
