// Algorithm 3: one warp that decides what runs next and when the call is over.
//
// Sweeps the mailboxes and publishes (descriptor, part) words into the ready ring in priority
// order, but only about one word a processor ahead of what has been claimed, so that a more urgent
// task never waits behind a long queue. The thesis rings a doorbell at each processor instead; one
// ring keeps every processor busy while any part is ready. May not know: what a task computes,
// where rows lie.
#pragma once

#include "runtime/base.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"

namespace moeos {

template <Platform P>
class Scheduler {
 public:
  /// Tiles of one expert whose parts are handed out by turns, at most.
  static constexpr u32 kTilesTogether = 16;

  Scheduler(const Rank<P>& rank, const Call& call)
      : rank_(rank), call_(call), state_(rank.memory.call(call.epoch)) {
    // Processors know the first parts, those of Route, without being told.
    published_ = route_parts(rank.geometry(), call);
  }

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
    returned_ = agreed<P>(returned);
    combined_ = agreed<P>(combined);
    leaving_ = agreed<P>(leaving_);
    fetch(words);
    const u32 published = publish_up_to(claimed_ + rank_.geometry().processors);
    waiting_most_ = maximum(waiting_most_, maximum(published_, claimed_) - claimed_);
    const bool starving = claimed_ > published_ && !anything_ready();
    if (P::lane() == 0) {
      // Block scope, relaxed: a hint to the arrivals subscriber that packing early would feed
      // someone.
      P::template store_relaxed<Scope::block>(rank_.os->starving, starving ? 1U : 0U);
    }
    return claimed_ != before || published > 0;
  }

  /// Whether, at the last sweep, a failure had ended the call.
  bool leaving() const { return leaving_; }

  /// Whether the call is over for this rank, by what the last sweep saw: counts seen from all
  /// peers, every received row returned, every token combined, and every processor back at the ring
  /// (so that all have read this call's epoch). Each of these stays so once it is.
  bool finished() const {
    const u32 expected = P::template load_relaxed<Scope::block>(rank_.os->rows_expected);
    return routed_ && returned_ == expected && combined_ == call_.tokens &&
           claimed_ == published_ + rank_.geometry().processors;
  }

  /// Tells everyone to leave, and starts the next epoch. Only after finished(): a processor that
  /// had not read the epoch yet would otherwise wait for the wrong call.
  void interrupt() {
    if (P::lane() == 0) {
      P::template store_relaxed<Scope::device>(rank_.memory.epoch, call_.epoch + 1);
      // Relaxed: publishes nothing. The next call gets all of this one from the kernel boundary, or
      // from whatever joins the actors.
      P::template store_relaxed<Scope::device>(&state_.interrupt.value, 1U);
      CallRecord& record = *rank_.memory.record;
      record.end_ns = P::now_ns();
      record.sweeps = sweeps_;
      record.waiting_most = waiting_most_;
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
    u32 expert = kNone;  // whose weights word i's wide tile is multiplied by
    u32 size = 0;
    u32 next = 0;      // first word not handed out completely
    u32 together = 0;  // words from there on that are handed out by turns
    u32 turn = 0;      // first turn not handed out
    u32 cursor = 0;    // slots of the mailbox that have been read
    bool empty() const { return next == size; }
  };

  /// Calls visit(kind, batch) for every kind that is posted, in the order in which the scheduler
  /// prefers them. Written out, so that a batch is never indexed and lives in registers.
  template <class Visit>
  void for_each_batch(Visit visit) {
    static_assert(kTaskKinds == 5);  // route begins a call, and dispatch is the couriers'
    visit(TaskKind::combine, batches_[1]);
    visit(TaskKind::gemm1, batches_[2]);
    visit(TaskKind::gemm0, batches_[3]);
  }

  /// Refills the batches that are used up.
  void fetch(const Words& words) {
    u32 read = 0;  // bit k: words of kind k have been
    for_each_batch([&](TaskKind kind, Batch& batch) {
      if (!batch.empty()) {
        return;
      }
      const MailboxView mailbox = rank_.memory.mailbox(kind);
      batch.word =
          batch.cursor + P::lane() < mailbox.capacity ? words.of_kind[static_cast<u32>(kind)] : 0;
      const u32 epoch = ReadyWord(batch.word).epoch();
      if (epoch > call_.epoch) {  // nobody writes such a word
        reject_damaged(rank_, call_, FailureKind::word_damaged, Actor::scheduler,
                       batch.cursor + P::lane(), batch.word);
      }
      const u32 filled = P::ballot(epoch == call_.epoch);
      // In order: an unfilled slot holds back those behind it.
      batch.size = partition_point(
          P::kLanes, [filled](u32 lane) { return (~filled & ((u64{2} << lane) - 1)) == 0; });
      batch.next = 0;
      batch.together = 0;
      batch.cursor += batch.size;
      read |= batch.size > 0 ? 1U << static_cast<u32>(kind) : 0;
    });
    if (read != 0) {
      // Pairs with fill_slot: what the posters published is ordered before what publish_up_to
      // publishes.
      P::template relay_fence<Scope::device>();
      if ((read >> static_cast<u32>(TaskKind::gemm1) & 1U) != 0) {
        find_experts(batches_[2], rank_.geometry().gemm1_parts);
      }
      if ((read >> static_cast<u32>(TaskKind::gemm0) & 1U) != 0) {
        find_experts(batches_[3], rank_.geometry().gemm0_parts);
      }
    }
  }

  /// Notes whose weights the tiles of a batch that has just been read need. Of those cut into
  /// `wide_parts` alone: a narrow tile is what is left of an expert's rows, so nobody shares them.
  void find_experts(Batch& batch, u32 wide_parts) {
    const ReadyWord word(batch.word);
    if (P::lane() < batch.size) {
      const bool wide = batch.size > 1 && word.part() == wide_parts;
      batch.expert = wide ? rank_.memory.tasks[word.task()].local_expert : kNone;
    }
  }

  /// How many words from the batch's next one on are tiles of one expert.
  ///
  /// Their parts are handed out by turns, the first of each tile, then the second: so processors
  /// that begin one after the other read the same columns of weights, and read them from L2. Tile
  /// by tile, an expert's weights would pass through L2 once a tile, and large ones do not stay
  /// there from one tile to the next (docs/performance.md, "Turns").
  u32 count_together(const Batch& batch) const {
    const u32 expert = P::broadcast(batch.expert, batch.next);
    const bool other = P::lane() >= batch.size || batch.expert != expert || expert == kNone;
    const u32 others = P::ballot(other && P::lane() > batch.next);
    const u32 end = others == 0 ? batch.size : P::first_lane(others);
    return minimum(end - batch.next, kTilesTogether);
  }

  bool anything_ready() {
    bool ready = false;
    for_each_batch([&](TaskKind, Batch& batch) { ready = ready || !batch.empty(); });
    return ready;
  }

  /// Publishes ready parts until `limit` words have been published in this call; returns how many
  /// it published. In order of TaskKind, but first GEMMs first while rows are still being sent:
  /// what a second one returns would compete with them for the links.
  u32 publish_up_to(u32 limit) {
    const u32 before = published_;
    if (!anything_ready()) {
      return 0;
    }
    // No fence: the one behind the polls that found these words (fetch) also stands before the
    // words below, and so orders what it has acquired before them, for the processors that acquire
    // them.
    if (sending_) {
      hand_out(batches_[static_cast<u32>(TaskKind::gemm0)], limit);
    }
    for_each_batch([&](TaskKind, Batch& batch) { hand_out(batch, limit); });
    return published_ - before;
  }

  /// Publishes parts of a batch until it is used up or `limit` words have been published in this
  /// call.
  void hand_out(Batch& batch, u32 limit) {
    while (published_ < limit && !batch.empty()) {
      if (batch.together == 0) {
        batch.together = count_together(batch);
        batch.turn = 0;
      }
      const u32 turns = batch.together * ReadyWord(P::broadcast(batch.word, batch.next)).part();
      const u32 handed = minimum(minimum(limit - published_, turns - batch.turn), P::kLanes);
      MOEOS_CHECK(published_ + handed <= rank_.geometry().parts_max());
      const u32 turn = batch.turn + P::lane();
      const ReadyWord word{P::broadcast(batch.word, batch.next + turn % batch.together)};
      if (P::lane() < handed) {
        // Publishes the descriptor and its inputs to the processor whose ticket this slot is; pairs
        // with the acquire in Processor::claim.
        P::template publish<Scope::device>(&rank_.memory.ring[published_ + P::lane()],
                                           word.with_part(turn / batch.together).sealed());
      }
      published_ += handed;
      batch.turn += handed;
      if (batch.turn == turns) {
        batch.next += batch.together;
        batch.together = 0;
      }
    }
  }

  const Rank<P>& rank_;
  const Call& call_;
  CallState& state_;
  Batch batches_[kTaskKinds];
  u32 published_ = 0;
  u32 sweeps_ = 0;
  u32 waiting_most_ = 0;  // words published and not claimed, at most
  // Of the last sweep.
  u32 claimed_ = 0;
  u32 returned_ = 0;
  u32 combined_ = 0;
  bool routed_ = false;
  bool sending_ = true;  // Dispatch is not over
  bool leaving_ = false;
};

}  // namespace moeos
