// SPDX-License-Identifier: Apache-2.0
// The actor that puts staged rows to remote peers, at most a window of them under way to each.
//
// Processors stage rows and post requests (packet.hpp); a task never waits for a window, only a
// request does, in its peer's outbox, where only requests to that peer precede it. Every put adds
// its rows to `landed` in the peer's heap after its bytes, and the peer's sender adds what it has
// seen there to `echoed` here: the difference from what was put is what may still be under way. So
// with P - 1 senders a receiver faces at most P - 1 windows, however much they want to send (the
// thesis' runs on several nodes died of incast).
//
// A window always opens again: rows are echoed as soon as they have landed, by an actor that waits
// for nothing, and they land in slots that are free when a row is sent, so it does not matter what
// the peer's processors do. No rank needs the echo of a peer whose call is over: that call ends
// only with all that was put to it. Must not depend on: how rows are computed, what becomes of them
// at the peer.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// One of P::kSenders warps of the OS block. The first warp looks at what comes from peers. If
/// there are others, they put, because an echo must not wait for a put: each takes every
/// kPutters-th request of every peer.
template <Platform P>
class Sender {
 public:
  static constexpr u32 kPutters = P::kSenders > 1 ? P::kSenders - 1 : 1;

  Sender(const Rank<P>& rank, const Call& call, u32 index)
      : rank_(rank),
        call_(call),
        index_(index),
        world_(rank.geometry().remote != 0 ? rank.geometry().world : 0),
        next_(rank.os.outbox_next + u64{index} * world_),
        map_(rank.geometry(), rank.memory, call) {
    static_assert(P::kSenders <= OsMemory::kSendersMax);
    for (u32 peer = P::lane(); peer < world_; peer += P::kLanes) {
      next_[peer] = first_request();
    }
    P::sync_lanes();
  }

  /// Looks once at what has come from peers, at every peer's next request, or at both.
  bool step() {
    bool progress = false;
    if (world_ > 0 && index_ == 0) {
      take_in_failures<P>(rank_.layout, rank_.heap);
      progress = echo();
    }
    for (u32 first = 0; first < world_; first += P::kLanes) {
      const u32 peer = first + P::lane();
      const bool open = peer < world_ && rank_.platform.peer(peer) == nullptr &&
                        next_[peer] < rank_.memory.outbox_slots();
      const u64 word =
          open ? P::template poll<Scope::device>(&rank_.memory.outbox_of(peer)[next_[peer]]) : 0;
      if (ReadyWord(word).epoch() > call_.epoch) {
        reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::sender, next_[peer], word);
      }
      const u32 ready = P::ballot(ReadyWord(word).epoch() == call_.epoch);
      if (ready == 0) {
        continue;
      }
      // Pairs with post_request: the descriptors and the staged rows are here, also for the network
      // that reads them on this warp's behalf.
      P::template relay_fence<Scope::device>();
      for (u32 lane = 0; lane < P::kLanes; ++lane) {
        if ((ready >> lane & 1U) != 0) {
          progress = send(first + lane, ReadyWord(P::broadcast(word, lane))) || progress;
        }
      }
    }
    return progress;
  }

  /// After the call: if it has failed here, informs remote peers. Every sender does so, and the
  /// first to arrive puts, since another may stand in a put that does not return.
  void leave() const {
    const bool told = MOEOS_PLANTED(only_the_first_sender_tells) && index_ != 0;
    if (world_ > 0 && P::lane() == 0 && !told) {
      put_own_failure(rank_.platform, rank_.layout, rank_.heap, rank_.memory.failure_put(),
                      rank_.rank);
    }
  }

  /// Missing is the echo of the first remote peer that has not echoed all rows put there.
  Answer answer(Failure& failure) const {
    for (u32 peer = 0; peer < world_; ++peer) {
      const u32 under_way =
          P::template load_relaxed<Scope::device>(rank_.memory.rows_put(peer)) - echoed(peer);
      if (rank_.platform.peer(peer) == nullptr && under_way != 0) {
        failure.kind = FailureKind::echo_late;
        failure.peer = peer;
        failure.expected = rank_.geometry().window();
        failure.seen = under_way;
        return Answer::missing;
      }
    }
    return Answer::nothing;
  }

 private:
  /// The first request that this sender takes in any peer's outbox; kNone if it puts nothing.
  u32 first_request() const { return P::kSenders == 1 ? 0 : index_ == 0 ? kNone : index_ - 1; }

  /// Rows that the peer has echoed since the last reset, modulo 2^32.
  u32 echoed(u32 peer) const {
    // Relaxed: it only lets more rows be put.
    return P::template load_relaxed<Scope::system>(
        rank_.template here<u32>(rank_.layout.echoed(peer)));
  }

  /// Echoes to remote peers what has landed of the rows that they put here.
  bool echo() {
    bool told = false;
    for (u32 peer = P::lane(); peer < world_; peer += P::kLanes) {
      if (rank_.platform.peer(peer) != nullptr) {
        continue;
      }
      // Relaxed: the number speaks for itself.
      const u32 landed = P::template load_relaxed<Scope::system>(
          rank_.template here<u32>(rank_.layout.landed(peer)));
      u32* const told_of = rank_.memory.rows_told(peer);
      if (landed != *told_of) {
        // Sends what is new, not the sum: sums could overtake each other on the way, and an older
        // one would close a window that no later word opens again.
        const u64 echoed = rank_.layout.echoed(rank_.rank);
        MOEOS_PLANTED(echoes_are_sums) ? rank_.platform.put_word(peer, echoed, landed)
                                       : rank_.platform.add_word(peer, echoed, landed - *told_of);
        *told_of = landed;
        told = true;
      }
    }
    return P::ballot(told) != 0;
  }

  /// Puts what a request asks for, if the peer's window has room for it.
  bool send(u32 peer, ReadyWord word) {
    const bool dispatch = word.kind() == TaskKind::dispatch;
    u32 expert = 0;
    Segment segment{};
    u32 rows = 0;
    if (dispatch) {
      const u32 times = rank_.geometry().lies_twice(word.task()) ? 2 : 1;
      rows = rows_in_chunk(rank_.geometry(), rank_.memory.rows_sent(peer), word.task()) * times;
    } else {
      const Task& task = rank_.memory.tasks[word.task()];
      if (!is_intact(task)) {
        reject_damaged(rank_, call_, FailureKind::task_damaged, Actor::sender, word.task(), 0);
        return false;
      }
      // Copies: what has been checked is what is put.
      expert = task.local_expert;
      segment = task.segments[word.part()];
      rows = segment.rows;
    }
    if (!reserve(peer, rows)) {
      return false;
    }
    if (dispatch) {
      put_chunk(rank_, call_, map_, peer, word.task());
    } else {
      put_results(rank_, call_.epoch, expert, segment);
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      rank_.platform.order_puts();
      rank_.platform.add_word(peer, rank_.layout.landed(rank_.rank), rows);
      next_[peer] += kPutters;
      if (!dispatch) {
        // Relaxed: the scheduler compares a number. The call may end, since what the peer waits for
        // is on the way.
        P::template count_relaxed<Scope::device>(
            &rank_.memory.call(call_.epoch).rows_returned.value, rows);
      }
    }
    P::sync_lanes();
    return true;
  }

  /// Takes room for rows in a peer's window; shared by all senders.
  bool reserve(u32 peer, u32 rows) const {
    u32 reserved = 0;
    if (P::lane() == 0) {
      u32* put = rank_.memory.rows_put(peer);
      u32 before = P::template load_relaxed<Scope::device>(put);
      while (MOEOS_PLANTED(windows_have_no_end) ||
             before - echoed(peer) + rows <= rank_.geometry().window()) {
        // Publishes nothing: it only takes the room. Each retry means that another sender has taken
        // room.
        if (P::template compare_exchange_release<Scope::device>(put, before, before + rows)) {
          reserved = 1;
          break;
        }
        before = P::template load_relaxed<Scope::device>(put);
      }
    }
    return P::broadcast(reserved, 0) != 0;
  }

  const Rank<P>& rank_;
  const Call& call_;
  u32 index_;
  u32 world_;  // 0 when there are no remote peers
  u32* next_;  // [peer]: the request that this sender looks for, or kNone
  RoutingMap map_;
};

}  // namespace moeos
