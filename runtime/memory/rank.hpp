// SPDX-License-Identifier: Apache-2.0
// What every actor of a rank is given: the machine, the memory, and the call that is running.
//
// Must not depend on: actors. Actors hold a Rank and a Call by reference and nothing of each other.
#pragma once

#include "runtime/memory/layout.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/os_memory.hpp"
#include "runtime/memory/watchdog.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"

namespace moeos {

/// Fixed for a call; what it points to lives as long as a layer, and as what layers share.
template <Platform P>
struct Rank {
  P platform;
  Layout layout;
  RankMemory memory;
  OsMemory os;  // only for the actors of the OS block; null elsewhere. Not by reference: the GPU's
                // compiler kept that object in memory (docs/lessons.md)
  u8* heap;     // this rank's symmetric heap
  u32 rank;
  u64 deadline_ns;
  u32 slice = 0;  // the slice of the experts that this rank holds

  const Geometry& geometry() const { return layout.geometry(); }

  /// Whether `rows` rows between this rank and a peer, in either direction, are enough to send each
  /// token there only once. Not to a remote peer: puts are of contiguous rows.
  bool deduplicates(u32 peer, u32 rows) const {
    return geometry().deduplicates(rows) && peer != rank &&
           (!P::kRemotePeers || platform.peer(peer) != nullptr);
  }
  /// Whether a chunk of a cell of `rows` rows, between this rank and a peer in either direction,
  /// may come without the rows whose tokens have gone before it.
  bool leaves_out(u32 peer, u32 rows, u32 chunk) const {
    return chunk >= geometry().dedup_after && deduplicates(peer, rows);
  }

  // Where experts are sliced, `slices` consecutive ranks of the world hold an expert, a slice each,
  // and `world` ranks hold each slice. `rank` and all peer numbers count from this rank's slice on:
  // the ranks of its slice come first, and so dispatch has to do only with these.

  /// The number of a peer in the whole world.
  u32 everywhere(u32 peer) const {
    const Geometry& all = geometry();
    return all.sliced() ? peer % all.world * all.slices + (slice + peer / all.world) % all.slices
                        : peer;
  }
  /// The peer that holds the nth slice after this rank's, of the experts of which this rank holds a
  /// slice.
  u32 peer_behind(u32 nth) const { return nth * geometry().world + rank; }
  /// The peer that holds slice s of these experts.
  u32 peer_of_slice(u32 s) const {
    return peer_behind((s + geometry().slices - slice) % geometry().slices);
  }

  template <class T>
  T* here(u64 offset) const {
    return reinterpret_cast<T*>(heap + offset);
  }

  /// Whether a call must be left: polled by every waiting actor.
  bool leaving(u32 epoch) const { return aborted<P>(layout, heap, epoch); }
  /// `failure` names a peer as this rank counts peers; the record has its number in the whole
  /// world.
  void fail(const Failure& failure) const {
    if (geometry().sliced()) {
      Failure told = failure;
      told.peer = failure.peer == kNone ? kNone : everywhere(failure.peer);
      raise_everywhere(platform, layout, heap, memory.failure_claimed(), told, rank);
    } else {
      raise_everywhere(platform, layout, heap, memory.failure_claimed(), failure, rank);
    }
  }
};

/// Whether a call is over for an actor that waits in it: all is done, or it has failed. One warp.
template <Platform P>
bool must_leave(const Rank<P>& rank, const Call& call) {
  // Relaxed: the words alone decide (Scheduler::interrupt, raise_word).
  return agreed<P>(
      P::template load_relaxed<Scope::device>(&rank.memory.call(call.epoch).interrupt.value) != 0 ||
      rank.leaving(call.epoch));
}

/// A failure of this rank's actor in this call, to be filled in by the caller.
template <Platform P>
Failure failure_of(const Rank<P>& rank, const Call& call, FailureKind kind, Actor actor) {
  Failure failure{};
  failure.kind = kind;
  failure.actor = actor;
  // Known only now: otherwise what follows from it would take registers before, in every actor that
  // may fail.
  failure.rank = P::opaque(rank.everywhere(rank.rank));
  failure.peer = kNone;
  failure.expert = kNone;
  failure.chunk = kNone;
  failure.epoch = call.epoch;
  failure.identity = call.identity;
  return failure;
}

/// Adds to a number of a tally, by one lane. A reduction does not read the number: a round trip to
/// memory would take as long as all else that its writer publishes.
template <Platform P>
void note(u64& number, u64 more) {
  // Relaxed: the host reads it after the call.
  P::template count_relaxed<Scope::device>(&number, more);
}

/// Takes the next slots of a queue of this call that several actors fill; returns the first. Going
/// beyond the queue's end is a broken bound: the call fails, and it returns kNone.
template <Platform P, Scope kScope = Scope::device>
u32 take_slots(const Rank<P>& rank, const Call& call, Actor actor, u32* tickets, u32 capacity,
               u32 slots = 1) {
  // Relaxed: the ticket only makes the slots ours; the word that is written into a slot publishes
  // what it stands for.
  const u32 first = P::template add_relaxed<kScope>(tickets, slots);
  if (first + slots <= capacity) {
    return first;
  }
  Failure failure = failure_of(rank, call, FailureKind::overflow, actor);
  failure.expected = capacity;
  failure.seen = first + slots;
  rank.fail(failure);
  return kNone;
}

/// Whether a word in which a peer describes its call (count_word) is here and equals ours. Any
/// other word of this call ends the call, as a failure of kind `kind`.
template <Platform P>
bool makes_our_call(const Rank<P>& rank, const Call& call, u32 peer, u64 word, u32 ours,
                    FailureKind kind) {
  const u32 epoch = static_cast<u32>(word >> 32);
  if (word == 0 || epoch < call.epoch) {
    return false;
  }
  const u32 its = static_cast<u32>(word);
  if (epoch == call.epoch && its == ours) {
    return true;
  }
  Failure failure = failure_of(rank, call, kind, Actor::subscriber);
  failure.peer = peer;
  failure.expected = ours;
  failure.seen = its;
  if (epoch > call.epoch) {  // no rank can be that far ahead
    failure.kind = FailureKind::count_damaged;
    failure.seen = word;
  }
  rank.fail(failure);
  return false;
}

/// Ends the call because a queue's word, or a descriptor, is not what was written there
/// (sealed.hpp).
template <Platform P>
void reject_damaged(const Rank<P>& rank, const Call& call, FailureKind kind, Actor actor, u32 index,
                    u64 seen) {
  Failure failure = failure_of(rank, call, kind, actor);
  failure.chunk = index;
  failure.seen = seen;
  rank.fail(failure);
}

}  // namespace moeos
