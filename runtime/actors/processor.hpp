// SPDX-License-Identifier: Apache-2.0
// Algorithm 4: the actor that runs parts of tasks, and what follows from a part's end.
//
// take_ticket() and claim() take the next part; count_slices(), count_block() and finish_routing()
// complete parts of Route; complete() makes any other part's effects visible: the next product of a
// tile, credits to owners. A machine with one warp a processor runs them in turn
// (warp_processor.hpp); on the GPU a fetch warp claims ahead while other warps compute. With a
// dynamic schedule a part never waits for another task: it was handed out because its inputs are
// here. With a static schedule (counted_rows.hpp) its inputs may still be under way; then await()
// waits for them before the part begins (inputs.hpp). Must not depend on: arithmetic, element
// types.
#pragma once

#include "runtime/health/faults.hpp"
#include "runtime/health/intact.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/plan/counted_rows.hpp"
#include "runtime/plan/known_parts.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/mailbox.hpp"
#include "runtime/record/trace.hpp"
#include "runtime/rows/inputs.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/rows/routing_finish.hpp"
#include "runtime/rows/sums.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Makes the descriptor of the part that a word of the ready ring hands out, or copies its tile's;
/// false if the tile's descriptor is damaged. One warp; all lanes may then read it.
template <Platform P>
bool get_task(const Rank<P>& rank, const Call& call, ReadyWord word, Task& to) {
  const TaskKind kind = word.kind();
  if (is_product(kind) && !copy_intact<P>(rank.memory.tasks[word.task()], to)) {
    reject_damaged(rank, call, FailureKind::task_damaged, Actor::processor, word.task(), 0);
    return false;
  }
  if (P::lane() == 0) {
    if (kind == TaskKind::combine) {
      to = rank.geometry().sliced() ? combine_task_of_slices(word) : combine_task(word);
    } else if (kind == kSecondProduct.kind) {
      become_second(to, rank.geometry(), word.half_width());
    }
  }
  P::sync_lanes();
  return true;
}

template <Platform P>
class Processor : Pace<P> {
 public:
  Processor(const Rank<P>& rank, const Call& call, u32 index)
      : Pace<P>(rank, index),
        rank_(rank),
        call_(call),
        state_(rank.memory.call(call.epoch)),
        tally_(rank.memory.tallies[index]),
        plan_(OneSourceRows<P>(rank, call)),
        plan_is_(rank.geometry().plans_by_counts(call.tokens) ? PlanIs::awaited : PlanIs::none) {}

  /// Takes the next ticket, which stands for a part.
  u32 take_ticket() const { return take_ticket(state_); }
  /// Takes the next ticket of a call whose state is looked up again.
  static u32 take_ticket(CallState& state) {
    // Relaxed: it publishes nothing; a slot of the ready ring does.
    return by_one_lane<P>(
        [&state] { return P::template add_relaxed<Scope::device>(&state.ring_claimed.value, 1U); });
  }

  /// Whether a ticket is one of the call's first ones, which stand for Route parts and are never
  /// published. Then `task`, which all lanes see, becomes the part's descriptor.
  bool is_route(u32 ticket, ReadyWord& word, Task& task) const {
    if (ticket >= route_parts(rank_.geometry(), call_)) {
      return false;
    }
    word = route_word(rank_.geometry(), call_, ticket);
    if (P::lane() == 0) {
      task = route_task(rank_.geometry(), call_);
    }
    P::sync_lanes();
    return true;
  }

  /// Whether a ticket stands for a part of a shared expert, which is never published either.
  bool is_of_shared(u32 ticket, ReadyWord& word, Task& task) const {
    const Geometry& geometry = rank_.geometry();
    const Call call = call_of_look();
    if (!geometry.shares() || ticket >= known_parts(geometry, call)) {
      return false;
    }
    word = shared_word(geometry, call, ticket - route_parts(geometry, call));
    if (P::lane() == 0) {
      task = shared_task(geometry, call, rank_.rank, word);
    }
    P::sync_lanes();
    return true;
  }

  /// Finds out which part a ticket stands for. When a rank is alone or rows are few, parts of tiles
  /// follow from the counts, after those of tokens that have sent no row; other parts stand in the
  /// ticket's slot of the ready ring. `task` as in is_route. beside() returns whether it has found
  /// and done other work meanwhile. False: leave.
  template <class Beside>
  bool claim(u32 ticket, ReadyWord& word, Task& task, Beside beside) {
    const bool found = is_route(ticket, word, task) || is_of_shared(ticket, word, task) ||
                       find(ticket, word, task, beside);
    return found && hold_back(rank_, call_, stage_of(word.kind()));
  }

  /// Waits for the inputs of a claimed part whose descriptor awaits them; `beside` as in claim.
  /// False: leave.
  template <class Beside>
  bool await(const Inputs<P>& inputs, Beside beside) {
    if (!wait_for(kLooksForInputs, [&] { return inputs.here(); }, beside)) {
      return false;
    }
    P::template acquire_fence<Scope::system>();
    P::sync_lanes();  // what one lane has seen is here for all
    return true;
  }

  /// Waits for the shared experts' results, before a part of Combine; `memory`: the rank's,
  /// `beside` as in claim. False: leave.
  template <class Beside>
  bool await_shared(const RankMemory& memory, Beside beside) {
    const auto look = [&] {
      return agreed<P>(P::template poll<Scope::device>(memory.shared_results_here)) ==
             seal(call_.epoch);
    };
    if (!wait_for(kLooksForInputs, look, beside)) {
      return false;
    }
    P::template acquire_fence<Scope::device>();  // pairs with end_shared_tile
    P::sync_lanes();
    return true;
  }

  /// Before a part is begun for which complete() will be called. One warp.
  void begin_part(const Task& task) {
    Pace<P>::begin_part(rank_, call_);
    wait_for_links(rank_, call_,
                   [&](u32 peer) { return result_bytes_to(rank_.geometry(), task, peer); });
  }

  /// Counts a Route part whose slices of the gate logits are where the last one finds them; true
  /// for the last part of a block, which then must route the block. One warp.
  bool count_slices(u32 block) {
    return completes<P>(&rank_.memory.route_parts_done[block],
                        rank_.geometry().route_parts_of_block(call_.tokens));
  }
  /// Counts a block whose assignments are sorted; true for the last one, which then must finish the
  /// routing. One warp.
  bool count_block(const Task& task) {
    Pace<P>::slow_down(rank_, call_);
    return completes<P>(&state_.route_blocks_done.value, task.parts);
  }
  template <class Sync>
  void finish_routing(Team team, Sync sync) {
    moeos::finish_routing(rank_, call_, tally_, team, sync);
  }

  const Pace<P>& pace() const { return *this; }

  /// Ends the call because a token's logits are not finite: a wrong route would be a silent error.
  void reject_logits(u32 token) {
    Failure failure = failure_of(rank_, call_, FailureKind::logits_not_finite, Actor::processor);
    failure.chunk = token;
    rank_.fail(failure);
  }

  /// Ends the call because an id that the caller gave a token cannot be followed.
  void reject_id(FailureKind kind, u32 token, u32 slot, u64 id) {
    Failure failure = failure_of(rank_, call_, kind, Actor::processor);
    failure.chunk = token;
    failure.expected = slot;
    failure.seen = id;
    rank_.fail(failure);
  }

  /// Makes a finished part's effects visible. One warp, after everything that the part's other
  /// warps wrote. `combined`: tokens that a Combine part has written.
  void complete(const Task& task, ReadyWord word, u64 busy_ns, u32 combined) {
    if (task.kind != TaskKind::route) {
      busy_ns += Pace<P>::slow_down(rank_, call_);
    }
    switch (task.kind) {
      case TaskKind::product0:
      case TaskKind::product1:
        complete_product(task, word);
        break;
      case TaskKind::combine:
        P::sync_lanes();
        if (rank_.geometry().sliced()) {
          const u64 sent = announce_sums(rank_, call_, task, combined);
          if (P::lane() == 0) {
            note<P>(tally_.row_bytes_to_peers, sent);
          }
          P::sync_lanes();
        }
        if (P::lane() == 0) {
          if (task.rows == 0) {
            // Publishes token_rows of a block to the returns subscriber.
            P::template add_release<Scope::device>(&state_.token_rows_known.value, 1U);
          }
          // Relaxed: the scheduler compares a number; the end of the call publishes the output.
          P::template count_relaxed<Scope::device>(&state_.tokens_combined.value, combined);
        }
        break;
      case TaskKind::route:      // counted by the warps that ran it, which must finish the routing
      case TaskKind::dispatch:   // the courier's (courier.hpp)
      case TaskKind::replicate:  // likewise
        break;
    }
    if (P::lane() == 0) {  // after what others wait for
      note<P>(tally_.tasks[static_cast<u32>(task.kind)], 1);
      note<P>(tally_.busy_ns[static_cast<u32>(task.kind)], busy_ns);
    }
    Pace<P>::end_part();
  }

 private:
  /// How often to look for a part's inputs between two looks at everything else that a waiting
  /// processor watches. A machine with one warp has other work to do meanwhile, so it looks once.
  static constexpr u32 kLooksForInputs = P::kLanes == 1 ? 1 : 8;

  /// Counts a part of a tile's product; the warp that counts the last part does what follows. One
  /// warp.
  void complete_product(const Task& task, ReadyWord word) {
    switch (product_of(rank_.geometry(), task).then) {
      case Then::next:
        if (task.awaits != 0) {
          // Publishes the part's results to the processors that wait for all of the tile's, which
          // poll this counter and fence (inputs.hpp): every part of the next product reads all of
          // them.
          P::sync_lanes();
          if (P::lane() == 0) {
            P::template add_release<Scope::device>(&rank_.memory.product0_parts_done[task.tile],
                                                   1U);
          }
        } else if (completes<P>(&rank_.memory.product0_parts_done[task.tile], task.parts) &&
                   P::lane() == 0) {
          const TaskKind next = kSecondProduct.kind;
          post_next(rank_, call_, next, word.task(),
                    parts_of(rank_.geometry(), next, task.narrow != 0));
        }
        break;
      case Then::credits:
        if (completes<P>(&rank_.memory.product1_parts_done[task.tile], task.parts) &&
            P::lane() == 0) {
          end_tile(task, word);
        }
        break;
      case Then::shared_results:
        if (completes<P>(&rank_.memory.product1_parts_done[task.tile], task.parts)) {
          end_shared_tile(task);
        }
        break;
    }
  }

  /// Ends a tile whose results have been written to their owners. One lane.
  void end_tile(const Task& task, ReadyWord word) {
    const Returned returned = return_rows(rank_, call_, task, word);
    // Relaxed: the scheduler compares a number; the rows themselves were published to their owners.
    // A sender counts those that it puts.
    P::template count_relaxed<Scope::device>(&state_.rows_returned.value, returned.rows);
    if (task.awaits != 0) {
      // For the next call. Relaxed: all processors that waited for it have ended their parts.
      P::template store_relaxed<Scope::device>(&rank_.memory.product0_parts_done[task.tile], 0U);
    }
    if (rank_.geometry().reuses_places() && !MOEOS_PLANTED(places_stay_taken)) {
      // Publishes that all parts have read the tile's rows between the products, which this warp
      // has acquired by the counter, to the arrivals subscriber, which polls this word and fences
      // (TilePlan::find_free_places).
      P::template store_release<Scope::device>(&rank_.memory.tiles_multiplied[task.tile],
                                               seal(call_.epoch));
    }
    note<P>(tally_.row_bytes_to_peers, returned.row_bytes);
    note<P>(tally_.flag_bytes_to_peers, returned.flag_bytes);
    note<P>(tally_.padding_rows, task.padded_rows - task.rows);
  }

  /// Ends a shared expert's tile whose results are all in memory. One warp.
  void end_shared_tile(const Task& task) {
    if (P::lane() == 0) {
      // For the next call. Relaxed: all processors that waited for it have ended their parts.
      if (!MOEOS_PLANTED(shared_counters_stay)) {
        P::template store_relaxed<Scope::device>(&rank_.memory.product0_parts_done[task.tile], 0U);
      }
      note<P>(tally_.padding_rows, task.padded_rows - task.rows);
    }
    if (completes<P>(rank_.memory.shared_tiles_done, rank_.geometry().shared_tiles(call_.tokens)) &&
        P::lane() == 0) {
      // Publishes all results and weights, which this warp has acquired by the two counters, to
      // the processors that combine; they poll this word and fence (await_shared).
      P::template store_release<Scope::device>(rank_.memory.shared_results_here, seal(call_.epoch));
    }
  }

  /// Finds a part that is not known when the call begins. One loop waits for the routing, for
  /// counts and for slots: a warp that runs through much code waits for that code.
  template <class Beside>
  bool find(u32 ticket, ReadyWord& word, Task& task, Beside beside) {
    using Counts = typename FewRows<P>::Counts;
    const u32 unsent = own_unsent_parts(rank_.geometry(), call_);
    const u32 behind_known = ticket - known_parts(rank_.geometry(), call_of_look());
    const bool of_unsent = behind_known < unsent;
    const u32 number = behind_known - unsent;
    u32 turn = 0;
    // Constants. Where they are false, the compiler drops a plan and its registers.
    const bool plans = rank_.geometry().plans_itself();
    const bool plans_few = rank_.geometry().plans_few_rows();
    while (of_unsent || !plans || plan_is_ != PlanIs::made || number >= plan_.parts()) {
      const bool counts = !of_unsent && (plan_is_ == PlanIs::awaited || plan_is_ == PlanIs::begun);
      FewRows<P> rows(rank_, call_);
      Counts found = Counts::missing;
      const auto look = [&] {
        return of_unsent         ? MOEOS_PLANTED(unsent_tokens_do_not_await_routing) || is_routed()
               : plans && counts ? are_counts_here(number)
               : plans_few && counts ? is_told_or_counted(ticket, word, number, rows, turn, found)
                                     : is_filled(ticket, word);
      };
      // If the call is planned by counts, all are here. Or this processor has not looked yet.
      const bool at_once =
          plans_few && !of_unsent && (plan_is_ == PlanIs::made || plan_is_ == PlanIs::awaited);
      if (at_once) {
        found = rows.look();
      } else if (!wait_for(of_unsent || counts ? kLooksForInputs : 1, look, beside)) {
        return false;
      }
      if (plans && counts) {
        plan_.make();
        plan_is_ = PlanIs::made;
        continue;
      }
      if (at_once || (plans_few && found != Counts::missing)) {
        if (!find_few(rows, found, number, word, task)) {
          return false;
        }
        if (plan_is_ == PlanIs::made) {
          return true;
        }
        continue;
      }
      // Pairs with finish_routing for the routing map, or with fill_ring_slot for the descriptor
      // and, unless they are awaited, the inputs of the part. Not at every look: a fence costs more
      // than the look.
      P::template acquire_fence<Scope::device>();
      word = of_unsent ? combine_unsent_word(call_.epoch, behind_known) : word;
      plan_is_ = of_unsent ? plan_is_ : PlanIs::none;  // later parts have larger numbers
      return get_task(rank_, call_, word, task);
    }
    word = plan_.part(number, task);
    return true;
  }

  /// Makes part `number` of a plan of few rows, and its word, if this call is planned so: then the
  /// plan is made. Otherwise this part and all later ones are handed out in the ring. `found`: what
  /// a look at all counts has found. False: leave.
  ///
  /// The first look mostly finds no counts. Then the function makes some part of what is there, and
  /// forgets it: so the code is loaded while counts are under way, and not when they are here.
  ///
  /// For later parts the counts are looked at again while the part before is computed: registers to
  /// keep them in are scarce. If a count is not here then, it has been overwritten, and the call
  /// fails.
  bool find_few(const FewRows<P>& rows, typename FewRows<P>::Counts found, u32 number,
                ReadyWord& word, Task& task) {
    using Counts = typename FewRows<P>::Counts;
    const bool decided = plan_is_ == PlanIs::made;
    if (decided && found != Counts::here) {
      Failure failure = failure_of(rank_, call_, FailureKind::count_damaged, Actor::processor);
      rows.name_damaged(failure);
      rank_.fail(failure);
      return false;
    }
    if (found == Counts::too_many) {
      plan_is_ = PlanIs::none;
      return true;
    }
    u32 before = static_cast<u32>(FoundBy::nobody);
    if (!decided && found == Counts::here && P::lane() == 0) {
      // Relaxed: it publishes nothing and acquires nothing. The processor that plans has seen the
      // counts itself, and these say which call they belong to. Either this exchange comes first or
      // the one that the subscriber makes for its own answer (ArrivalsSubscriber::may_make_tiles),
      // and the later one sees the earlier one. The answer is not waited for before the part is
      // made.
      before = P::template compare_exchange_relaxed<Scope::device>(
          &state_.found_by.value, static_cast<u32>(FoundBy::nobody),
          static_cast<u32>(FoundBy::processors));
    }
    Plan<P, FewRows<P>> plan(rows);
    plan.make();
    const u32 its = found == Counts::here ? number : 0;
    const bool there = its < plan.parts();
    if (there) {
      word = plan.part(its + (MOEOS_PLANTED(another_part_is_found) ? 1 : 0), task);
    }
    P::sync_lanes();  // all lanes have read a descriptor that is made again later
    const bool told = agreed<P>(before) == static_cast<u32>(FoundBy::subscriber) &&
                      !MOEOS_PLANTED(processors_plan_what_is_told);
    plan_is_ = found == Counts::missing ? PlanIs::begun
               : there && !told         ? PlanIs::made
                                        : PlanIs::none;
    return true;
  }

  /// Returns the call, for one look at its known parts: otherwise the compiler keeps what it
  /// derives from it for shared experts in registers for all parts.
  Call call_of_look() const {
    Call call = call_;
    if (rank_.geometry().shares()) {
      call.tokens = P::opaque(call.tokens);
    }
    return call;
  }

  bool is_routed() const {
    return agreed<P>(P::template poll<Scope::device>(&state_.routed.value)) != 0;
  }

  /// Looks at the counts of a rank alone; while they have not come, at one of them only.
  bool are_counts_here(u32 number) {
    plan_is_ = plan_is_ == PlanIs::awaited && plan_.rows().begun(number) ? PlanIs::begun : plan_is_;
    return plan_is_ == PlanIs::begun && plan_.rows().look();
  }

  /// Looks at a slot of the ready ring.
  bool is_filled(u32 ticket, ReadyWord& word) const {
    word = ReadyWord(agreed<P>(P::template poll<Scope::device>(&rank_.memory.ring[ticket])));
    if (word.epoch() > call_.epoch) {  // ends the call, and so the wait
      reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::processor, ticket,
                     word.sealed());
    }
    return word.epoch() == call_.epoch;
  }

  /// Looks at a slot and at one count, of each source in turn; both are asked for together. When
  /// that count has come, looks at all of them; `found`: what that look has found.
  bool is_told_or_counted(u32 ticket, ReadyWord& word, u32 number, FewRows<P>& rows, u32& turn,
                          typename FewRows<P>::Counts& found) const {
    // A count publishes nothing but itself.
    const u64 seen = P::template load_relaxed<Scope::system>(rows.sample(number, turn));
    if (is_filled(ticket, word)) {
      return true;
    }
    if (rows.has_come(agreed<P>(seen))) {
      ++turn;
      found = rows.look();
    }
    return found != FewRows<P>::Counts::missing;
  }

  /// Looks until `look` succeeds, `often` times for each look at everything else. False: leave.
  template <class Look, class Beside>
  bool wait_for(u32 often, Look look, Beside beside) {
    Watch<P> watch(2 * rank_.deadline_ns);  // the OS block notices a late peer first, and says more
    u32 heartbeat = 0;
    u32 idle = 0;
    for (;;) {
#pragma unroll 1
      for (u32 i = 0; i < often; ++i) {
        if (look()) {
          return true;
        }
      }
      if (must_leave(rank_, call_)) {
        return false;
      }
      if (beside()) {
        watch.progress();
        idle = 0;
        continue;
      }
      const u32 beat = P::template load_relaxed<Scope::device>(&state_.heartbeat.value);
      if (beat != heartbeat) {
        heartbeat = beat;
        watch.progress();
      }
      if (agreed<P>(watch.expired())) {
        Failure failure = failure_of(rank_, call_, FailureKind::os_silent, Actor::processor);
        failure.seen = beat;
        failure.waited_ns = watch.waited_ns();
        rank_.fail(failure);
        return false;
      }
      P::pause(idle);
    }
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Tally& tally_;
  Plan<P, OneSourceRows<P>> plan_;  // of a rank alone
  enum class PlanIs : u32 {
    awaited,
    begun,  ///< some of the plan's counts have come; or a part has been made without them
    made,
    none,  ///< parts are handed out in the ring
  } plan_is_;
};

/// Clears the tally and the trace of a processor or a courier, before its first part.
template <Platform P>
void forget_last_call(const Rank<P>& rank, u32 index) {
  rank.memory.tallies[index] = Tally{};
  Trace<P>(rank, index).clear();
}

}  // namespace moeos
