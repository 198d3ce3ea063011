// SPDX-License-Identifier: Apache-2.0
// The OS block: starts a call, runs the scheduler and the subscribers, and notices when nothing
// moves. With remote peers it runs senders, too.
//
// Each warp runs one actor in a loop of steps (run_os_warp); on a machine with few threads one
// thread runs all actors in turn (run_os_block). Must not depend on: what tasks compute.
#pragma once

#include "runtime/actors/arrivals_subscriber.hpp"
#include "runtime/actors/counts_subscriber.hpp"
#include "runtime/actors/landings_subscriber.hpp"
#include "runtime/actors/returns_subscriber.hpp"
#include "runtime/actors/scheduler.hpp"
#include "runtime/actors/sender.hpp"
#include "runtime/actors/sums_subscriber.hpp"
#include "runtime/health/grace_time.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/plan/known_parts.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/mailbox.hpp"
#include "runtime/record/trace.hpp"
#include "runtime/rows/routing_finish.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// Warps that run the scheduler and the subscribers, of which the last ones count returned rows.
template <Platform P>
inline constexpr u32 kOsWarps = 3 + P::kReturnsSubscribers;
inline constexpr u32 kFirstReturnsSubscriber = 3;

/// Warps of the OS block that run an actor: the senders come last.
template <Platform P>
constexpr u32 os_warps(const Geometry& geometry) {
  return kOsWarps<P> + (geometry.remote != 0 ? P::kSenders : 0);
}

/// Prepares a call, by one warp, before any other actor of the OS block runs: clears the other
/// parity's counters for the next call and sets this call's bound.
///
/// The last epoch is never called: words of the next one would equal words that have never been
/// written. A call with the last epoch fails. A rank cannot return to the first epoch by itself:
/// words of that epoch may still stand, so all must be cleared while no rank writes (reset).
template <Platform P>
void begin_call(const Rank<P>& rank, const Call& call) {
  const RankMemory& memory = rank.memory;
  if (P::lane() == 0) {
    if (call.epoch == kNone) {
      rank.fail(failure_of(rank, call, FailureKind::epochs_spent, Actor::scheduler));
    }
    memory.call(call.epoch + 1) = CallState{};
    memory.os_tally().count_bytes_to_peers = 0;  // no other byte is ever counted here
    *rank.os.rows_expected = rank.geometry().rows_received_max();
    *rank.os.wanted = 0;
    *rank.os.inquiry = 0;
    *rank.os.returns_ready = 0;
    *rank.os.returns_listed = 0;
    *rank.os.planned = static_cast<u32>(Planned::unknown);
    // Processors know the first parts; no slot of the ring holds them.
    *rank.os.published =
        known_parts(rank.geometry(), call) + own_unsent_parts(rank.geometry(), call);
    for (u32 kind = kTaskKinds; kind < kTraceKinds; ++kind) {
      trace_of(rank, static_cast<TraceKind>(kind)).clear();
    }
    *memory.record = CallRecord{call.tokens, P::now_ns(), 0, 0, 0, 0};
    for (u32 peer = 0; rank.geometry().remote != 0 && peer < rank.geometry().world; ++peer) {
      *memory.outbox_tickets(call.epoch + 1, peer) = 0;
    }
  }
  for (u32 peer = P::lane(); peer < rank.geometry().world; peer += P::kLanes) {
    memory.peer_records[peer] = PeerRecord{};
    *memory.rows_carried(call.epoch + 1, peer) = 0;
  }
  P::sync_lanes();
}

/// When nothing has moved for a deadline, the scheduler opens an inquiry: each subscriber in turn
/// either names what it is waiting for, and fails the call with it, or passes the inquiry on. So
/// the failure names the earliest thing in a call's order that has not happened, and each actor's
/// state is only read by itself.
inline constexpr u32 kNoInquiry = 0;
/// What was missing has come: no further actor need be asked.
inline constexpr u32 kInquiryMoot = kNone;
/// No inquiry comes to an actor with this number.
inline constexpr u32 kNeverAsked = kNone - 1;
/// The actor whose turn it is.
inline constexpr u32 kAskCounts = 1;
inline constexpr u32 kAskLandings = 2;
inline constexpr u32 kAskArrivals = 3;
inline constexpr u32 kAskReturns = 4;  // one for each warp that counts returned rows
template <Platform P>
inline constexpr u32 kAskSender = kAskReturns + P::kReturnsSubscribers;  // the first
/// Takes the sender's number where experts are sliced; no such rank has remote peers.
template <Platform P>
inline constexpr u32 kAskSums = kAskSender<P>;

/// The warp that answers an inquiry (run_os_warp).
template <Platform P>
constexpr u32 warp_asked(const Geometry& geometry, u32 inquiry) {
  return inquiry <= kAskLandings || (geometry.sliced() && inquiry == kAskSums<P>) ? 1
         : inquiry == kAskArrivals ? 2
                                   : kFirstReturnsSubscriber + inquiry - kAskReturns;
}

/// What the actor that answers an inquiry does, as host/moeos/engines/failure.py numbers it: one
/// number for all returns subscribers.
template <Platform P>
constexpr u32 what_is_asked(const Geometry& geometry, u32 inquiry) {
  const u32 behind_returns = geometry.sliced() ? kAskReturns + 2 : kAskReturns + 1;
  return inquiry < kAskSender<P> ? minimum(inquiry, kAskReturns) : behind_returns;
}

/// The value of an inquiry that all actors have passed on.
template <Platform P>
constexpr u32 inquiry_unanswered(const Geometry& geometry) {
  return kAskSender<P> + (geometry.remote != 0 || geometry.sliced() ? 1 : 0);
}

/// `turn`: this actor's value of the inquiry.
template <Platform P, class Subscriber>
void answer_inquiry(const Rank<P>& rank, const Call& call, Subscriber& subscriber, u32 turn) {
  // Pairs with the release of the actor asked before: what it has decoded is known here.
  if (agreed<P>(P::template load_acquire<Scope::block>(rank.os.inquiry)) != turn) {
    return;
  }
  Failure failure = failure_of(rank, call, FailureKind::none, Actor::subscriber);
  failure.waited_ns = rank.deadline_ns;
  if (P::lane() == 0) {
    const Answer answer = subscriber.answer(failure);
    if (answer == Answer::missing) {
      rank.fail(failure);
    } else if (answer != Answer::wait) {
      // Publishes what this actor has decoded to the actor that is asked next, which acquires
      // above; publishes nothing to the scheduler (call_over).
      P::template store_release<Scope::block>(rank.os.inquiry,
                                              answer == Answer::moot ? kInquiryMoot : turn + 1);
    }
  }
  P::sync_lanes();
}

/// Bounds the wait for an answer. An actor that is asked and does not answer is stuck inside a
/// step, in a put or a wait of a transport, or no thread runs its warp. Then no actor can say what
/// is missing, but the block, its processors and its peers can leave. Run by one warp, the
/// scheduler's.
template <Platform P>
class Unanswered {
 public:
  /// Deadlines to wait for an answer. Longer than an actor may put off an answer (GraceTime).
  static constexpr u32 kDeadlines = 2;
  static_assert(GraceTime<P>::kLinksMost < kDeadlines * GraceTime<P>::kLinksOfDeadline);

  /// Whether the inquiry, which is now at actor `stands`, has been there for too long.
  bool too_long(u32 stands, u64 deadline_ns) {
    if (stands != at_) {
      at_ = stands;
      since_ns_ = P::now_ns();
    }
    return stands != kNoInquiry && agreed<P>(P::now_ns() - since_ns_) > kDeadlines * deadline_ns;
  }

 private:
  u32 at_ = kNoInquiry;
  u64 since_ns_ = 0;
};

/// The scheduler's side: whether this block's work is over, by success or by failure.
template <Platform P>
bool call_over(const Rank<P>& rank, const Call& call, Scheduler<P>& scheduler, Watch<P>& watch,
               Unanswered<P>& unanswered) {
  if (scheduler.leaving()) {
    return true;
  }
  if (agreed<P>(scheduler.finished())) {
    scheduler.interrupt();
    return true;
  }
  u32* inquiry = rank.os.inquiry;
  const bool expired = agreed<P>(watch.expired());
  const u32 stands = agreed<P>(P::template load_acquire<Scope::block>(inquiry));
  if (stands == kInquiryMoot) {
    watch.progress();
  }
  if (stands == kInquiryMoot || (expired && stands == kNoInquiry)) {
    if (P::lane() == 0) {
      // Publishes nothing; asks the first subscriber, or none.
      P::template store_release<Scope::block>(inquiry,
                                              stands == kNoInquiry ? kAskCounts : kNoInquiry);
    }
    P::sync_lanes();
  }
  if (stands == inquiry_unanswered<P>(rank.geometry())) {
    // All rows came and went: our own processors have not finished.
    Failure failure = failure_of(rank, call, FailureKind::tasks_late, Actor::scheduler);
    failure.waited_ns = rank.deadline_ns;
    failure.expected = P::template load_relaxed<Scope::block>(rank.os.rows_expected);
    failure.seen =
        P::template load_relaxed<Scope::device>(&rank.memory.call(call.epoch).rows_returned.value);
    rank.fail(failure);
    return true;
  }
  if (unanswered.too_long(stands, rank.deadline_ns)) {
    Failure failure = failure_of(rank, call, FailureKind::actor_silent, Actor::scheduler);
    failure.chunk = warp_asked<P>(rank.geometry(), stands);
    failure.seen = what_is_asked<P>(rank.geometry(), stands);
    failure.waited_ns = (1 + Unanswered<P>::kDeadlines) * rank.deadline_ns;
    rank.fail(failure);
    return true;
  }
  return false;
}

template <Platform P>
void wait_unless(bool progress, Watch<P>& watch, u32& idle) {
  if (progress) {
    watch.progress();
    P::rest(idle);
  } else {
    P::pause(idle);
  }
}

/// Runs an actor's step, and traces it if it has found something and `noted` is set.
template <Platform P, class Actor>
bool traced_step(const Rank<P>& rank, Actor& actor, TraceKind kind, Trace<P>& trace,
                 bool noted = true) {
  const u64 begin = trace_time<P>(rank.geometry());
  const bool progress = actor.step();
  if (progress && noted && P::lane() == 0) {
    TraceEvent event{};
    event.kind = static_cast<u32>(kind);
    event.peer = event.expert = kNone;
    event.begin_ns = begin;
    event.end_ns = trace_time<P>(rank.geometry());
    trace.note(event);
  }
  return progress;
}

/// All actors in turn, one of each kind, until the call ends or is aborted.
template <Platform P>
void run_os_block(const Rank<P>& rank, const Call& call) {
  MOEOS_CHECK(P::kSenders == 1 && P::kReturnsSubscribers == 1);
  Scheduler<P> scheduler(rank, call);
  CountsSubscriber<P> counts(rank, call);
  LandingsSubscriber<P> landings(rank, call);
  ArrivalsSubscriber<P> arrivals(rank, call);
  ReturnsSubscriber<P> returns(rank, call, 0);
  Sender<P> sender(rank, call, 0);
  SumsSubscriber<P> sums(rank, call);
  Trace<P> of_scheduler = trace_of(rank, TraceKind::schedule);
  Trace<P> of_counts = trace_of(rank, TraceKind::counts);
  Trace<P> of_arrivals = trace_of(rank, TraceKind::arrivals);
  Trace<P> of_returns = trace_of(rank, TraceKind::returns);
  Watch<P> watch(rank.deadline_ns);
  Unanswered<P> unanswered;
  u32 idle = 0;
  bool begun = call.tokens > 0;  // Route begins the call
  while (!call_over(rank, call, scheduler, watch, unanswered)) {
    begun = begun || route_nothing(rank, call);
    bool progress = traced_step(rank, scheduler, TraceKind::schedule, of_scheduler);
    progress = traced_step(rank, counts, TraceKind::counts, of_counts) || progress;
    progress = landings.step() || progress;
    progress = traced_step(rank, arrivals, TraceKind::arrivals, of_arrivals) || progress;
    progress = traced_step(rank, returns, TraceKind::returns, of_returns) || progress;
    progress = sender.step() || progress;
    progress = sums.step() || progress;
    answer_inquiry(rank, call, counts, kAskCounts);
    answer_inquiry(rank, call, landings, kAskLandings);
    answer_inquiry(rank, call, arrivals, kAskArrivals);
    answer_inquiry(rank, call, returns, kAskReturns);
    answer_inquiry(rank, call, sender, rank.geometry().remote != 0 ? kAskSender<P> : kNeverAsked);
    answer_inquiry(rank, call, sums, rank.geometry().sliced() ? kAskSums<P> : kNeverAsked);
    wait_unless(progress, watch, idle);
  }
  returns.leave();
  sender.leave();
}

/// Runs a subscriber's or sender's warp. Its wait is bounded by the scheduler's watch: everything
/// that a subscriber learns becomes parts that processors claim, which the scheduler sees, and the
/// call waits for all that a sender puts, so the warp leaves on the interrupt or on the abort.
/// `inquiry`: the value that it answers; step(): the actor's.
template <Platform P, class Actor, class Step>
void run_watcher(const Rank<P>& rank, const Call& call, Actor& actor, u32 inquiry, Step step) {
  u32 idle = 0;
  while (!must_leave(rank, call)) {
    const bool progress = step();
    answer_inquiry(rank, call, actor, inquiry);
    progress ? P::rest(idle) : P::pause(idle);
  }
}

/// Runs one of the block's warps: 0 is the scheduler, then the subscribers; from kOsWarps on the
/// senders, of which the first answers an inquiry. Counts come at the beginning of a call, so their
/// warp watches landings, too. Only the first of the warps that count returned rows writes a trace.
///
/// Inlined, however long it is: a GPU kernel that calls a function has a stack.
template <Platform P>
__attribute__((always_inline)) inline void run_os_warp(const Rank<P>& rank, const Call& call,
                                                       u32 warp) {
  if (warp == 1) {
    CountsSubscriber<P> counts(rank, call);
    LandingsSubscriber<P> landings(rank, call);
    SumsSubscriber<P> sums(rank, call);
    Trace<P> trace = trace_of(rank, TraceKind::counts);
    bool begun = call.tokens > 0;  // Route begins the call
    run_watcher(rank, call, counts, kAskCounts, [&] {
      begun = begun || route_nothing(rank, call);
      const bool counted = traced_step(rank, counts, TraceKind::counts, trace);
      const bool listed = landings.step();
      answer_inquiry(rank, call, landings, kAskLandings);
      if (rank.geometry().sliced()) {
        const bool summed = sums.step();
        answer_inquiry(rank, call, sums, kAskSums<P>);
        return counted || listed || summed;
      }
      return counted || listed;
    });
  } else if (warp == 2) {
    ArrivalsSubscriber<P> arrivals(rank, call);
    Trace<P> trace = trace_of(rank, TraceKind::arrivals);
    run_watcher(rank, call, arrivals, kAskArrivals,
                [&] { return traced_step(rank, arrivals, TraceKind::arrivals, trace); });
  } else if (warp >= kFirstReturnsSubscriber && warp < kOsWarps<P>) {
    const u32 index = warp - kFirstReturnsSubscriber;
    ReturnsSubscriber<P> subscriber(rank, call, index);
    Trace<P> trace = trace_of(rank, TraceKind::returns);
    run_watcher(rank, call, subscriber, kAskReturns + index, [&] {
      return traced_step(rank, subscriber, TraceKind::returns, trace, index == 0);
    });
    subscriber.leave();
  } else if (warp == 0) {
    Scheduler<P> scheduler(rank, call);
    Trace<P> trace = trace_of(rank, TraceKind::schedule);
    Watch<P> watch(rank.deadline_ns);
    Unanswered<P> unanswered;
    u32 idle = 0;
    while (!call_over(rank, call, scheduler, watch, unanswered)) {
      wait_unless(traced_step(rank, scheduler, TraceKind::schedule, trace), watch, idle);
    }
  } else if constexpr (P::kRemotePeers) {
    Sender<P> sender(rank, call, warp - kOsWarps<P>);
    run_watcher(rank, call, sender, warp == kOsWarps<P> ? kAskSender<P> : kNeverAsked,
                [&] { return sender.step(); });
    sender.leave();
  }
}

}  // namespace moeos
