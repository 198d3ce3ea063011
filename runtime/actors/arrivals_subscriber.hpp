// SPDX-License-Identifier: Apache-2.0
// The subscriber of chunk flags: makes row tiles of arrived rows (tile_plan.hpp) and posts them to
// the scheduler. Most calls are planned up front instead (static schedule,
// Geometry::plans_up_front): when the counts of all sources are here, this actor makes all tiles
// and hands them out at once, and processors wait for the rows themselves (inputs.hpp). When a call
// has few rows, or a rank is alone, processors find all parts of tiles themselves
// (counted_rows.hpp). If a rank is late, this actor makes tiles as rows arrive (dynamic schedule),
// and the rest when the late rank's counts are here.
//
// One of the warps of Algorithm 2 that watch what peers write: step() looks once at its words and
// returns whether anything was new, and answer() says what it still waits for. Must not depend on:
// what a task computes.
#pragma once

#include "runtime/health/grace_time.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/plan/counted_rows.hpp"
#include "runtime/plan/kept_parts.hpp"
#include "runtime/plan/known_parts.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/plan/tile_plan.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/chunk_flags.hpp"
#include "runtime/queues/ring.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

template <Platform P>
class ArrivalsSubscriber {
 public:
  /// How long processors must have had nothing to do before incomplete remainders are packed.
  /// Shorter would split tiles that are about to fill; longer would leave processors idle for a
  /// straggler's rows.
  static constexpr u64 kPatienceNs = 20'000;
  /// As kPatienceNs, when all counts are here: then no rank is late, and the missing rows are under
  /// way. A tile that is split reads its weights twice, which costs as much as a long wait.
  static constexpr u64 kPatienceUnderWayNs = 200'000;
  /// How long a call that may be planned up front waits for the counts of late ranks, once this
  /// rank is routed, before tiles are made of the rows that are here. Processors idle meanwhile,
  /// but tiles made so make the rest take longer: with a rank that was 16 us late, a call of 371 us
  /// took 457 us without patience, and 385 us with it.
  static constexpr u64 kCountsPatienceNs = 24'000;
  /// Patience is at most this share of the deadline, because experts are packed one after the
  /// other.
  static constexpr u32 kPatiencesOfDeadline = 32;
  /// At first the remainders of one expert are packed. Each time that processors have nothing to do
  /// again and nothing has arrived, the number of experts grows by this factor: a rank that is that
  /// late is not about to fill a tile.
  static constexpr u32 kPackGrowth = 4;

  ArrivalsSubscriber(const Rank<P>& rank, const Call& call)
      : rank_(rank),
        call_(call),
        plan_(rank.layout, rank.memory, rank.os),
        flags_(rank, call, rank.os.chunk_prefix),
        in_place_(rank.geometry().reads_in_place(call.tokens)) {
    plan_.begin(call.epoch);
    if (!rank.geometry().may_plan_up_front(call.tokens)) {
      leave_to_rows();
    }
  }

  bool step() {
    if (left_ == Left::open && plan_up_front()) {
      return true;
    }
    if (left_ == Left::open && rank_.geometry().plans_itself()) {
      return false;  // processors do not ask how tiles are made
    }
    const bool progress =
        flags_.look([this](u32, u32) { return !in_place_; },
                    [this](u32 source, u32 rows) {
                      return complete_chunk_flags(
                          rank_, source, MOEOS_PLANTED(replicated_rows_are_not_awaited) ? 0 : rows);
                    },
                    [this](u32 source, u32 chunks) {
                      if (chunks > 0) {
                        rank_.memory.peer_records[source].rows_ns = P::now_ns();
                      }
                      rank_.os.rows_arrived[source] = flags_.rows(source);
                    },
                    left_ == Left::nothing ? kNone : 0);
    if (left_ == Left::nothing) {
      return progress;
    }
    news_ = news_ || progress;
    if (planned_ == Planned::unknown && counts_may_come()) {
      return progress;
    }
    const bool news = news_;
    news_ = false;
    if (news) {
      packed_at_once_ = 1;
      starving_since_ = 0;  // something moves
    }
    // Relaxed: a hint, which may be older than what was posted last; then large experts' weights
    // are read twice for nothing, which is rare and costs little.
    const u32 wanted = agreed<P>(P::template load_relaxed<Scope::block>(rank_.os.wanted));
    const u32 early = news ? 0 : experts_to_pack(wanted);
    if (!may_make_tiles()) {
      return progress;  // what processors have seen is known here soon (plan_up_front)
    }
    const bool planned = plan_.advance(news, wanted, early);
    if (planned) {
      decide(Planned::by_arrival);
      post_new_tiles();
    }
    return news || planned;
  }

  /// Missing is the first chunk that was announced and has not come. A chunk that has come, but
  /// that our couriers have not completed, is no peer's fault. A chunk that a peer cannot send
  /// because a third rank is late may not be the peer's fault either: then that peer will say so,
  /// or our own couriers' wait does.
  Answer answer(Failure& failure) {
    const Answer rows = flags_.answer(
        [this](u32 source, u32 rows) { return !in_place_ && !rank_.deduplicates(source, rows); },
        failure);
    const bool late = rows == Answer::missing && first_before_kept(rank_, call_).rows() == 0;
    return grace_time_.answer(late, kept_links(rank_.geometry()), rank_.deadline_ns);
  }

 private:
  /// As soon as all counts are here: makes all tiles, or those that are left, and hands them out,
  /// if the call is to be planned up front; returns whether it has.
  bool plan_up_front() {
    const Geometry& geometry = rank_.geometry();
    bool missing = false;
    for (u32 source = P::lane(); source < geometry.world; source += P::kLanes) {
      // Pairs with CountsSubscriber::finish: receive_starts(source) is this call's.
      missing = missing || P::template load_acquire<Scope::block>(&rank_.os.counts_known[source]) !=
                               call_.epoch;
    }
    if (P::ballot(missing) != 0) {
      return false;
    }
    P::sync_lanes();  // what one lane has acquired is there for all
    if (no_rows()) {
      leave_nothing();
      return false;
    }
    if (geometry.plans_itself()) {
      Plan<P, OneSourceRows<P>> plan(OneSourceRows<P>(rank_, call_));
      return plan.rows().look() && reserve_slots(plan);
    }
    if (geometry.plans_few_rows(call_.tokens) && !makes_tiles_) {
      using Counts = typename FewRows<P>::Counts;
      Plan<P, FewRows<P>> plan(FewRows<P>(rank_, call_));
      const Counts counts = plan.rows().look();
      if (counts == Counts::here) {
        return reserve_slots(plan);
      }
      // All counts have come, and every actor that sees them reaches the same answer.
      if (counts == Counts::missing || !may_make_tiles()) {
        Failure failure = failure_of(rank_, call_, FailureKind::count_damaged, Actor::subscriber);
        plan.rows().name_damaged(failure);
        rank_.fail(failure);
        return false;
      }
    }
    const Shape shape = look_at_shape();
    if (!shape.up_front || (posted_ > 0 && !geometry.plans_rest(shape.tiles)) || !plan_.fits() ||
        some_overflow()) {
      leave_to_rows();
      return false;
    }
    if (!unsent_handed_out()) {
      return false;
    }
    plan_.plan_rest();
    // Orders the descriptors before the words below; pairs with Processor::claim.
    P::template publish_fence<Scope::device>();
    hand_out_waves(MOEOS_PLANTED(tiles_are_handed_out_twice) ? 0 : posted_);
    note_first_tile();
    leave_nothing();
    return true;
  }

  /// Whether this subscriber makes tiles, or may: not where processors have begun to find the parts
  /// of a call themselves. Asked before the first tile.
  bool may_make_tiles() {
    if (!rank_.geometry().plans_few_rows(call_.tokens) || makes_tiles_ ||
        MOEOS_PLANTED(tiles_are_made_of_what_processors_plan)) {
      return true;
    }
    // Relaxed: it publishes nothing and acquires nothing. Either this exchange comes first or the
    // one that processors make for their own answer (Processor::find_few), and the later one sees
    // the earlier one.
    const u32 before = by_one_lane<P>([this] {
      return P::template compare_exchange_relaxed<Scope::device>(
          &rank_.memory.call(call_.epoch).found_by.value, static_cast<u32>(FoundBy::nobody),
          static_cast<u32>(FoundBy::subscriber));
    });
    makes_tiles_ = before == static_cast<u32>(FoundBy::nobody);
    return makes_tiles_;
  }

  /// Reserves the slots of the ready ring that stand for the parts that processors find themselves,
  /// before another actor takes any. Requires that the counts of `plan` are here.
  template <class Rows>
  bool reserve_slots(Plan<P, Rows>& plan) {
    plan.make();
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, plan.parts());
    MOEOS_CHECK(first == kNone || first == known_parts(rank_.geometry(), call_) +
                                               own_unsent_parts(rank_.geometry(), call_));
    note_first_tile();
    leave_nothing();
    return true;
  }

  /// Comes after the words of the tile's parts, for which others wait.
  void note_first_tile() const {
    if (posted_ == 0 && P::lane() == 0) {
      rank_.memory.record->first_tile_ns = P::now_ns();
    }
  }

  /// What is left to be made of a call's tiles.
  enum class Left : u32 {
    open,        ///< it may still be planned up front, or the rest of it
    by_arrival,  ///< tiles are made as rows arrive, to the end
    nothing,     ///< all parts are handed out, or will be found
  };
  void leave_nothing() {
    left_ = Left::nothing;
    decide(Planned::up_front);
  }
  void leave_to_rows() {
    left_ = Left::by_arrival;
    decide(Planned::by_arrival);
  }

  /// What the counts say of a call.
  struct Shape {
    bool up_front;  // it is planned up front (Geometry::plans_up_front)
    u32 tiles;      // estimate: with many sources an expert may have one or two more
  };
  /// Requires that the call has rows.
  Shape look_at_shape() const {
    const Geometry& geometry = rank_.geometry();
    u32 most = 0;  // rows of an expert, among this lane's
    u32 tiles = 0;
    for (u32 first = 0; first < geometry.local_experts(); first += P::kLanes) {
      const bool there = first + P::lane() < geometry.local_experts();
      const u32 expert = there ? first + P::lane() : first;
      u32 padded = 0;
      for (u32 source = 0; source < geometry.world; ++source) {
        const u32* starts = rank_.os.receive_starts(source);
        padded += align_up(starts[expert + 1] - starts[expert], Geometry::kSegmentAlign);
      }
      most = maximum(most, padded);
      tiles += there ? ceil_div(padded, geometry.tile_rows) : 0;
    }
    tiles = P::broadcast(P::inclusive_scan(tiles), P::kLanes - 1);
    const bool few_rows = P::ballot(most > geometry.up_front_rows) == 0;
    return {geometry.plans_up_front(few_rows, tiles), tiles};
  }

  /// Whether the Combine of tokens that sent no row has its slots, if an actor hands it out. All
  /// other sums wait for what it counts, so it must not come after all products.
  bool unsent_handed_out() const {
    // Its slots are the first after the known parts' that any actor takes, unless tiles have been
    // made. Relaxed: a number, by whose changes slots have their order.
    return !combines_unsent(call_) || rank_.geometry().may_await(call_.tokens) ||
           own_unsent_parts(rank_.geometry(), call_) != 0 ||
           agreed<P>(P::template load_relaxed<Scope::block>(rank_.os.published)) !=
               known_parts(rank_.geometry(), call_);
  }

  /// Whether a source has more rows for this rank than its cell has slots: the source waits for the
  /// results of the first rows, so no processor may wait for the last ones.
  bool some_overflow() const {
    bool some = false;
    for (u32 source = P::lane(); source < rank_.geometry().world; source += P::kLanes) {
      some = some || rank_.geometry().overflows(rank_.os.rows_received(source));
    }
    return P::ballot(some) != 0;
  }

  bool no_rows() const {
    bool some = false;
    for (u32 source = P::lane(); source < rank_.geometry().world; source += P::kLanes) {
      some = some || rank_.os.rows_received(source) != 0;
    }
    return P::ballot(some) == 0;
  }

  /// Tiles of a wave, of which each has a lane.
  static constexpr u32 kWave = minimum(Geometry::kWave, P::kLanes);

  /// Hands out all parts of all tiles from `begin` on, after a fence of each lane: waves of GEMM0
  /// and, some waves later, the same tiles' GEMM1 between them. So a part waits for none that comes
  /// after it, and not long for those before it, and results use the links all the time. But where
  /// GEMM1's parts are longer than GEMM0's, so that links have little to do, all of GEMM1 goes
  /// last: then all processors share the end of a call, which took up to 4.5 % off large calls of
  /// such layers.
  void hand_out_waves(u32 begin) const {
    const Geometry& geometry = rank_.geometry();
    const u32 end = plan_.tiles();
    const bool last = geometry.second_parts_are_longer();
    // So two GEMM0 parts for each processor lie between a tile's GEMM0 and its GEMM1.
    const u32 lag =
        last ? align_up(end - begin, kWave)
             : align_up(ceil_div(2 * geometry.processors, geometry.product0_parts), kWave);
    const bool swapped = MOEOS_PLANTED(second_gemms_come_first);
    for (u32 first = begin; first < end + lag; first += kWave) {
      hand_out_wave(product_kind(swapped ? 1 : 0), first);
      if (first >= begin + lag) {
        hand_out_wave(product_kind(swapped ? 0 : 1), first - lag);
      }
    }
  }

  /// Hands out one product's parts of a wave; the parts of a large expert's tiles alternate between
  /// the tiles, as in the scheduler (scheduler.hpp).
  void hand_out_wave(TaskKind kind, u32 first) const {
    const Geometry& geometry = rank_.geometry();
    const u32 tiles = plan_.tiles();
    if (first >= tiles) {
      return;
    }
    const u32 in_halves = kind == kSecondProduct.kind ? geometry.tiles_in_halves(tiles) : 0;
    const u32 left = minimum(tiles - first, kWave);
    const u32 tile = first + minimum(P::lane(), left - 1);
    const bool narrow = rank_.os.tile_facts[tile].narrow();
    const bool half_width = !narrow && tile + in_halves >= tiles;
    const ReadyWord word(call_.epoch, kind, tile, 0);
    const u32 parts = parts_of(geometry, kind, narrow || half_width);
    const u32 ends = P::inclusive_scan(P::lane() < left ? parts : 0);
    const u32 expert = rank_.os.tile_facts[tile].local_expert();
    const u32 together = P::alike(P::lane() < left ? expert << 1 | (half_width ? 1U : 0U) : kNone);
    hand_out(half_width ? word.cut_in_halves() : word, parts, ends, left, together);
  }

  /// Hands out all parts of `tiles` tiles, after a fence of each lane. Lane i has the word and the
  /// number of parts of the i-th tile; `ends`: the sum of these numbers up to and including its
  /// own; `together`, for large experts: the neighbouring lanes whose tiles take turns with this
  /// lane's tile, the first part of each, then the second.
  void hand_out(ReadyWord word, u32 parts, u32 ends, u32 tiles, u32 together) const {
    const u32 all = P::broadcast(ends, tiles - 1);
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, all);
#pragma unroll 1
    for (u32 done = 0; done < all; done += P::kLanes) {
      const u32 place = minimum(done + P::lane(), all - 1);
      const u32 owner = lane_with<P>(
          ends, MOEOS_PLANTED(first_parts_are_of_the_tile_before) ? maximum(place, 1U) - 1 : place);
      const bool turns = rank_.geometry().large_experts != 0;
      const u32 turn = turns ? P::broadcast(together, owner) : 0;
      const u32 first_tile = turns ? P::first_lane(turn) : owner;
      const u32 tiles_in_turn = turns ? P::count(turn) : 1;
      const u32 of_turn = place - P::broadcast(ends - parts, first_tile);
      const Turn its_turn = turn_at(of_turn, tiles_in_turn);
      const u32 tile = first_tile + (MOEOS_PLANTED(first_tile_has_all_turns) ? 0 : its_turn.tile);
      const ReadyWord its{P::broadcast(word.sealed(), tile)};
      if (first != kNone && done + P::lane() < all) {
        fill_ring_slot(rank_, first + place, its.with_part(its_turn.part));
      }
    }
  }

  /// Announces to the scheduler and to the returns subscribers, once, how the call is planned.
  void decide(Planned planned) {
    if (planned_ != Planned::unknown) {
      return;
    }
    planned_ = planned;
    P::sync_lanes();  // all slots above have been taken
    if (P::lane() == 0) {
      // Publishes that the slots above have been taken to the scheduler and to the returns
      // subscribers, which acquire this word: the slots that these take come after them.
      P::template store_release<Scope::block>(rank_.os.planned, static_cast<u32>(planned));
    }
  }

  /// Whether to wait for counts with which the call would be planned up front: for our own, which
  /// come when this rank is routed (no wait without a deadline: the watch ends steps without
  /// progress), and for others' only as long as it pays.
  bool counts_may_come() {
    // Relaxed: nothing is read because of it.
    if (agreed<P>(P::template load_relaxed<Scope::block>(&rank_.os.counts_known[rank_.rank])) !=
        call_.epoch) {
      return true;
    }
    const u64 now = agreed<P>(P::now_ns());
    counted_since_ = counted_since_ == 0 ? now : counted_since_;
    return now - counted_since_ <
           minimum(kCountsPatienceNs, rank_.deadline_ns / kPatiencesOfDeadline);
  }

  /// How many experts' incomplete remainders to pack now, because processors idle.
  u32 experts_to_pack(u32 wanted) {
    // The scheduler publishes one part ahead for each processor: if it wants more, some wait.
    if (wanted <= rank_.geometry().processors) {
      starving_since_ = 0;
      return 0;
    }
    const u64 now = agreed<P>(P::now_ns());
    if (starving_since_ == 0) {
      starving_since_ = now;
    }
    // Packing counts as progress, so it must not go on for long compared with a deadline: other
    // ranks wait for our news for as long as their deadline and a little more (grace_time.hpp).
    const u64 under_way = minimum(kPatienceUnderWayNs, rank_.deadline_ns / kPatiencesOfDeadline);
    if (now - starving_since_ < (flags_.all_watched() ? under_way : kPatienceNs)) {
      return 0;
    }
    starving_since_ = 0;
    const u32 experts = packed_at_once_;
    packed_at_once_ = minimum(packed_at_once_ * kPackGrowth, rank_.geometry().local_experts());
    return experts;
  }

  /// Posts the tiles that were planned since the last time. This warp alone posts Product0: a
  /// tile's slot in the mailbox has its number.
  void post_new_tiles() {
    const u32 planned = plan_.tiles();
    // Orders the descriptors, and the rows acquired above, before the words below; pairs with the
    // scheduler's poll of the mailbox.
    P::template publish_fence<Scope::device>();
    while (posted_ < planned) {
      const u32 tiles = minimum(planned - posted_, P::kLanes);
      if (P::lane() < tiles) {
        const u32 tile = posted_ + P::lane();
        const MailboxView mailbox = rank_.memory.mailbox(kFirstProduct.kind);
        MOEOS_CHECK(tile < mailbox.capacity);
        const bool narrow = rank_.os.tile_facts[tile].narrow();  // by whichever lane planned it
        const u32 parts = parts_of(rank_.geometry(), kFirstProduct.kind, narrow);
        P::template publish<Scope::device>(
            &mailbox.words[tile], ReadyWord(call_.epoch, kFirstProduct.kind, tile, parts).sealed());
      }
      note_first_tile();
      posted_ += tiles;
    }
  }

  const Rank<P>& rank_;
  const Call& call_;
  TilePlan<P> plan_;
  ChunkFlags<P> flags_;
  bool in_place_;                       // no rows come
  Planned planned_ = Planned::unknown;  // what has been announced
  Left left_ = Left::open;
  bool makes_tiles_ = false;  // it is decided that this subscriber makes tiles
  u32 posted_ = 0;            // tiles
  bool news_ = false;         // rows have come since tiles were made
  GraceTime<P> grace_time_;
  u64 counted_since_ = 0;  // when this rank's own counts were seen here
  u64 starving_since_ = 0;
  u32 packed_at_once_ = 1;  // experts, the next time
};

}  // namespace moeos
