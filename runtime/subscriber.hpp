// Algorithm 2: three warps that watch what peers write, and turn it into tasks.
//
//   CountsSubscriber    row counts   -> where each source's rows start; corrects the bound on this
//   call's rows ArrivalsSubscriber  chunk flags  -> row tiles (tile_plan.hpp), posted as Gemm0
//   ReturnsSubscriber   row credits  -> Combine tasks, one for each chunk that is back
//
// Each has step(), which looks once at its words and returns whether anything was new, and
// says in answer() what it still waits for. May not know: what a task computes; the ready
// ring.
#pragma once

#include "runtime/base.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"
#include "runtime/tile_plan.hpp"

namespace moeos {

template <Platform P>
class CountsSubscriber {
 public:
  /// Of several ranks that have not made this call, some may wait in the call before for the one
  /// that is late, and will say so: so wait for that as long after our deadline as theirs may end
  /// behind ours.
  static constexpr u64 kHearsayNsMost = 500'000'000;

  CountsSubscriber(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {}

  bool step() {
    const Geometry& geometry = rank_.geometry();
    bool progress = false;
    for (u32 source = 0; known_ < geometry.world && source < geometry.world; ++source) {
      if (rank_.os->counts_known[source] != call_.epoch) {  // this warp alone writes it
        progress = decode(source) || progress;
      }
    }
    return progress;
  }

  /// By one lane.
  Answer answer(Failure& failure) {
    const u32 late = missing(failure);
    if (late == 0) {
      const bool waited = asked_since_ != 0;
      asked_since_ = 0;
      return waited ? Answer::moot : Answer::nothing;
    }
    const u64 now = P::now_ns();
    asked_since_ = asked_since_ == 0 ? now : asked_since_;
    const u64 hearsay = late > 1 ? minimum(rank_.deadline_ns / 4, kHearsayNsMost) : 0;
    return now - asked_since_ < hearsay ? Answer::wait : Answer::missing;
  }

 private:
  /// How many ranks' counts have not come, and the first count that has not.
  u32 missing(Failure& failure) const {
    const Geometry& geometry = rank_.geometry();
    u32 late = 0;
    for (u32 source = 0; source < geometry.world; ++source) {
      for (u32 expert = 0; expert < geometry.local_experts(); ++expert) {
        const u64 word = look(source, expert);
        if (static_cast<u32>(word >> 32) == call_.epoch) {
          continue;
        }
        if (late == 0) {
          failure.kind = FailureKind::counts_late;
          failure.peer = source;
          failure.expert = expert;
          failure.expected = call_.epoch;
          failure.seen = word >> 32;
        }
        ++late;
        break;
      }
    }
    return late;
  }

  u64 look(u32 source, u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.count(call_.epoch, source, expert))));
  }

  /// Reads a source's counts if they are all here.
  bool decode(u32 source) {
    const Geometry& geometry = rank_.geometry();
    const u32 experts = geometry.local_experts();
    u32* starts = rank_.os->receive_starts(source);
    u32* shared_starts = rank_.memory.receive_starts(source);
    u32 start = 0;
    for (u32 first = 0; first < experts; first += P::kLanes) {
      const u32 expert = first + P::lane();
      const u64 word = expert < experts ? look(source, expert) : u64{call_.epoch} << 32;
      const u32 epoch = static_cast<u32>(word >> 32);
      if (P::ballot(epoch != call_.epoch) != 0) {
        if (epoch > call_.epoch) {  // nobody can be so far ahead
          reject(FailureKind::count_damaged, source, expert, word);
        }
        return false;
      }
      const u32 rows = static_cast<u32>(word);
      if (P::ballot(rows > geometry.capacity) != 0) {
        if (rows > geometry.capacity) {
          reject(FailureKind::count_too_large, source, expert, rows);
        }
        return false;
      }
      const u32 inclusive = P::inclusive_scan(rows);
      if (expert < experts) {
        starts[expert] = start + inclusive - rows;
        shared_starts[expert] = start + inclusive - rows;
      }
      start += P::broadcast(inclusive, P::kLanes - 1);
    }
    if (start > geometry.cell_rows_used()) {
      reject(FailureKind::count_too_large, source, kNone, start);
      return false;
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      starts[experts] = start;
      shared_starts[experts] = start;
      // Algorithm 2, SelfCorrectTaskBound: the bound counted this source's cell as full. Relaxed:
      // the scheduler compares a number; nothing is read because of it.
      const u32 bound = P::template load_relaxed<Scope::block>(rank_.os->rows_expected);
      P::template store_relaxed<Scope::block>(rank_.os->rows_expected,
                                              bound - (geometry.cell_rows_used() - start));
      // Publishes receive_starts(source) to the arrivals subscriber, which acquires this word.
      P::template store_release<Scope::block>(&rank_.os->counts_known[source], call_.epoch);
    }
    P::sync_lanes();
    ++known_;
    return true;
  }

  void reject(FailureKind kind, u32 source, u32 expert, u64 seen) const {
    Failure failure = failure_of(rank_, call_, kind, Actor::subscriber);
    failure.peer = source;
    failure.expert = expert;
    failure.expected =
        expert == kNone ? rank_.geometry().cell_rows_used() : rank_.geometry().capacity;
    failure.seen = seen;
    rank_.fail(failure);
  }

  const Rank<P>& rank_;
  const Call& call_;
  u32 known_ = 0;
  u64 asked_since_ = 0;  // the one lane's; 0: not asked
};

template <Platform P>
class ArrivalsSubscriber {
 public:
  /// How long processors must have had nothing to do before incomplete remainders are packed.
  /// Shorter would split tiles that are about to fill; longer would leave processors idle for a
  /// straggler's rows.
  static constexpr u64 kPatienceNs = 20'000;

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
    progress = progress || pack_for_idle_processors();
    post_new_tiles();
    return progress;
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
  /// on. Each has an equal share of the lanes, and so of the flags that one look covers.
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
    const u32 chunk = before + P::lane() % share;
    const u32 epoch = chunk < ceil_div(rows, geometry.chunk_rows)
                          ? open(P::template poll<Scope::system>(
                                rank_.template here<u32>(rank_.layout.arrived(source, chunk))))
                          : 0;
    if (epoch > call_.epoch + 1) {  // a peer is one call ahead at most
      reject(source, chunk, epoch);
    }
    const bool here = epoch == call_.epoch;
    const u32 arrived = P::ballot(here);
    if (P::ballot(first_look || (here && chunk == before)) == 0) {
      return false;
    }
    // Pairs with send_chunk: the rows of these chunks are here, for us and for whoever acquires the
    // tiles below.
    P::template acquire_fence<Scope::system>();
    P::sync_lanes();  // all lanes have read the prefixes
    if (known && P::lane() % share == 0) {
      u32 chunks = 0;
      while (chunks < share && (arrived >> (P::lane() + chunks) & 1U) != 0) {
        ++chunks;
      }
      rank_.os->chunk_prefix[source] = before + chunks;
      rank_.os->rows_arrived[source] = minimum((before + chunks) * geometry.chunk_rows, rows);
    }
    P::sync_lanes();
    plan_.advance();
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

  bool pack_for_idle_processors() {
    const u32 starving = P::template load_relaxed<Scope::block>(rank_.os->starving);
    if (agreed<P>(starving) == 0) {
      starving_since_ = 0;
      return false;
    }
    const u64 now = agreed<P>(P::now_ns());
    if (starving_since_ == 0) {
      starving_since_ = now;
    }
    if (now - starving_since_ < kPatienceNs) {
      return false;
    }
    starving_since_ = 0;
    return plan_.pack_early();
  }

  /// Posts the tiles that were planned since the last time. This warp alone posts Gemm0, so a
  /// tile's slot in the mailbox is its number.
  void post_new_tiles() {
    const u32 planned = plan_.tiles();
    if (planned == posted_) {
      return;
    }
    const MailboxView mailbox = rank_.memory.mailbox(TaskKind::gemm0);
    const u32 first_task = rank_.memory.first_task(TaskKind::gemm0);
    // Orders the descriptors, and the rows acquired above, before the words below; pairs with the
    // scheduler's poll of the mailbox.
    P::template publish_fence<Scope::device>();
    for (u32 tile = posted_ + P::lane(); tile < planned; tile += P::kLanes) {
      MOEOS_CHECK(tile < mailbox.capacity);
      const u32 task = first_task + tile;
      const u32 parts = rank_.memory.tasks[task].parts;  // by whichever lane planned it
      P::template publish<Scope::device>(
          &mailbox.words[tile], ReadyWord(call_.epoch, TaskKind::gemm0, task, parts).sealed());
    }
    posted_ = planned;
  }

  const Rank<P>& rank_;
  const Call& call_;
  TilePlan<P> plan_;
  u32 posted_ = 0;
  u64 starving_since_ = 0;
};

template <Platform P>
class ReturnsSubscriber {
 public:
  /// Words of credit that a lane asks for at once.
  static constexpr u32 kLooks = 8;

  ReturnsSubscriber(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {
    const Geometry& geometry = rank.geometry();
    for (u32 i = P::lane(); i < geometry.world * geometry.chunks(); i += P::kLanes) {
      rank.os->chunk_combined[i] = 0;
    }
    for (u32 p = P::lane(); p < geometry.world; p += P::kLanes) {
      rank.os->first_uncombined[p] = 0;
    }
    P::sync_lanes();
  }

  bool step() {
    if (!routed_) {
      // Pairs with RouteFinish: how many rows we sent to each peer.
      routed_ = agreed<P>(P::template load_acquire<Scope::device>(
                    &rank_.memory.call(call_.epoch).routed.value)) != 0;
      if (!routed_) {
        return false;
      }
    }
    bool progress = false;
    for (u32 peer = 0; peer < rank_.geometry().world; ++peer) {
      progress = watch(peer) || progress;
    }
    return progress;
  }

  /// Missing is the first chunk of ours that is not back. Nothing is as long as our own processors
  /// have not sent all of them: then it is not the peers who are late.
  Answer answer(Failure& failure) const {
    if (!routed_ || !all_sent()) {
      return Answer::nothing;
    }
    for (u32 peer = 0; peer < rank_.geometry().world; ++peer) {
      const u32 chunk = rank_.os->first_uncombined[peer];
      const u32 rows = rows_in_chunk(rank_.geometry(), rank_.memory.rows_sent(peer), chunk);
      if (rows > 0) {
        failure.kind = FailureKind::returns_late;
        failure.peer = peer;
        failure.chunk = chunk;
        failure.expected = rows;
        failure.seen = open(P::template load_relaxed<Scope::system>(credit(peer, chunk)));
        return Answer::missing;
      }
    }
    return Answer::nothing;
  }

 private:
  bool all_sent() const {
    u32 chunks = 0;
    for (u32 peer = 0; peer < rank_.geometry().world; ++peer) {
      chunks += ceil_div(rank_.memory.rows_sent(peer), rank_.geometry().chunk_rows);
    }
    // Relaxed: a number is compared.
    return P::template load_relaxed<Scope::device>(
               &rank_.memory.call(call_.epoch).dispatch_parts_done.value) == chunks;
  }

  u32* credit(u32 peer, u32 chunk) const {
    return rank_.template here<u32>(rank_.layout.returned(peer, chunk));
  }

  /// Looks at all chunks of a peer that are not back; they come in any order.
  bool watch(u32 peer) {
    const u32 chunks = ceil_div(rank_.memory.rows_sent(peer), rank_.geometry().chunk_rows);
    const u8* combined = rank_.os->chunk_combined + u64{peer} * rank_.geometry().chunks();
    u32& first = rank_.os->first_uncombined[peer];
    bool progress = false;
    for (u32 base = first; base < chunks; base += P::kLanes * kLooks) {
      progress = look(peer, base, chunks) || progress;
    }
    u32 now = first;
    while (now < chunks && combined[now] != 0) {
      ++now;
    }
    P::sync_lanes();  // all lanes have read it
    if (P::lane() == 0) {
      first = now;
    }
    P::sync_lanes();
    return progress;
  }

  /// One look at P::kLanes * kLooks chunks from `base` on: all words are asked for before the first
  /// is used.
  bool look(u32 peer, u32 base, u32 chunks) {
    const Geometry& geometry = rank_.geometry();
    const u32 rows_sent = rank_.memory.rows_sent(peer);
    u8* combined = rank_.os->chunk_combined + u64{peer} * geometry.chunks();
    u32 back[kLooks];
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 chunk = base + i * P::kLanes + P::lane();
      back[i] = chunk < chunks && combined[chunk] == 0
                    ? open(P::template poll<Scope::system>(credit(peer, chunk)))
                    : 0;
    }
    u32 complete = 0;  // bit i: this lane's i-th chunk is back
    u32 too_many = 0;  // rows of a chunk that got more than it sent
    u32 damaged = kNone;
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 chunk = base + i * P::kLanes + P::lane();
      const u32 rows = rows_in_chunk(geometry, rows_sent, chunk);
      complete |= back[i] > 0 && back[i] == rows ? 1U << i : 0;
      if (back[i] > rows) {
        too_many = back[i];
        damaged = chunk;
      }
    }
    if (damaged != kNone) {
      reject(peer, damaged, rows_in_chunk(geometry, rows_sent, damaged), too_many);
    }
    if (P::ballot(complete != 0) == 0) {
      return false;
    }
    // Pairs with return_rows: the results of these chunks are here.
    P::template acquire_fence<Scope::system>();
    for (u32 i = 0; i < kLooks; ++i) {
      const bool mine = (complete >> i & 1U) != 0;
      const u32 chunk = base + i * P::kLanes + P::lane();
      if (P::ballot(mine) != 0) {
        post_combine(peer, chunk, mine);
      }
      if (mine) {
        combined[chunk] = 1;
      }
    }
    P::sync_lanes();
    return true;
  }

  void reject(u32 peer, u32 chunk, u32 rows, u32 back) const {
    Failure failure = failure_of(rank_, call_, FailureKind::returns_too_many, Actor::subscriber);
    failure.peer = peer;
    failure.chunk = chunk;
    failure.expected = rows;
    failure.seen = back;
    rank_.fail(failure);
  }

  /// Posts the Combine tasks of the lanes whose chunk is back: one ticket and one fence for all.
  void post_combine(u32 peer, u32 chunk, bool mine) {
    const u32 place = P::inclusive_scan(mine ? 1 : 0);
    const u32 count = P::broadcast(place, P::kLanes - 1);
    const u32 task = rank_.memory.combine_task(peer, chunk);
    if (mine) {
      // Ready for the next call. The peer adds to it again only after rows of our next call have
      // reached it, and those are published by releases that follow this call's end.
      P::template store_relaxed<Scope::system>(credit(peer, chunk), 0U);
      make_row_task(rank_.memory.tasks[task], TaskKind::combine, 1, call_.epoch, peer, chunk);
    }
    u32 first = 0;
    if (P::lane() == 0) {
      first = reserve_slots(rank_, call_, TaskKind::combine, count, Actor::subscriber);
    }
    first = P::broadcast(first, 0);
    if (first == kNone) {
      return;
    }
    // Orders the descriptors, and the rows acquired above, before the words below; pairs with the
    // scheduler's poll of the mailbox.
    P::template publish_fence<Scope::device>();
    if (mine) {
      P::template publish<Scope::device>(
          &rank_.memory.mailbox(TaskKind::combine).words[first + place - 1],
          ReadyWord(call_.epoch, TaskKind::combine, task, 1).sealed());
    }
  }

  const Rank<P>& rank_;
  const Call& call_;
  bool routed_ = false;
};

}  // namespace moeos
