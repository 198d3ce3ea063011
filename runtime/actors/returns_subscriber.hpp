// SPDX-License-Identifier: Apache-2.0
// The subscriber of row credits: hands out tokens whose rows are all back as Combine. In a call
// that is planned up front and has few tokens, it hands out all tokens when it is known where their
// rows go, and processors wait for the rows themselves (inputs.hpp).
//
// There are P::kReturnsSubscribers such warps, each with a share of every peer's chunks, since a
// call ends with all of its rows coming back. Like the other actors of Algorithm 2: step() looks
// once at its words and returns whether anything was new, and answer() says what it still waits
// for. Must not depend on: what a task computes.
#pragma once

#include "runtime/health/grace_time.hpp"
#include "runtime/memory/os_memory.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/plan/kept_parts.hpp"
#include "runtime/plan/known_parts.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/queues/ring.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

template <Platform P>
class ReturnsSubscriber {
 public:
  /// Words of credit that a lane asks for at once.
  static constexpr u32 kLooks = 4;
  /// Chunks that are found before they are counted, at most.
  static constexpr u32 kFoundMost = 4 * P::kLanes * kLooks;
  static_assert(kFoundMost <= OsMemory::kFoundMost);
  /// Chunks whose rows are counted together, so that one round trip to memory fetches their
  /// assignments.
  static constexpr u32 kChunksAtOnce = 4;
  /// Chunks after which completed tokens are handed out, while other chunks are counted.
  static constexpr u32 kChunksAHandOut = 32;
  static_assert(kChunksAHandOut % kChunksAtOnce == 0);

  /// `index`: which of P::kReturnsSubscribers warps.
  ReturnsSubscriber(const Rank<P>& rank, const Call& call, u32 index)
      : rank_(rank),
        call_(call),
        index_(index),
        chunks_awaited_(rank.os.awaited_by(index, P::kReturnsSubscribers)),
        chunks_found_(rank.os.chunks_found + u64{index} * OsMemory::kFoundMost),
        first_ready_(index * rank.geometry().max_tokens) {
    static_assert(P::kReturnsSubscribers >= 1 && P::kReturnsSubscribers <= kReturnsSubscribersMax);
    constexpr u32 kStride = P::kLanes * P::kReturnsSubscribers;
    const OsMemory& os = rank.os;
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
      if (P::lane() == 0) {
        // Relaxed: publishes nothing. It only keeps the scheduler from ending the call before
        // (Scheduler::finished), so that leave() finds every credit in the list.
        P::template count_relaxed<Scope::block>(rank_.os.returns_listed, 1U);
      }
    }
    if (handed_out_up_front_) {
      return watch();
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

  /// Called after the last step. A call that ends well has all chunks in the lists, so it leaves no
  /// credit that the next call could take for its own.
  void leave() const {
    const u32 kept = MOEOS_PLANTED(a_credit_stays) ? 1 : 0;
    for (u32 i = P::lane(); handed_out_up_front_ && i + kept < awaited_; i += P::kLanes) {
      // As in take_in; here, because processors have looked at the credit, too.
      P::template store_relaxed<Scope::system>(credit(chunks_awaited_[i]), 0U);
    }
  }

  /// Missing is the first of this warp's chunks that is not back. Nothing is missing as long as our
  /// own processors have not sent all of them: then the peers are not late; unless all that they
  /// can send has been sent, and what is left waits for slots of a cell. A peer whose call is
  /// planned up front may wait for the rows of a late third rank.
  Answer answer(Failure& failure) {
    u32 first = 0;
    while (first < awaited_ && chunks_awaited_[first].rows() == 0) {  // back (watch)
      ++first;
    }
    const SentChunk before = first_before_kept(rank_, call_);
    const bool keeps = before.rows() != 0;
    const bool late = keeps || (routed_ && all_sent() && first < awaited_);
    if (late) {
      const SentChunk chunk = keeps ? before : chunks_awaited_[first];
      failure.kind = FailureKind::returns_late;
      failure.peer = peer_of(chunk);
      failure.chunk = chunk_of(chunk);
      failure.expected = chunk.rows();
      failure.seen = open(P::template load_relaxed<Scope::system>(credit(chunk)));
    }
    const u32 links = keeps || rank_.geometry().ranks() <= 2 ? 0 : 1 + kept_links(rank_.geometry());
    return grace_time_.answer(late, links, rank_.deadline_ns);
  }

 private:
  static constexpr u32 kLooksOfAll = P::kLanes * kLooks;

  /// Whether every counter that the returns subscribers share has been cleared.
  bool everyone_ready() const {
    if (P::kReturnsSubscribers > 1) {
      if (agreed<P>(P::template poll<Scope::block>(rank_.os.returns_ready)) !=
          P::kReturnsSubscribers) {
        return false;
      }
      // Pairs with the constructors.
      P::template acquire_fence<Scope::block>();
    }
    return true;
  }

  /// Learns how many rows we sent to each peer and how many rows each token has; true once both are
  /// known. The Combine of tokens that sent no row, which is handed out here, counts the latter.
  bool learn_rows() {
    const CallState& state = rank_.memory.call(call_.epoch);
    if (agreed<P>(P::template poll<Scope::device>(&state.routed.value)) == 0) {
      return false;
    }
    const Geometry& geometry = rank_.geometry();
    Planned planned = Planned::by_arrival;
    if (geometry.may_await(call_.tokens) || geometry.plans_by_counts(call_.tokens)) {
      // Pairs with ArrivalsSubscriber::decide: what is handed out here, after one of the fences
      // below, comes after the slots that it has taken. Rows that have come back by then are not
      // urgent: other ranks' counts are awaited.
      planned = static_cast<Planned>(agreed<P>(P::template poll<Scope::block>(rank_.os.planned)));
    }
    if (planned == Planned::unknown) {
      return false;
    }
    if (planned == Planned::up_front && geometry.may_await(call_.tokens)) {
      hand_out_up_front();
      return true;
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

  /// Hands out the Combine of all tokens; by the first returns subscriber.
  void hand_out_up_front() {
    handed_out_up_front_ = true;
    // Pairs with finish_routing, for the routing map, and publishes it to the processors.
    P::template relay_fence<Scope::device>();
    if (index_ == 0) {
      const u32 each = rank_.geometry().combine_tokens(call_.tokens);
      hand_out(ceil_div(call_.tokens, each), [&](u32 part) {
        const u32 first = part * each;
        return combine_word(call_.epoch, first, minimum(each, call_.tokens - first))
            .awaiting_rows();
      });
    }
  }

  /// Notes which of the chunks that processors wait for are back: such a chunk then has no rows in
  /// the list. Without a fence: nothing is read because of it.
  bool watch() {
    bool news = false;
    for (u32 i = P::lane(); i < awaited_; i += P::kLanes) {
      const SentChunk chunk = chunks_awaited_[i];
      const u32 rows = open(P::template poll<Scope::system>(credit(chunk)));
      if (rows > chunk.rows() && chunk.rows() != 0) {
        reject(chunk, rows);
      } else if (rows == chunk.rows()) {
        chunks_awaited_[i] = SentChunk(chunk.number(), 0);
        rank_.memory.peer_records[peer_of(chunk)].results_ns = P::now_ns();
        news = true;
      }
    }
    P::sync_lanes();
    return P::ballot(news) != 0;
  }

  /// Hands out the Combine of tokens that sent no row, which counts the rows of all others, a part
  /// for each block; by the first returns subscriber, once, unless processors find these parts.
  void hand_out_unsent() {
    if (index_ != 0 || unsent_handed_out_ || own_unsent_parts(rank_.geometry(), call_) != 0) {
      return;
    }
    unsent_handed_out_ = true;
    // Pairs with finish_routing, for the routing map, and publishes it to the processors.
    P::template relay_fence<Scope::device>();
    hand_out(route_blocks(rank_.geometry(), call_),
             [&](u32 block) { return combine_unsent_word(call_.epoch, block); });
  }

  /// Hands out parts of Combine: word_of(i) for the i-th. Requires a fence of each lane before it.
  template <class WordOf>
  void hand_out(u32 parts, WordOf word_of) const {
    const u32 first = take_ring_slots(rank_, call_, Actor::subscriber, parts);
    for (u32 part = P::lane(); first != kNone && part < parts; part += P::kLanes) {
      fill_ring_slot(rank_, first + part - (MOEOS_PLANTED(tokens_take_others_slots) ? 1 : 0),
                     word_of(part));
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

  /// Lists this warp's chunks: every P::kReturnsSubscribers-th of all that we send, counted through
  /// all peers.
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
        overflows_ = overflows_ || geometry.overflows(rows);
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

  /// Looks at kLooksOfAll of the awaited chunks, from index `first` on; they come in any order.
  /// Moves those that are back to the found ones and lists the others from index `kept` on, which
  /// is at most `first`; returns the index after them.
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
    u32 too_many = 0;  // rows of that chunk, more than it has
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
    P::sync_lanes();  // all lanes have read the entries that are written now
    for (u32 i = 0; i < kLooks && first + i * P::kLanes < awaited_; ++i) {
      const bool awaited = first + i * P::kLanes + P::lane() < awaited_;
      const bool found = (complete >> i & 1U) != 0;
      const u32 all_found = P::ballot(found);
      const u32 all_kept = P::ballot(awaited && !found);
      if (found) {
        chunks_found_[found_ + (MOEOS_PLANTED(found_chunks_share_a_place)
                                    ? 0
                                    : P::lanes_before(all_found))] = chunk[i];
      } else if (awaited) {
        chunks_awaited_[kept + P::lanes_before(all_kept)] = chunk[i];
      }
      found_ += P::count(all_found);
      kept += MOEOS_PLANTED(awaited_chunks_are_forgotten) ? 0 : P::count(all_kept);
    }
    P::sync_lanes();  // the lists are whole for the lanes that look next
    return kept;
  }

  /// Counts the rows of all chunks that were found, after one fence, and posts the tokens that they
  /// complete.
  bool take_in() {
    if (found_ == 0) {
      return false;
    }
    // Pairs with return_rows: the results of these chunks are here ...
    P::template acquire_fence<Scope::system>();
    if (P::kReturnsSubscribers > 1) {
      // ... and, through rows_back, for the warp that counts a token's last row.
      P::template publish_fence<Scope::block>();
    }
    P::sync_lanes();
    if (overflows_) {
      // ... which says that the peer has read their rows, also, through chunks_back, to the
      // couriers that wait for their slots.
      P::template publish_fence<Scope::device>();
    }
    const u64 now = P::now_ns();
    for (u32 i = P::lane(); i < found_; i += P::kLanes) {
      const SentChunk chunk = chunks_found_[i];
      if (overflows_) {
        // Publishes, with the fence above, to couriers, which poll this word and fence
        // (has_places).
        P::template publish<Scope::device>(rank_.memory.chunk_back(peer_of(chunk), chunk_of(chunk)),
                                           seal(call_.epoch));
      }
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
      hand_out_complete();
    }
    P::sync_lanes();  // all lanes have read what was found
    found_ = 0;
    return true;
  }

  /// Rows of some chunks, one row of each chunk a lane.
  struct Rows {
    u32 pair[kChunksAtOnce];
    u32 exist;  // bit n: pair[n] is valid
  };

  /// Asks for the assignments (pairs) that row `row` of the found chunks from index `first` on
  /// carries, for chunks before index `end`. Nothing is conditional, so that all loads are under
  /// way together.
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

  /// Counts row `row` of found chunks for its token. The assignments of the next chunks are under
  /// way meanwhile; the loop is short, because a single warp that runs through much code waits for
  /// that code.
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
        // Relaxed: a number. A fence stands before it (take_in) and another before what is handed
        // out (hand_out_complete), so the warp that counts a token's last row has the results of
        // the rows that other warps have counted.
        back[n] = P::template add_relaxed<Scope::block>(
            &rank_.os.rows_back[token[n] / OsMemory::kTokensPerWord],
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
      // A plain store: published with the part's word.
      rank_.memory.ready_tokens[first_ready_ + ready_ + P::lanes_before(lanes)] = token;
    }
    ready_ += P::count(lanes);
  }

  /// Hands out the tokens that have become complete.
  void hand_out_complete() {
    if (handed_out_ == ready_) {
      return;
    }
    if (P::kReturnsSubscribers > 1) {
      // Pairs with the fences of the other returns subscribers in take_in, through rows_back.
      P::template acquire_fence<Scope::block>();
    }
    P::sync_lanes();
    // Publishes what all lanes have noted, and the results acquired above, to the processors that
    // acquire the part.
    P::template publish_fence<Scope::device>();
    const u32 each = rank_.geometry().combine_tokens(call_.tokens);
    hand_out(ceil_div(ready_ - handed_out_, each), [&](u32 part) {
      const u32 first = handed_out_ + part * each;
      return combine_word(call_.epoch, first_ready_ + first, minimum(each, ready_ - first));
    });
    handed_out_ = ready_;
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
  u32 first_ready_;            // this warp's first index in ready_tokens
  bool routed_ = false;
  bool unsent_handed_out_ = false;
  bool overflows_ = false;  // some peer gets more rows than its cell has slots
  GraceTime<P> grace_time_;
  bool handed_out_up_front_ = false;  // all tokens: processors wait for their rows
  u32 awaited_ = 0;                   // chunks that were not back at the last look
  u32 found_ = 0;                     // chunks that are back and not taken in yet
  u32 ready_ = 0;                     // complete tokens so far
  u32 handed_out_ = 0;                // of these
};

}  // namespace moeos
