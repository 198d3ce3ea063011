// SPDX-License-Identifier: Apache-2.0
// Algorithm 3: one warp that decides what runs next and when the call is over.
//
// Sweeps the mailboxes of both products and publishes (descriptor, part) words into the ready ring,
// in an order that it chooses, but only about one word a processor ahead of what has been claimed,
// so that a more urgent task never waits in a long queue. Complete tokens do not pass through it
// (ring.hpp). The thesis rings a doorbell at each processor instead; one ring keeps every processor
// busy while any part is ready. Must not depend on: what a task computes, where rows lie.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/ring.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

template <Platform P>
class Scheduler {
 public:
  /// Tiles whose parts are handed out together, at most.
  static constexpr u32 kTilesTogether = 16;

  Scheduler(const Rank<P>& rank, const Call& call)
      : rank_(rank), call_(call), state_(rank.memory.call(call.epoch)) {}

  /// One sweep. True if anything was published or claimed: the call is alive.
  bool step() {
    if (P::lane() == 0) {
      // Relaxed: a processor only looks whether it changes.
      P::template store_relaxed<Scope::device>(&state_.heartbeat.value, ++sweeps_);
    }
    // All words of a sweep are asked for before the first is looked at: one round trip for all.
    Words words;
    for_each_batch([&](TaskKind kind, Batch& batch) {
      const MailboxView mailbox = rank_.memory.mailbox(kind);
      const u32 slot = minimum(batch.cursor + P::lane(), mailbox.capacity - 1);
      words.of_kind[static_cast<u32>(kind)] = P::template poll<Scope::device>(&mailbox.words[slot]);
    });
    // Relaxed, all of them: numbers that are compared.
    const u32 claimed = P::template load_relaxed<Scope::device>(&state_.ring_claimed.value);
    const u32 sent = P::template load_relaxed<Scope::device>(&state_.dispatch_parts_done.value);
    const u32 routed = P::template load_relaxed<Scope::device>(&state_.routed.value);
    const u32 returned = P::template load_relaxed<Scope::device>(&state_.rows_returned.value);
    const u32 combined = P::template load_relaxed<Scope::device>(&state_.tokens_combined.value);
    leaving_ = rank_.leaving(call_.epoch);
    const u32 before = claimed_;
    claimed_ = agreed<P>(claimed);
    routed_ = agreed<P>(routed) != 0;
    sending_ = agreed<P>(sent + 1 != routed);
    // Pairs with ArrivalsSubscriber::decide: slots that stand for a plan's parts are counted in the
    // load below.
    planned_ = agreed<P>(P::template load_acquire<Scope::block>(rank_.os.planned)) !=
               static_cast<u32>(Planned::unknown);
    // Relaxed, too: other warps of this block hand parts out as well (ring.hpp).
    published_ = agreed<P>(P::template load_relaxed<Scope::block>(rank_.os.published));
    returned_ = agreed<P>(returned);
    combined_ = agreed<P>(combined);
    leaving_ = agreed<P>(leaving_);
    fetch(words);
    const u32 limit = claimed_ + rank_.geometry().processors;
    const u32 published = publish_up_to(limit);
    waiting_most_ = maximum(waiting_most_, maximum(published_, claimed_) - claimed_);
    const u32 wanted = anything_left() ? 0 : maximum(limit, published_) - published_;
    if (P::lane() == 0) {
      // Block scope, relaxed: a hint to the arrivals subscriber that more tiles would feed
      // processors.
      P::template store_relaxed<Scope::block>(rank_.os.wanted, wanted);
    }
    return claimed_ != before || published > 0;
  }

  /// Whether, at the last sweep, a failure had ended the call.
  bool leaving() const { return leaving_; }

  /// Whether the call is over for this rank, by what the last sweep saw: counts seen from all
  /// peers, every received row returned, every token combined (combines_of), and every processor
  /// back at the ring (so that all have read this call's epoch). Each of these stays true once it
  /// is. Without rows no actor need decide how tiles are made.
  ///
  /// In addition, every returns subscriber must have listed its chunks. Where processors wait for
  /// rows themselves, nothing else needs all of these warps, and one that has not looked since the
  /// call was planned would leave its credits, full, to the next call. It lists as soon as the call
  /// is planned, long before rows come back, so a call waits only for a warp that stands still. A
  /// call without tokens has no chunks.
  bool finished() const {
    const u32 expected = P::template load_relaxed<Scope::block>(rank_.os.rows_expected);
    // Relaxed: publishes nothing.
    const u32 listed = P::template load_relaxed<Scope::block>(rank_.os.returns_listed);
    return routed_ &&
           (listed == P::kReturnsSubscribers ||
            (listed > 0 && MOEOS_PLANTED(calls_end_with_one_list)) || call_.tokens == 0) &&
           (planned_ || expected == 0) && returned_ == expected &&
           combined_ == combines_of(rank_.geometry(), call_, rank_.slice) &&
           claimed_ == published_ + rank_.geometry().processors;
  }

  /// Ends the call for all actors and starts the next epoch. Only after finished(): a processor
  /// that had not read the epoch yet would otherwise wait for the wrong call.
  void interrupt() {
    if (P::lane() == 0) {
      P::template store_relaxed<Scope::device>(rank_.memory.epoch, call_.epoch + 1);
      // Relaxed: publishes nothing. The next call gets all of this one's effects from the kernel
      // boundary, or from the join of the actors.
      P::template store_relaxed<Scope::device>(&state_.interrupt.value, 1U);
      if constexpr (P::has_faults()) {
        // Relaxed, as the epoch: no part of this call begins any more.
        P::template count_relaxed<Scope::device>(rank_.memory.calls, 1U);
      }
      CallRecord& record = *rank_.memory.record;
      record.end_ns = P::now_ns();
      record.sweeps = sweeps_;
      record.waiting_most = waiting_most_;
    }
    for (u32 peer = P::lane(); peer < rank_.geometry().world; peer += P::kLanes) {
      // Relaxed: a number that the host reads after the call. All rows that went have come back.
      // Comes after the word for which all actors wait.
      rank_.memory.peer_records[peer].rows_carried =
          P::template load_relaxed<Scope::device>(rank_.memory.rows_carried(call_.epoch, peer));
    }
  }

 private:
  /// What lane i sees at the cursor of each mailbox, plus i.
  struct Words {
    u64 of_kind[kTaskKinds];
  };

  /// Words of one mailbox that have been read and not handed out: lane i holds word i.
  struct Batch {
    u64 word = 0;
    u32 expert = kNone;   // expert of word i's tile; kNone: not needed
    bool narrow = false;  // word i's tile is narrow
    u32 size = 0;
    u32 next = 0;      // first word not handed out completely
    u32 together = 0;  // words from there on whose parts are handed out together; 0: not chosen yet
    bool by_turns = false;
    u32 parts = 0;      // of all words handed out together
    u32 part = 0;       // the first part that is not handed out
    u32 row = 1;        // consecutive parts that share columns (by turns) or a tile
    u32 cursor = 0;     // slots of the mailbox that have been read
    bool more = false;  // the next slot holds a word, which waits for others of its expert
    bool empty() const { return next == size; }
    /// Becomes `other` if `so` is set. Field by field, or the compiler would choose between
    /// addresses and keep all batches in memory.
    void become(bool so, const Batch& other) {
      word = so ? other.word : word;
      expert = so ? other.expert : expert;
      narrow = so ? other.narrow : narrow;
      size = so ? other.size : size;
      next = so ? other.next : next;
      together = so ? other.together : together;
      by_turns = so ? other.by_turns : by_turns;
      parts = so ? other.parts : parts;
      part = so ? other.part : part;
      row = so ? other.row : row;
      cursor = so ? other.cursor : cursor;
      more = so ? other.more : more;
    }
  };

  /// Calls visit(kind, batch) for every kind that is posted. Written out, so that a batch is never
  /// indexed and lives in registers.
  template <class Visit>
  void for_each_batch(Visit visit) {
    visit(kSecondProduct.kind, second_);
    visit(kFirstProduct.kind, first_);
  }

  /// Refills the batches that are used up.
  void fetch(const Words& words) {
    u32 read = 0;  // bit k: words of kind k have been read
    for_each_batch([&](TaskKind kind, Batch& batch) {
      if (!batch.empty()) {
        return;
      }
      const MailboxView mailbox = rank_.memory.mailbox(kind);
      batch.word =
          batch.cursor + P::lane() < mailbox.capacity ? words.of_kind[static_cast<u32>(kind)] : 0;
      const u32 epoch = ReadyWord(batch.word).epoch();
      if (epoch > call_.epoch) {  // no actor writes such a word
        reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::scheduler,
                       batch.cursor + P::lane(), batch.word);
      }
      // In order: an unfilled slot holds back those after it.
      const u32 unfilled = P::ballot(epoch != call_.epoch);
      batch.size = unfilled == 0 ? P::kLanes : P::first_lane(unfilled);
      batch.next = 0;
      batch.together = 0;
      batch.more = false;
      batch.cursor += batch.size;
      read |= batch.size > 0 ? 1U << static_cast<u32>(kind) : 0;
    });
    if (read != 0) {
      // Pairs with post_next and post_new_tiles: what they published is ordered before what
      // publish_up_to publishes.
      P::template relay_fence<Scope::device>();
      for_each_batch([&](TaskKind kind, Batch& batch) {
        if ((read >> static_cast<u32>(kind) & 1U) != 0) {
          find_experts(batch, parts_of(rank_.geometry(), kind, false));
        }
      });
    }
  }

  /// Notes whose weights the tiles of a newly read batch need, if several may share some: not where
  /// no tile is cut into `wide_parts`, as in a call of few rows, where latency counts. For large
  /// experts, keeps no words of an expert that may have more.
  void find_experts(Batch& batch, u32 wide_parts) {
    const ReadyWord word(batch.word);
    const bool there = P::lane() < batch.size;
    batch.narrow = there && word.part() != wide_parts;
    const bool shared = batch.size > 1 && P::ballot(there && !batch.narrow) != 0;
    const u32 tile = word.task();
    batch.expert = there && shared ? rank_.os.tile_facts[tile].local_expert() : kNone;
    if (rank_.geometry().large_experts != 0 && shared) {
      leave_last_expert(batch);
    }
  }

  /// Returns the last expert's words to the mailbox if the batch has words of several experts,
  /// because more words of that expert may follow in the mailbox.
  void leave_last_expert(Batch& batch) const {
    const u32 last = P::broadcast(batch.expert, batch.size - 1);
    const u32 others = P::ballot(P::lane() < batch.size && batch.expert != last);
    if (others == 0) {
      return;
    }
    const u32 size = P::count(P::ballot(others >> P::lane() != 0));  // to the last other expert
    batch.cursor -= MOEOS_PLANTED(words_given_back_are_lost) ? 0 : batch.size - size;
    batch.size = size;
    batch.more = true;
  }

  /// Chooses the words, from the batch's next one on, whose parts are handed out together.
  ///
  /// Wide tiles of one expert go by turns: the first part of each tile, then the second. So
  /// processors that begin one after the other read the same columns of weights, and read them from
  /// L2. Tile by tile, an expert's weights would pass through L2 once a tile, and large ones do not
  /// stay there from one tile to the next. Narrow tiles go one after the other, since no tile
  /// shares their weights; together only because words that are published at once take the time of
  /// one.
  void begin_together(Batch& batch) {
    const u32 expert = P::broadcast(batch.expert, batch.next);
    const bool narrow = P::broadcast(batch.narrow ? 1U : 0U, batch.next) != 0;
    const bool alike = P::lane() < batch.size && batch.narrow == narrow &&
                       (narrow || (batch.expert == expert && expert != kNone));
    const u32 others = P::ballot(P::lane() > batch.next && !alike);
    const u32 end = others == 0 ? batch.size : P::first_lane(others);
    const ReadyWord word{P::broadcast(batch.word, batch.next)};
    batch.together = minimum(end - batch.next, kTilesTogether);
    const u32 each = word.part();
    batch.by_turns = !narrow;
    batch.row = narrow ? each : batch.together;
    batch.parts = batch.together * each;
    batch.part = 0;
  }

  bool anything_ready() {
    bool ready = false;
    for_each_batch([&](TaskKind, Batch& batch) { ready = ready || !batch.empty(); });
    return ready;
  }

  /// Whether any word is ready, or waits in a mailbox for others of its expert.
  bool anything_left() {
    bool left = false;
    for_each_batch([&](TaskKind, Batch& batch) { left = left || !batch.empty() || batch.more; });
    return left;
  }

  /// Whether a call that sends each token once sends at most half as many rows as it has pairs, by
  /// even routing: a token's k pairs go to P(1 - (1 - 1/P)^k) ranks.
  static constexpr bool tokens_are_half_of_pairs(const Dimensions& dimensions) {
    double elsewhere = 1.0;  // the share of tokens that send a rank nothing
    for (u32 j = 0; j < dimensions.top_k; ++j) {
      elsewhere *= 1.0 - 1.0 / dimensions.world;
    }
    return 2.0 * dimensions.world * (1.0 - elsewhere) <= dimensions.top_k;
  }

  /// Whether this rank sends few rows, which it knows once it is routed: each token goes once to
  /// each peer and has several rows there.
  bool rows_are_few() const {
    const Geometry& geometry = rank_.geometry();
    if (geometry.large_experts != 0 || !geometry.deduplicates_any() ||
        !tokens_are_half_of_pairs(geometry)) {
      return false;
    }
    // Pairs with finish_routing: how many rows go to each peer. The sweep has read `routed`.
    P::template acquire_fence<Scope::device>();
    bool many = false;
    for (u32 peer = P::lane(); peer < geometry.world; peer += P::kLanes) {
      const u32 rows = rank_.memory.rows_sent(peer);
      many = many || (peer != rank_.rank && rows > 0 && !rank_.deduplicates(peer, rows));
    }
    return P::ballot(many) == 0;
  }

  /// Whether this rank sends some peer more rows than its cell there has slots, which it knows once
  /// it is routed. Then other ranks do so, too, perhaps to this one, and wait for what GEMM1
  /// returns.
  bool returns_are_awaited() const {
    const Geometry& geometry = rank_.geometry();
    if (!geometry.rings_cells()) {
      return false;
    }
    // Pairs with finish_routing, as in rows_are_few.
    P::template acquire_fence<Scope::device>();
    bool overflows = false;
    for (u32 peer = P::lane(); peer < geometry.world; peer += P::kLanes) {
      overflows = overflows || geometry.overflows(rank_.memory.rows_sent(peer));
    }
    return P::ballot(overflows) != 0;
  }

  /// Whether GEMM1 may return results: the links have room, since all rows have left or are few, or
  /// results take precedence (returns_are_awaited).
  bool may_return() {
    if (sending_ && routed_ && !links_looked_at_) {
      links_looked_at_ = true;
      links_have_room_ = returns_are_awaited() || rows_are_few();
    }
    return !sending_ || links_have_room_;
  }

  /// Chooses the product whose parts are handed out next, of those that are ready. GEMM0 goes first
  /// while many rows are still being sent: the results that GEMM1 returns would compete with them
  /// for the links. Otherwise the products take turns.
  TaskKind next_kind() {
    const bool second = first_.empty() || (!second_.empty() && may_return() && second_in_turn());
    return product_kind(second ? 1 : 0);
  }

  /// Whether GEMM1 has its turn when both products are ready. With small experts, both get the same
  /// share of the processors' time: GEMM1 alone would fill the links again and wait for them, and
  /// leave GEMM0 for the end of the call, when the links have nothing to do. With large experts,
  /// the weights of both would evict each other from the cache: GEMM1 goes first, but waits for the
  /// end of the GEMM0 words that are handed out together, and so collects a whole expert's tiles.
  /// Turns took 3 to 4 % off large calls of small experts, and made those of DeepSeek-V3 7 %
  /// slower.
  bool second_in_turn() const {
    const bool amid_turns = first_.together != 0 && first_.by_turns;
    const Geometry& geometry = rank_.geometry();
    return geometry.large_experts != 0 ? !amid_turns : second_products_ahead_ <= 0;
  }

  /// Publishes ready parts until `limit` words have been published in this call; returns how many
  /// it published.
  u32 publish_up_to(u32 limit) {
    const u32 before = published_;
    // No fence: the fence after the polls that found these words (fetch) also stands before the
    // words below, and so orders what it has acquired before them, for the processors that acquire
    // them.
    while (published_ < limit && anything_ready()) {
      const TaskKind kind = next_kind();
      const bool both = !first_.empty() && !second_.empty();
      // A copy, so that there is one piece of code for all kinds.
      Batch batch;
      for_each_batch([&](TaskKind its, Batch& found) { batch.become(its == kind, found); });
      const u32 handed = hand_out(batch, limit);
      for_each_batch([&](TaskKind its, Batch& found) { found.become(its == kind, batch); });
      const Geometry& geometry = rank_.geometry();
      if (geometry.large_experts == 0 && both && may_return()) {
        // A part takes time in proportion to the bytes of a row of its input.
        second_products_ahead_ += kind == kSecondProduct.kind
                                      ? static_cast<i32>(handed * geometry.hidden_bytes)
                                      : -static_cast<i32>(handed * geometry.sent_bytes);
      }
    }
    return published_ - before;
  }

  /// Publishes as many parts of a batch as one step can, up to `limit` words in this call; returns
  /// how many.
  u32 hand_out(Batch& batch, u32 limit) {
    if (batch.together == 0) {
      begin_together(batch);
    }
    const u32 handed = minimum(minimum(limit - published_, batch.parts - batch.part), P::kLanes);
    const u32 first = take_ring_slots(rank_, call_, Actor::scheduler, handed);
    const u32 part = minimum(batch.part + P::lane(), batch.parts - 1);
    const u32 quotient = part / batch.row;
    const u32 rest = part % batch.row;
    const u32 tile = batch.by_turns ? rest : quotient;
    const ReadyWord word{P::broadcast(
        batch.word, batch.next + (MOEOS_PLANTED(parts_are_of_the_first_tile) ? 0 : tile))};
    if (first != kNone && P::lane() < handed) {
      const u32 of_tile = batch.by_turns ? quotient : rest;
      fill_ring_slot(rank_, first + P::lane(), word.with_part(of_tile));
    }
    published_ += handed;
    batch.part += handed;
    if (batch.part == batch.parts) {
      batch.next += batch.together;
      batch.together = 0;
    }
    return handed;
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Batch first_;  // of first products
  Batch second_;
  u32 sweeps_ = 0;
  u32 waiting_most_ = 0;  // words published and not claimed, at most
  // Processors' time that GEMM1 has had more than GEMM0 while they alternated, as bytes of their
  // inputs' rows; bounded, because few parts are handed out at once.
  i32 second_products_ahead_ = 0;
  // As of the last sweep:
  u32 published_ = 0;  // words of the ring, and those published since
  u32 claimed_ = 0;
  u32 returned_ = 0;
  u32 combined_ = 0;
  bool routed_ = false;
  bool planned_ = false;  // it is known how tiles are made
  bool sending_ = true;   // Dispatch is not over
  bool links_looked_at_ = false;
  bool links_have_room_ = false;  // for results during Dispatch; not known before links_looked_at_
  bool leaving_ = false;
};

}  // namespace moeos
