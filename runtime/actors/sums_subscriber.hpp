// SPDX-License-Identifier: Apache-2.0
// The subscriber of sums over slices: hands out groups of tokens whose partial sums, or whose sums,
// are here as Combine. It also compares what all slices say of their call.
//
// Like the other actors of Algorithm 2: step() looks once at its words and returns whether anything
// was new, and answer() says what it still waits for. No slice waits for another before it
// computes, and a late slice holds up only the tokens that miss something. Must not depend on: what
// a part computes.
#pragma once

#include "runtime/health/grace_time.hpp"
#include "runtime/memory/os_memory.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/ring.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

template <Platform P>
class SumsSubscriber {
 public:
  SumsSubscriber(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {
    const Geometry& geometry = rank.geometry();
    if (!geometry.sliced()) {
      return;
    }
    for (u32 s = P::lane(); s < geometry.slices; s += P::kLanes) {
      rank.os.slices_heard[s] = 0;
    }
    // The other owners' groups come first: the owners begin with them, as this rank begins with its
    // own.
    for (u32 turn = 1; turn <= geometry.slices; ++turn) {
      const u32 owner = (rank.slice + turn) % geometry.slices;
      const bool here =
          adds_slices(geometry, call) && (owner == rank.slice || geometry.sums_everywhere != 0);
      const u32 groups = here ? sum_groups(geometry, call.tokens, owner) : 0;
      for (u32 group = P::lane(); group < groups; group += P::kLanes) {
        rank.os.sums_awaited[awaited_ + group] = SumGroup(owner, group);
      }
      awaited_ += groups;
    }
    P::sync_lanes();
  }

  bool step() {
    if (!rank_.geometry().sliced()) {
      return false;
    }
    tell_all();
    const bool heard = hear();
    return (may_hand_out() && take_in()) || heard;
  }

  /// By one lane. A slice that has not sent a sum may wait for another slice's partial sums of it;
  /// one that has not made this call, for either in the call before. A slice that shares out
  /// experts with other ranks may wait for their counts (CountsSubscriber::answer). Where two ranks
  /// are the whole world, there is no third one to wait for.
  Answer answer(Failure& failure) {
    const Geometry& geometry = rank_.geometry();
    const bool silent = names_silent(failure);
    const bool late = silent || names_late(failure);
    if (late) {
      // Relaxed, as for a count: it publishes nothing but itself (CountsSubscriber::waits).
      P::template store_relaxed<Scope::system>(
          reinterpret_cast<u64*>(rank_.heap + rank_.layout.awaits()), count_word(call_.epoch, 1));
    }
    const u32 links = (silent ? 3 : failure.seen == kSums ? 2 : 1) + (geometry.world > 1 ? 4 : 0);
    return grace_time_.answer(late, geometry.ranks() <= 2 ? 0 : links, rank_.deadline_ns);
  }

 private:
  static constexpr u32 kLooks = P::kLanes == 1 ? 1 : 4;  // of a lane, in a step

  /// What is owed, as a failure of kind sums_late has it (failure_kinds.def).
  static constexpr u32 kCall = 0;
  static constexpr u32 kPartialSums = 1;
  static constexpr u32 kSums = 2;

  void tell_all() {
    if (told_) {
      return;
    }
    told_ = true;
    P::template publish_fence<Scope::system>();
    for (u32 s = P::lane(); s < rank_.geometry().slices; s += P::kLanes) {
      const u32 peer = rank_.peer_of_slice(s);
      send_identity(rank_, call_, peer);
      // Publishes, with the fence above, that this rank has read all sums of its earlier calls:
      // other ranks, which poll this word and fence, write the next sums over those of the last
      // call but one.
      P::template publish<Scope::system>(
          reinterpret_cast<u64*>(rank_.platform.peer(peer) +
                                 rank_.layout.inputs(call_.epoch, rank_.slice)),
          count_word(call_.epoch, inputs_of(call_)));
    }
    P::sync_lanes();
  }

  u64 call_of(u32 s) const {
    const u32 number = rank_.everywhere(rank_.peer_of_slice(s));
    // Relaxed, as for a count: it publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.call_of(call_.epoch, number))));
  }
  u64 inputs_of_slice(u32 s) const {
    // Pairs with tell_all, where a fence follows (hear).
    return open(P::template poll<Scope::system>(
        rank_.template here<u64>(rank_.layout.inputs(call_.epoch, s))));
  }

  /// Compares which call each slice makes, and with which inputs.
  bool hear() {
    const u32 slices = rank_.geometry().slices;
    if (heard_ == slices) {
      return false;
    }
    const u32 before = heard_;
    for (u32 first = 0; first < slices; first += P::kLanes) {
      const u32 s = first + P::lane();
      bool news = false;
      if (s < slices && rank_.os.slices_heard[s] == 0) {
        const u64 call = call_of(s);
        const u64 inputs = inputs_of_slice(s);
        const u32 peer = rank_.peer_of_slice(s);
        news =
            makes_our_call(rank_, call_, peer, call, call_.identity, FailureKind::call_differs) &&
            makes_our_call(rank_, call_, peer, inputs, inputs_of(call_),
                           FailureKind::inputs_differ);
        rank_.os.slices_heard[s] = news ? 1 : 0;  // this warp alone writes and reads it
      }
      heard_ += P::count(P::ballot(news));
    }
    if (heard_ == slices) {
      P::template acquire_fence<Scope::system>();  // pairs with tell_all
    }
    P::sync_lanes();
    if (heard_ == slices && P::lane() == 0) {
      // Relaxed: the scheduler compares a number. It ends no call before this count, so slices are
      // at most one call apart.
      P::template count_relaxed<Scope::device>(
          &rank_.memory.call(call_.epoch).tokens_combined.value, 1U);
    }
    return heard_ != before;
  }

  /// Whether a flag is this call's. Without a fence: one follows before rows are read (hand_out).
  bool is_here(u64 offset) const {
    return P::template poll<Scope::system>(rank_.template here<u32>(offset)) == seal(call_.epoch);
  }
  bool is_ready(SumGroup entry) const {
    const u32 owner = entry.owner();
    const u32 group = entry.group();
    if (owner != rank_.slice) {
      return is_here(rank_.layout.total_flag(call_.epoch, owner, group));
    }
    bool all = true;
    for (u32 s = 0; all && s < rank_.geometry().slices; ++s) {
      all = is_here(rank_.layout.partial_flag(call_.epoch, s, group));
    }
    return all || MOEOS_PLANTED(partial_sums_are_not_awaited);
  }

  /// Whether slots of the ready ring may be taken: only after those that stand for a plan's parts,
  /// which processors find by their numbers.
  bool may_hand_out() const {
    const Geometry& geometry = rank_.geometry();
    if (!geometry.may_await(call_.tokens) && !geometry.plans_by_counts(call_.tokens)) {
      return true;
    }
    // Pairs with ArrivalsSubscriber::decide, with the fence of hand_out.
    return agreed<P>(P::template poll<Scope::block>(rank_.os.planned)) !=
               static_cast<u32>(Planned::unknown) ||
           MOEOS_PLANTED(sums_do_not_await_the_plan);
  }

  /// Looks at some of the awaited groups, by turns, and hands out those that have come. The last
  /// entries of the list take the freed entries.
  bool take_in() {
    const u32 end = minimum(turn_ + kLooks * P::kLanes, awaited_);
    u32 kept = turn_;
    for (u32 first = turn_; first < end; first += P::kLanes) {
      const bool there = first + P::lane() < end;
      const SumGroup entry = rank_.os.sums_awaited[there ? first + P::lane() : first];
      const bool ready = is_ready(entry) && there;
      const u32 all_ready = P::ballot(ready);
      const u32 all_kept = P::ballot(there && !ready);
      P::sync_lanes();  // all lanes have read the entries that are written now
      if (there && !ready) {
        rank_.os.sums_awaited[kept + P::lanes_before(all_kept)] = entry;
      }
      kept += P::count(all_kept);
      if (all_ready != 0) {
        hand_out(entry, ready, all_ready);
      }
    }
    const u32 gone = end - kept;
    const u32 moved = minimum(gone, awaited_ - end);
    P::sync_lanes();
    for (u32 i = P::lane(); i < moved; i += P::kLanes) {
      rank_.os.sums_awaited[kept + i] = rank_.os.sums_awaited[awaited_ - moved + i];
    }
    P::sync_lanes();  // the list is whole for the lanes that look next
    awaited_ -= gone;
    turn_ = kept < awaited_ ? kept : 0;
    return gone != 0;
  }

  void hand_out(SumGroup entry, bool ready, u32 all_ready) const {
    // Pairs with send_partials and send_totals, and publishes what they wrote to the processors.
    P::template acquire_fence<Scope::system>();
    P::sync_lanes();
    P::template publish_fence<Scope::device>();
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, P::count(all_ready));
    if (first != kNone && ready) {
      const u32 owner = entry.owner();
      const TokenRange tokens =
          tokens_of_group(rank_.geometry(), call_.tokens, owner, entry.group());
      fill_ring_slot(rank_, first + P::lanes_before(all_ready),
                     sums_word(call_.epoch,
                               owner == rank_.slice ? Summands::slices : Summands::total, tokens));
    }
  }

  void name(Failure& failure, u32 s, u32 owes, TokenRange tokens) const {
    failure.kind = FailureKind::sums_late;
    failure.peer = rank_.peer_of_slice(s);
    failure.chunk = tokens.first;
    failure.expected = tokens.end;
    failure.seen = owes;
  }

  /// Names a slice that has not said which call it makes.
  bool names_silent(Failure& failure) const {
    for (u32 s = 0; s < rank_.geometry().slices; ++s) {
      if (call_of(s) >> 32 != call_.epoch || inputs_of_slice(s) >> 32 != call_.epoch) {
        name(failure, s, kCall, {0, 0});
        return true;
      }
    }
    return false;
  }

  /// Names the first group for which another slice owes something; partial sums first, because
  /// owners wait for them. Skips groups for which this rank itself has not sent its partial sums:
  /// then the others are not late.
  bool names_late(Failure& failure) const {
    const Geometry& geometry = rank_.geometry();
    bool found = false;
    for (u32 i = 0; i < awaited_; ++i) {
      const u32 owner = rank_.os.sums_awaited[i].owner();
      const u32 group = rank_.os.sums_awaited[i].group();
      const TokenRange tokens = tokens_of_group(geometry, call_.tokens, owner, group);
      const u64 ours = rank_.layout.partial_flag(call_.epoch, rank_.slice, group);
      const u8* its = rank_.platform.peer(rank_.peer_of_slice(owner));
      // Our own flag, where its owner looks for it; nothing is read because of it.
      if (P::template poll<Scope::system>(reinterpret_cast<const u32*>(its + ours)) !=
          seal(call_.epoch)) {
        continue;
      }
      if (owner != rank_.slice && !found) {
        name(failure, owner, kSums, tokens);
        found = true;
      }
      for (u32 s = 0; owner == rank_.slice && s < geometry.slices; ++s) {
        if (!is_here(rank_.layout.partial_flag(call_.epoch, s, group))) {
          name(failure, s, kPartialSums, tokens);
          return true;
        }
      }
    }
    return found;
  }

  const Rank<P>& rank_;
  const Call& call_;
  bool told_ = false;
  u32 heard_ = 0;    // slices that make our call
  u32 awaited_ = 0;  // groups that were not here at the last look
  u32 turn_ = 0;     // the group from which on the next step looks
  GraceTime<P> grace_time_;
};

}  // namespace moeos
