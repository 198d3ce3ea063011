// Algorithm 2: warps that watch what peers write, and turn it into tasks.
//
//   CountsSubscriber    row counts -> where each source's rows start; the bound on this call's rows
//   ArrivalsSubscriber  chunk flags -> row tiles (tile_plan.hpp): handed out as Gemm0 as far as
//                       processors wait for them, and else posted to the scheduler
//   ReturnsSubscriber   row credits -> tokens that are complete, handed out as Combine
//
// Of the last there are P::kReturnsSubscribers, each with a share of every peer's chunks, since a
// call ends with all of its rows coming back.
//
// Each has step(), which looks once at its words and returns whether anything was new, and
// says in answer() what it still waits for. May not know: what a task computes.
#pragma once

#include "runtime/base.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/rank.hpp"
#include "runtime/ring.hpp"
#include "runtime/row_tasks.hpp"
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
      // Before the arrivals subscriber may note the first rows.
      PeerRecord& record = rank_.memory.peer_records[source];
      record.counts_ns = P::now_ns();
      // Relaxed: a number to be reported.
      record.rows_returned = P::template load_relaxed<Scope::device>(
          &rank_.memory.call(call_.epoch).rows_returned.value);
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

template <Platform P>
class ReturnsSubscriber {
 public:
  /// Words of credit that a lane asks for at once.
  static constexpr u32 kLooks = 4;
  /// Chunks that are found before they are counted, at most.
  static constexpr u32 kFoundMost = 4 * P::kLanes * kLooks;
  static_assert(kFoundMost <= OsMemory::kFoundMost);
  /// Chunks whose rows are counted together, so that their pairs come from memory in one round
  /// trip.
  static constexpr u32 kChunksAtOnce = 4;
  /// Chunks after which the tokens that they have completed are handed out, while others are
  /// counted.
  static constexpr u32 kChunksAHandOut = 32;
  static_assert(kChunksAHandOut % kChunksAtOnce == 0);

  /// `index`: which of P::kReturnsSubscribers warps.
  ReturnsSubscriber(const Rank<P>& rank, const Call& call, u32 index)
      : rank_(rank),
        call_(call),
        index_(index),
        chunks_awaited_(rank.os->awaited_by(index, P::kReturnsSubscribers)),
        chunks_found_(rank.os->chunks_found + u64{index} * OsMemory::kFoundMost),
        first_ready_(index * rank.geometry().max_tokens) {
    static_assert(P::kReturnsSubscribers >= 1 && P::kReturnsSubscribers <= kReturnsSubscribersMax);
    constexpr u32 kStride = P::kLanes * P::kReturnsSubscribers;
    const OsMemory& os = *rank.os;
    for (u32 i = index * P::kLanes + P::lane(); i * OsMemory::kTokensPerWord < call.tokens;
         i += kStride) {
      os.rows_back[i] = 0;
    }
    P::sync_lanes();
    if (P::lane() == 0) {
      // Publishes what this warp has cleared to the others (everyone_ready).
      P::template add_release<Scope::block>(os.returns_ready, 1U);
    }
  }

  bool step() {
    if (!routed_) {
      if (!everyone_ready() || !learn_rows()) {
        return false;
      }
      routed_ = true;
      await_chunks();
    }
    bool progress = false;
    u32 first = 0;
    u32 kept = 0;
    do {
      for (; first < awaited_ && found_ + kLooksOfAll <= kFoundMost; first += kLooksOfAll) {
        kept = look(first, kept);
      }
      progress = take_in() || progress;
    } while (first < awaited_);
    awaited_ = kept;
    return progress;
  }

  /// Missing is the first of this warp's chunks that is not back. Nothing is as long as our own
  /// processors have not sent all of them: then it is not the peers who are late.
  Answer answer(Failure& failure) const {
    if (!routed_ || !all_sent() || awaited_ == 0) {
      return Answer::nothing;
    }
    const SentChunk chunk = chunks_awaited_[0];
    failure.kind = FailureKind::returns_late;
    failure.peer = peer_of(chunk);
    failure.chunk = chunk_of(chunk);
    failure.expected = chunk.rows();
    failure.seen = open(P::template load_relaxed<Scope::system>(credit(chunk)));
    return Answer::missing;
  }

 private:
  static constexpr u32 kLooksOfAll = P::kLanes * kLooks;

  /// Whether what all returns subscribers count in has been cleared.
  bool everyone_ready() const {
    // Pairs with the constructors.
    return P::kReturnsSubscribers == 1 ||
           agreed<P>(P::template load_acquire<Scope::block>(rank_.os->returns_ready)) ==
               P::kReturnsSubscribers;
  }

  /// Learns how many rows we sent to each peer, and each token to all of them; true once that is
  /// known. The latter is counted by the Combine of tokens that sent none, which is handed out
  /// here.
  bool learn_rows() {
    const CallState& state = rank_.memory.call(call_.epoch);
    if (agreed<P>(P::template poll<Scope::device>(&state.routed.value)) == 0) {
      return false;
    }
    if (combines_unsent(call_)) {
      hand_out_unsent();
      if (agreed<P>(P::template poll<Scope::device>(&state.token_rows_known.value)) !=
          route_blocks(rank_.geometry(), call_)) {
        return false;
      }
    }
    // Pairs with finish_routing: how many rows we sent to each peer; and with Processor::complete:
    // token_rows. Not at every look: a fence costs more than the look.
    P::template acquire_fence<Scope::device>();
    return true;
  }

  /// The first returns subscriber, once: hands out the Combine of tokens that sent no row.
  void hand_out_unsent() {
    if (index_ != 0 || unsent_handed_out_) {
      return;
    }
    unsent_handed_out_ = true;
    // Pairs with finish_routing, for the descriptor and the routing map, and publishes them to the
    // processors.
    P::template relay_fence<Scope::device>();
    hand_out(rank_.memory.first_task(TaskKind::combine), route_blocks(rank_.geometry(), call_));
  }

  /// Hands out all parts of a Combine task. Behind a fence of each lane.
  void hand_out(u32 task, u32 parts) const {
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, parts);
    for (u32 part = P::lane(); first != kNone && part < parts; part += P::kLanes) {
      fill_ring_slot(rank_, first + part, ReadyWord(call_.epoch, TaskKind::combine, task, part));
    }
  }

  bool all_sent() const {
    const CallState& state = rank_.memory.call(call_.epoch);
    // Relaxed: numbers are compared.
    return P::template load_relaxed<Scope::device>(&state.dispatch_parts_done.value) + 1 ==
           P::template load_relaxed<Scope::device>(&state.routed.value);
  }

  u32 peer_of(SentChunk chunk) const { return chunk.number() / rank_.geometry().chunks(); }
  u32 chunk_of(SentChunk chunk) const { return chunk.number() % rank_.geometry().chunks(); }
  u32* credit(SentChunk chunk) const {
    return rank_.template here<u32>(rank_.layout.returned(peer_of(chunk), chunk_of(chunk)));
  }

  // A token's rows are counted in half a word of OsMemory::rows_back.
  static constexpr u32 kRowsBackBits = 32 / OsMemory::kTokensPerWord;
  static constexpr u32 kRowsBackMask = (1U << kRowsBackBits) - 1;
  static constexpr u32 rows_back_shift(u32 token) {
    return token % OsMemory::kTokensPerWord * kRowsBackBits;
  }

  /// Lists this warp's chunks: of all that we send, counted through all peers, every
  /// P::kReturnsSubscribers-th.
  void await_chunks() {
    const Geometry& geometry = rank_.geometry();
    constexpr u32 kWarps = P::kReturnsSubscribers;
    u32 before = 0;  // chunks to the peers before
    for (u32 first_peer = 0; first_peer < geometry.world; first_peer += P::kLanes) {
      // All peers' at once: one round trip to memory.
      const u32 rows_of_lane =
          rank_.memory.rows_sent(minimum(first_peer + P::lane(), geometry.world - 1));
      const u32 end = minimum(P::kLanes, geometry.world - first_peer);
#pragma unroll 1
      for (u32 i = 0; i < end; ++i) {
        const u32 rows = P::broadcast(rows_of_lane, i);
        const u32 chunks = ceil_div(rows, geometry.chunk_rows);
        const u32 first = (index_ + kWarps - before % kWarps) % kWarps;
        const u32 mine = first < chunks ? ceil_div(chunks - first, kWarps) : 0;
        for (u32 n = P::lane(); n < mine; n += P::kLanes) {
          const u32 chunk = first + n * kWarps;
          chunks_awaited_[awaited_ + n] = SentChunk((first_peer + i) * geometry.chunks() + chunk,
                                                    rows_in_chunk(geometry, rows, chunk));
        }
        awaited_ += mine;
        before += chunks;
      }
    }
    MOEOS_CHECK(before <= geometry.chunks_sent_max());
    P::sync_lanes();
  }

  /// Looks at kLooksOfAll of the chunks that are awaited, from place `first` on; they come in any
  /// order. Those that are back become found ones, and the others are listed from place `kept` on,
  /// which is not behind `first`; returns the place behind them.
  u32 look(u32 first, u32 kept) {
    // All words are asked for before the first is used, and so without conditions.
    SentChunk chunk[kLooks];
    u32 back[kLooks];
    for (u32 i = 0; i < kLooks; ++i) {
      chunk[i] = chunks_awaited_[minimum(first + i * P::kLanes + P::lane(), awaited_ - 1)];
      back[i] = P::template poll<Scope::system>(credit(chunk[i]));
    }
    u32 complete = 0;  // bit i: this lane's i-th chunk is back
    SentChunk damaged;
    u32 too_many = 0;  // rows of that one, more than it has
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 rows = open(back[i]);
      const bool awaited = first + i * P::kLanes + P::lane() < awaited_;
      complete |= awaited && rows == chunk[i].rows() ? 1U << i : 0;
      const bool wrong = awaited && rows > chunk[i].rows();
      damaged = wrong ? chunk[i] : damaged;
      too_many = wrong ? rows : too_many;
    }
    if (too_many != 0) {
      reject(damaged, too_many);
    }
    if (P::ballot(complete != 0) == 0 && kept == first) {
      return minimum(first + kLooksOfAll, awaited_);
    }
    P::sync_lanes();  // all lanes have read the places that are written now
    for (u32 i = 0; i < kLooks && first + i * P::kLanes < awaited_; ++i) {
      const bool awaited = first + i * P::kLanes + P::lane() < awaited_;
      const bool found = (complete >> i & 1U) != 0;
      const u32 all_found = P::ballot(found);
      const u32 all_kept = P::ballot(awaited && !found);
      if (found) {
        chunks_found_[found_ + P::lanes_before(all_found)] = chunk[i];
      } else if (awaited) {
        chunks_awaited_[kept + P::lanes_before(all_kept)] = chunk[i];
      }
      found_ += P::count(all_found);
      kept += P::count(all_kept);
    }
    P::sync_lanes();  // the lists are whole for whoever looks next
    return kept;
  }

  /// Counts the rows of all chunks that were found, behind one fence, and posts the tokens that
  /// they complete.
  bool take_in() {
    if (found_ == 0) {
      return false;
    }
    // Pairs with return_rows: the results of these chunks are here ...
    P::template acquire_fence<Scope::system>();
    if (P::kReturnsSubscribers > 1) {
      // ... and, by way of rows_back, for the warp that counts a token's last row.
      P::template publish_fence<Scope::block>();
    }
    P::sync_lanes();
    const u64 now = P::now_ns();
    for (u32 i = P::lane(); i < found_; i += P::kLanes) {
      const SentChunk chunk = chunks_found_[i];
      // Ready for the next call. The peer adds to it again only after rows of our next call have
      // reached it, and those are published by releases that follow this call's end.
      P::template store_relaxed<Scope::system>(credit(chunk), 0U);
      rank_.memory.peer_records[peer_of(chunk)].results_ns = now;  // nearly the same by several
    }
    for (u32 first = 0; first < found_; first += kChunksAHandOut) {
      const u32 end = minimum(first + kChunksAHandOut, found_);
      for (u32 row = P::lane(); row < rank_.geometry().chunk_rows; row += P::kLanes) {
        count_rows(row, first, end);
      }
      // At most one task for each chunk (Geometry::combine_tasks_max).
      hand_out_complete();
    }
    P::sync_lanes();  // all lanes have read what was found
    found_ = 0;
    return true;
  }

  /// Some chunks' rows, one row of each a lane.
  struct Rows {
    u32 pair[kChunksAtOnce];
    u32 exist;  // bit n: pair[n] is one
  };

  /// Asks for the pairs that row `row` of the found chunks from place `first` on carries, of those
  /// before place `end`. Nothing is conditional, so that all loads are under way together.
  Rows ask(u32 row, u32 first, u32 end) const {
    Rows rows;
    rows.exist = 0;
    for (u32 n = 0; n < kChunksAtOnce; ++n) {
      const SentChunk found = chunks_found_[minimum(first + n, end - 1)];
      rows.exist |= first + n < end && row < found.rows() ? 1U << n : 0;
      rows.pair[n] = rank_.memory.row_pair[u64{found.number()} * rank_.geometry().chunk_rows + row];
    }
    return rows;
  }

  /// Counts row `row` of found chunks for its token. The pairs of the next chunks are on their way
  /// meanwhile; the loop is short, because a single warp that runs through much code waits for
  /// that.
  void count_rows(u32 row, u32 begin, u32 end) {
    Rows next = ask(row, begin, end);
    for (u32 first = begin; first < end; first += kChunksAtOnce) {
      const Rows rows = next;
      next = ask(row, first + kChunksAtOnce, end);
      u32 token[kChunksAtOnce];
      u32 sent[kChunksAtOnce];  // rows of the token
      for (u32 n = 0; n < kChunksAtOnce; ++n) {
        token[n] = rows.pair[n] / rank_.geometry().top_k;
        sent[n] = rank_.geometry().top_k;
      }
      if (combines_unsent(call_)) {
        for (u32 n = 0; n < kChunksAtOnce; ++n) {
          sent[n] = rank_.memory.token_rows[token[n]];
        }
      }
      u32 back[kChunksAtOnce];
      for (u32 n = 0; n < kChunksAtOnce; ++n) {
        // Relaxed: a number. A fence stands before it (take_in), and one before what is handed out
        // (hand_out_complete), so whoever counts a token's last row has the results of those that
        // other warps have counted.
        back[n] = P::template add_relaxed<Scope::block>(
            &rank_.os->rows_back[token[n] / OsMemory::kTokensPerWord],
            (rows.exist >> n & 1U) << rows_back_shift(token[n]));
      }
      for (u32 n = 0; n < kChunksAtOnce; ++n) {
        const u32 before = back[n] >> rows_back_shift(token[n]) & kRowsBackMask;
        append((rows.exist >> n & 1U) != 0 && before + 1 == sent[n], token[n]);
      }
    }
  }

  /// Notes the lanes' tokens that are complete.
  void append(bool complete, u32 token) {
    const u32 lanes = P::ballot(complete);
    if (complete) {
      // A plain store: published with the descriptor.
      rank_.memory.ready_tokens[first_ready_ + ready_ + P::lanes_before(lanes)] = token;
    }
    ready_ += P::count(lanes);
  }

  /// Hands out the tokens that have become complete. The returns subscribers alone make Combine
  /// tasks, but for the first, and number them among each other.
  void hand_out_complete() {
    if (handed_out_ == ready_) {
      return;
    }
    if (P::kReturnsSubscribers > 1) {
      // Pairs with the fences of the other returns subscribers in take_in, by way of rows_back.
      P::template acquire_fence<Scope::block>();
    }
    const u32 each = rank_.geometry().combine_tokens(call_.tokens);
    while (handed_out_ < ready_) {
      const u32 tokens = minimum(ready_ - handed_out_, each * (ReadyWord::kParts - 1));
      const u32 parts = ceil_div(tokens, each);
      const u32 number = by_one_lane<P>([this] {
        return take_slots<P, Scope::block>(rank_, call_, Actor::subscriber, rank_.os->combines_made,
                                           rank_.geometry().combine_tasks_max());
      });
      if (number == kNone) {
        return;
      }
      const u32 task = rank_.memory.first_task(TaskKind::combine) + number;
      if (P::lane() == 0) {
        make_combine(rank_.memory.tasks[task], parts, call_.epoch, first_ready_ + handed_out_,
                     tokens);
      }
      P::sync_lanes();
      // The results acquired above, too: whoever acquires the part may read them.
      P::template publish_fence<Scope::device>();
      hand_out(task, parts);
      handed_out_ += tokens;
    }
  }

  void reject(SentChunk chunk, u32 back) const {
    Failure failure = failure_of(rank_, call_, FailureKind::returns_too_many, Actor::subscriber);
    failure.peer = peer_of(chunk);
    failure.chunk = chunk_of(chunk);
    failure.expected = chunk.rows();
    failure.seen = back;
    rank_.fail(failure);
  }

  const Rank<P>& rank_;
  const Call& call_;
  u32 index_;
  SentChunk* chunks_awaited_;  // OsMemory's, of this warp, in order
  SentChunk* chunks_found_;    // and these
  u32 first_ready_;            // this warp's first place in ready_tokens
  bool routed_ = false;
  bool unsent_handed_out_ = false;
  u32 awaited_ = 0;     // chunks that were not back at the last look
  u32 found_ = 0;       // chunks that are back and not taken in yet
  u32 ready_ = 0;       // complete tokens so far
  u32 handed_out_ = 0;  // of these
};

}  // namespace moeos
