// The subscriber of chunk flags: arrived rows become row tiles (tile_plan.hpp), handed out as Gemm0
// as far as processors wait for them, and else posted to the scheduler.
//
// One of the warps of Algorithm 2 that watch what peers write: step() looks once at its words and
// returns whether anything was new, and answer() says what it still waits for. May not know: what a
// task computes.
#pragma once

#include "runtime/base.hpp"
#include "runtime/memory.hpp"
#include "runtime/rank.hpp"
#include "runtime/ring.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"
#include "runtime/tile_plan.hpp"

namespace moeos {

template <Platform P>
class ArrivalsSubscriber {
 public:
  /// How long processors must have had nothing to do before incomplete remainders are packed.
  /// Shorter would split tiles that are about to fill; longer would leave processors idle for a
  /// straggler's rows.
  static constexpr u64 kPatienceNs = 20'000;
  /// The same when all counts are here: then nobody is late, and what is missing is under way. A
  /// tile that is split reads its weights twice, which costs as much as a long wait.
  static constexpr u64 kPatienceUnderWayNs = 200'000;
  /// And never more than such a share of the deadline: one expert after the other is packed so.
  static constexpr u32 kPatiencesOfDeadline = 32;
  /// Then one expert's are. Each time that processors have nothing to do again and nothing has
  /// arrived, so many times as many: a rank that is that late is not about to fill a tile.
  static constexpr u32 kPackGrowth = 4;
  /// Flags that a lane asks for at once.
  static constexpr u32 kLooks = 8;

  ArrivalsSubscriber(const Rank<P>& rank, const Call& call)
      : rank_(rank), call_(call), plan_(rank.layout, rank.memory, *rank.os) {
    plan_.begin(call.epoch);
    for (u32 source = P::lane(); source < rank.geometry().world; source += P::kLanes) {
      rank.os->chunk_prefix[source] = kUndecoded;
    }
    P::sync_lanes();
  }

  bool step() {
    bool progress = false;
    const u32 world = rank_.geometry().world;
    const u32 at_once = minimum(world, P::kLanes);
    for (u32 first = 0; first < world; first += at_once) {
      progress = watch(first, minimum(at_once, world - first)) || progress;
    }
    if (progress) {
      packed_at_once_ = 1;
      starving_since_ = 0;  // something moves
    }
    // Relaxed: a hint, which may be older than what was posted last; then large experts' weights
    // are read twice for nothing, which is rare and costs little.
    const u32 wanted = agreed<P>(P::template load_relaxed<Scope::block>(rank_.os->wanted));
    const u32 early = progress ? 0 : experts_to_pack(wanted);
    const bool planned = plan_.advance(progress, wanted, early);
    if (planned) {
      post_new_tiles(wanted);
    }
    if (progress && plan_.complete() && P::lane() == 0) {
      // Relaxed: a number by which the scheduler chooses how parts are cut.
      P::template store_relaxed<Scope::block>(rank_.os->tiles_made, 1 + posted_);
    }
    return progress || planned;
  }

  /// Missing is the first chunk that was announced and has not come.
  Answer answer(Failure& failure) const {
    for (u32 source = 0; source < rank_.geometry().world; ++source) {
      const u32 prefix = rank_.os->chunk_prefix[source];
      if (prefix == kUndecoded ||
          prefix * rank_.geometry().chunk_rows < rank_.os->rows_received(source)) {
        failure.kind = FailureKind::rows_late;
        failure.peer = source;
        failure.chunk = prefix == kUndecoded ? 0 : prefix;
        failure.expected = rank_.os->rows_received(source);
        failure.seen = prefix == kUndecoded ? 0 : u64{prefix} * rank_.geometry().chunk_rows;
        return Answer::missing;
      }
    }
    return Answer::nothing;
  }

 private:
  static constexpr u32 kUndecoded =
      kNone;  // as chunk_prefix: the source's counts are not known yet

  /// Advances the prefixes of chunks that have arrived from `sources` sources, from `first_source`
  /// on. Each has an equal share of the lanes, and `kLooks` times as many flags are looked at.
  bool watch(u32 first_source, u32 sources) {
    const Geometry& geometry = rank_.geometry();
    const u32 share = P::kLanes / sources;
    const u32 turn = P::lane() / share;
    const u32 source = first_source + minimum(turn, sources - 1);
    // Pairs with CountsSubscriber::decode: receive_starts(source) is this call's.
    const bool known = turn < sources && P::template load_acquire<Scope::block>(
                                             &rank_.os->counts_known[source]) == call_.epoch;
    const bool first_look = known && rank_.os->chunk_prefix[source] == kUndecoded;
    const u32 before = !known || first_look ? 0 : rank_.os->chunk_prefix[source];
    const u32 rows = known ? rank_.os->rows_received(source) : 0;
    const u32 chunks = ceil_div(rows, geometry.chunk_rows);
    const u32 first = before + P::lane() % share;
    // Asked for together, in one round trip, and so without conditions: where there is no chunk, at
    // another one's flag.
    u32 epochs[kLooks];
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 chunk = minimum(first + i * share, maximum(chunks, 1U) - 1);
      epochs[i] = P::template poll<Scope::system>(
          rank_.template here<u32>(rank_.layout.arrived(source, chunk)));
    }
    u32 here = 0;  // bit i: this lane's i-th chunk
    u32 ahead = kNone;
    u32 seen = 0;
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 epoch = first + i * share < chunks ? open(epochs[i]) : 0;
      here |= epoch == call_.epoch ? 1U << i : 0;
      const bool wrong = epoch > call_.epoch + 1;  // a peer is one call ahead at most
      ahead = wrong ? first + i * share : ahead;
      seen = wrong ? epoch : seen;
    }
    if (ahead != kNone) {
      reject(source, ahead, seen);
    }
    const u32 of_source = share == 32 ? ~0U : (1U << share) - 1;
    u32 arrived = 0;  // chunks of this lane's source, in order
    bool in_order = true;
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 lanes = P::ballot((here >> i & 1U) != 0) >> (turn * share % P::kLanes);
      const u32 missing = ~lanes & of_source;
      arrived += !in_order ? 0 : missing == 0 ? share : P::first_lane(missing);
      in_order = in_order && missing == 0;
    }
    if (P::ballot(first_look || arrived > 0) == 0) {
      return false;
    }
    // Pairs with send_chunk: the rows of these chunks are here, for us and for whoever acquires
    // the tiles below.
    P::template acquire_fence<Scope::system>();
    P::sync_lanes();  // all lanes have read the prefixes
    if (known && P::lane() % share == 0) {
      if (arrived > 0) {
        rank_.memory.peer_records[source].rows_ns = P::now_ns();
      }
      rank_.os->chunk_prefix[source] = before + arrived;
      rank_.os->rows_arrived[source] = minimum((before + arrived) * geometry.chunk_rows, rows);
    }
    P::sync_lanes();
    return true;
  }

  void reject(u32 source, u32 chunk, u32 epoch) const {
    Failure failure = failure_of(rank_, call_, FailureKind::flag_damaged, Actor::subscriber);
    failure.peer = source;
    failure.chunk = chunk;
    failure.expected = call_.epoch;
    failure.seen = epoch;
    rank_.fail(failure);
  }

  /// Whether the counts of all sources are here.
  bool everyone_counted() const {
    bool missing = false;
    for (u32 source = P::lane(); source < rank_.geometry().world; source += P::kLanes) {
      missing = missing || rank_.os->chunk_prefix[source] == kUndecoded;  // by this warp alone
    }
    return P::ballot(missing) == 0;
  }

  /// Of how many experts incomplete remainders are to be packed now, because processors idle.
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
    // Packing counts as progress, so it must not go on for long beside a deadline: other ranks wait
    // for news of us as long as theirs and a little more (CountsSubscriber::answer).
    const u64 under_way = minimum(kPatienceUnderWayNs, rank_.deadline_ns / kPatiencesOfDeadline);
    if (now - starving_since_ < (everyone_counted() ? under_way : kPatienceNs)) {
      return 0;
    }
    starving_since_ = 0;
    const u32 experts = packed_at_once_;
    packed_at_once_ = minimum(packed_at_once_ * kPackGrowth, rank_.geometry().local_experts());
    return experts;
  }

  /// Posts the tiles that were planned since the last time. This warp alone posts Gemm0, and
  /// numbers its slots in the mailbox. `wanted`: so many parts processors wait for.
  void post_new_tiles(u32 wanted) {
    const u32 planned = plan_.tiles();
    if (posted_ == 0 && P::lane() == 0) {
      rank_.memory.record->first_tile_ns = P::now_ns();
    }
    // Orders the descriptors, and the rows acquired above, before the words below; pairs with the
    // scheduler's poll of the mailbox, or with Processor::claim.
    P::template publish_fence<Scope::device>();
    while (posted_ < planned) {
      const u32 tiles = minimum(planned - posted_, P::kLanes);
      const u32 task = rank_.memory.first_task(TaskKind::gemm0) + posted_;
      // By whichever lane planned it.
      const u32 parts =
          P::lane() < tiles
              ? rank_.geometry().gemm0_parts_of(rank_.os->tile_facts[posted_ + P::lane()].narrow())
              : 0;
      const u32 handed = hand_out_first(task, parts, tiles, wanted);
      if (P::lane() >= handed && P::lane() < tiles) {
        const u32 slot = in_mailbox_ + P::lane() - handed;
        const MailboxView mailbox = rank_.memory.mailbox(TaskKind::gemm0);
        MOEOS_CHECK(slot < mailbox.capacity);
        P::template publish<Scope::device>(
            &mailbox.words[slot],
            ReadyWord(call_.epoch, TaskKind::gemm0, task + P::lane(), parts).sealed());
      }
      in_mailbox_ += tiles - handed;
      posted_ += tiles;
    }
  }

  /// Hands out the first of some tiles itself, as many as processors wait for: they need no order
  /// then, and the scheduler's sweep would come a microsecond or two later. Not of large experts,
  /// whose tiles are to be computed by turns. Lane i has the parts of the i-th tile; returns how
  /// many tiles, and leaves in `wanted` what tiles behind them may have.
  u32 hand_out_first(u32 first_task, u32 parts, u32 tiles, u32& wanted) const {
    const u32 ends = P::inclusive_scan(parts);
    const bool fits = P::lane() < tiles && ends <= wanted;
    const u32 handed = rank_.geometry().large_experts != 0 ? 0 : P::count(P::ballot(fits));
    const u32 all = handed == 0 ? 0 : P::broadcast(ends, handed - 1);
    wanted = handed < tiles ? 0 : wanted - all;
    if (handed == 0) {
      return 0;
    }
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, all);
    for (u32 done = 0; done < all; done += P::kLanes) {
      const u32 place = minimum(done + P::lane(), all - 1);
      const u32 tile = lane_with<P>(ends, place);
      const u32 part = place - P::broadcast(ends - parts, tile);
      if (first != kNone && done + P::lane() < all) {
        fill_ring_slot(rank_, first + place,
                       ReadyWord(call_.epoch, TaskKind::gemm0, first_task + tile, part));
      }
    }
    return handed;
  }

  const Rank<P>& rank_;
  const Call& call_;
  TilePlan<P> plan_;
  u32 posted_ = 0;      // tiles
  u32 in_mailbox_ = 0;  // of these; the others have been handed out
  u64 starving_since_ = 0;
  u32 packed_at_once_ = 1;  // experts, the next time
};

}  // namespace moeos
