// SPDX-License-Identifier: Apache-2.0
// Deadlines and failures: how a wait that lasts too long becomes a message instead of a hang.
//
// Every waiting loop owns a Watch. A failure is written once, into the symmetric heaps of this rank
// and, as far as they can be reached, of its peers (for remote peers by a sender); then their abort
// words are raised, and every actor that polls one leaves. Must not depend on: what is waited for;
// the caller describes that in the Failure.
#pragma once

#include "runtime/memory/layout.hpp"
#include "runtime/memory/records.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

/// What an actor answers when it is asked why nothing moves (os.hpp).
enum class Answer : u32 {
  nothing,  ///< all that it waits for has come
  missing,  ///< something is missing; the actor fills in the failure
  wait,     ///< something is missing, but ask again
  moot,     ///< something was missing and has come since
};

/// A deadline that starts again whenever there is progress. Reads the clock once in 32 looks.
template <Platform P>
class Watch {
 public:
  explicit Watch(u64 deadline_ns) : deadline_ns_(deadline_ns), since_(P::now_ns()) {}

  void progress() { stale_ = true; }

  bool expired() {
    if ((++looks_ & 31U) != 0) {
      return false;
    }
    const u64 now = P::now_ns();
    if (stale_) {
      stale_ = false;
      since_ = now;
    }
    waited_ns_ = now - since_;
    return waited_ns_ > deadline_ns_;
  }
  u64 waited_ns() const { return waited_ns_; }

 private:
  u64 deadline_ns_;
  u64 since_;
  u64 waited_ns_ = 0;
  u32 looks_ = 0;
  bool stale_ = false;
};

/// `epoch << 32 | rank + 1`: which rank's record says why this rank must leave, and from which call
/// on. A rank may fail one call ahead of a slower one, whose call can still end well; so only calls
/// from that epoch on are aborted, and of two failures the one of the earlier call stays.
constexpr u64 abort_word_of(const Failure& failure) {
  return u64{failure.epoch} << 32 | (failure.rank + 1);
}

/// Raises a heap's abort word, unless a failure of the same or an earlier call has. A host that
/// gives up does so for all calls (epoch 0), often because of a failure that its peers may not have
/// looked at yet: its word replaces none, since that failure says more.
template <Platform P>
void raise_word(const Layout& layout, u8* holder_heap, u64 word) {
  auto* abort_word = reinterpret_cast<u64*>(holder_heap + layout.abort_word());
  u64 seen = P::template load_relaxed<Scope::system>(abort_word);
  // Each retry means that another rank's failure of an earlier call was written in between: at most
  // as many retries as ranks.
  while (
      seen == 0 ||
      (seen >> 32 > word >> 32 && (word >> 32 != 0 || MOEOS_PLANTED(giving_up_hides_failures))) ||
      (seen != word && MOEOS_PLANTED(later_failures_replace_earlier_ones))) {
    // Publishes the failure's record to the readers that acquire the abort word (first_failure).
    if (P::template compare_exchange_release<Scope::system>(abort_word, seen, word)) {
      return;
    }
    seen = P::template load_relaxed<Scope::system>(abort_word);
  }
}

/// Writes `failure` into a heap that can be written directly, and raises its abort word.
template <Platform P>
void raise_at(const Layout& layout, u8* holder_heap, const Failure& failure) {
  *reinterpret_cast<Failure*>(holder_heap + layout.failure(failure.rank)) = failure;
  raise_word<P>(layout, holder_heap, abort_word_of(failure));
}

/// Raises this rank's abort word to what remote peers have put. One warp.
template <Platform P>
void take_in_failures(const Layout& layout, u8* own_heap) {
  for (u32 p = P::lane(); p < layout.geometry().world; p += P::kLanes) {
    // Pairs with put_own_failure: p's record is here before its word.
    const u64 word = P::template load_acquire<Scope::system>(
        reinterpret_cast<const u64*>(own_heap + layout.put_failure(p)));
    if (word != 0) {
      raise_word<P>(layout, own_heap, word);
    }
  }
}

/// Raises a failure here and, best effort, at every direct peer. `claimed` is this rank's word that
/// lets only its first failing actor write, so that a record is never written twice. `own`: this
/// rank among its peers, as Rank::rank.
template <Platform P>
void raise_everywhere(const P& platform, const Layout& layout, u8* own_heap, u32* claimed,
                      const Failure& failure, u32 own) {
  // Publishes nothing: it only elects the writer among this rank's actors.
  if (!P::template compare_exchange_release<Scope::device>(claimed, 0U, 1U)) {
    return;
  }
  // This rank first. One copy of the code: this loop exists wherever an actor may fail, and an
  // actor's speed depends on how far apart its own code lies.
#pragma unroll 1
  for (u32 n = 0; n < layout.geometry().ranks(); ++n) {
    u8* heap = n == 0 ? own_heap : platform.peer((own + n) % layout.geometry().ranks());
    if (!P::kRemotePeers || heap != nullptr) {
      raise_at<P>(layout, heap, failure);
    }
  }
}

/// Puts this rank's failure, if one has raised its abort word, to its remote peers: the record,
/// then the word that only this rank writes there. No compare-exchange reaches a remote peer, so
/// the peer raises its own abort word (take_in_failures), and an earlier call's failure stays.
/// `claimed` is this rank's word that lets only one put: the senders after the call, or the host,
/// which may abort the call meanwhile; the record must not change while a peer reads it. By one
/// lane.
template <Platform P>
void put_own_failure(const P& platform, const Layout& layout, const u8* own_heap, u32* claimed,
                     u32 rank) {
  // Pairs with the release in raise_word: the record is complete.
  const u64 word = P::template load_acquire<Scope::system>(
      reinterpret_cast<const u64*>(own_heap + layout.abort_word()));
  if (static_cast<u32>(word) != rank + 1) {
    return;  // no failure, or another rank's, which informs its remote peers
  }
  // Publishes nothing: it only elects the writer.
  if (!P::template compare_exchange_release<Scope::device>(claimed, 0U, 1U) &&
      !MOEOS_PLANTED(records_are_put_again)) {
    return;
  }
  const u64 record = layout.failure(rank);
  for (u32 p = 0; p < layout.geometry().world; ++p) {
    if (platform.peer(p) == nullptr) {
      for (u64 at = record; at < record + sizeof(Failure); at += sizeof(u64)) {
        platform.put_word(p, at, *reinterpret_cast<const u64*>(own_heap + at));
      }
      platform.order_puts();
      platform.put_word(p, layout.put_failure(rank), word);
    }
  }
}

/// Whether a call of this rank must be left.
template <Platform P>
bool aborted(const Layout& layout, const u8* own_heap, u32 epoch) {
  // Relaxed: the word alone decides whether to leave; first_failure acquires before it reads the
  // record.
  const u64 word = P::template load_relaxed<Scope::system>(
      reinterpret_cast<const u64*>(own_heap + layout.abort_word()));
  return word != 0 && word >> 32 <= epoch;
}

/// The failure that raised this rank's abort word; kind none when there is none.
template <Platform P>
Failure first_failure(const Layout& layout, const u8* own_heap) {
  // Pairs with the release in raise_at: the record of the rank named by the word is complete.
  const u64 word = P::template load_acquire<Scope::system>(
      reinterpret_cast<const u64*>(own_heap + layout.abort_word()));
  if (word == 0) {
    return Failure{};
  }
  return *reinterpret_cast<const Failure*>(own_heap + layout.failure(static_cast<u32>(word) - 1));
}

}  // namespace moeos
