// SPDX-License-Identifier: Apache-2.0
// The subscriber of rows that have landed from sources that send each token once: lists their
// chunks for couriers, which complete them.
//
// A token has a row for each expert that it goes to, and several of these experts may live here. A
// source that sends many rows sends only the first row of a token over the link, in the order of
// sending, and writes for each row which row holds its token (Layout::origin); but its first chunks
// bring all of their rows (Geometry::dedup_after) and need no couriers. Chunks land in order, so
// when one has landed, all rows that it copies from are here: couriers copy them
// (TaskKind::replicate) and set a flag of this rank's own, which the arrivals subscriber watches
// instead of the peer's. (DeepEP, too, sends a token over the network once to a node and forwards
// it there over NVLink.)
//
// One of the actors of Algorithm 2 that watch what peers write: step() looks once at its words and
// returns whether anything was new, and answer() says what it still waits for. Must not depend on:
// how rows are copied; tiles.
#pragma once

#include "runtime/health/grace_time.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/plan/kept_parts.hpp"
#include "runtime/queues/chunk_flags.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

template <Platform P>
class LandingsSubscriber {
 public:
  LandingsSubscriber(const Rank<P>& rank, const Call& call)
      : rank_(rank),
        state_(rank.memory.call(call.epoch)),
        call_(call),
        flags_(rank, call, rank.os.landed_prefix) {
    for (u32 source = P::lane(); source < rank.geometry().world; source += P::kLanes) {
      rank.os.landed_listed[source] = 0;
    }
    P::sync_lanes();
  }

  bool step() {
    if (!rank_.geometry().deduplicates_any() || landed_ == all_) {
      return false;
    }
    const bool landed = flags_.look(
        deduplicating(),
        [this](u32 source, u32) {
          return [this, source](u32 chunk) {
            return rank_.template here<u32>(rank_.layout.arrived(source, chunk));
          };
        },
        [](u32, u32) {}, rank_.geometry().dedup_after);
    const u32 landed_before = landed_;
    const u32 listed_before = listed_;
    for (u32 source = 0; landed && source < rank_.geometry().world; ++source) {
      if (flags_.prefix(source) != ChunkFlags<P>::kUnwatched) {
        list(source);
      }
    }
    if (listed_ != listed_before) {
      P::sync_lanes();
      if (P::lane() == 0) {
        // Publishes the list, and the rows and origins that this warp has acquired, to the couriers
        // that subtract from this number; pairs with Courier::take_replication.
        P::template add_release<Scope::device>(&state_.replications_ready.value,
                                               listed_ - listed_before);
      }
    }
    const bool counted = all_ == kNone && count_all();
    return landed_ != landed_before || counted;
  }

  /// Missing is the first chunk that was announced and has not come, unless a third rank may be the
  /// reason, as in ArrivalsSubscriber.
  Answer answer(Failure& failure) {
    const bool late = flags_.answer(deduplicating(), failure) == Answer::missing &&
                      first_before_kept(rank_, call_).rows() == 0;
    return grace_time_.answer(late, kept_links(rank_.geometry()), rank_.deadline_ns);
  }

 private:
  /// Returns a predicate: whether a source that sends us `rows` rows sends each of its tokens once.
  auto deduplicating() const {
    return [this](u32 source, u32 rows) { return rank_.deduplicates(source, rows); };
  }

  /// Whether the counts of all sources are here, and with them the number of chunks to come.
  bool count_all() {
    const Geometry& geometry = rank_.geometry();
    u32 chunks = 0;
    u32 replicated = 0;
    bool missing = false;
    for (u32 source = P::lane(); source < geometry.world; source += P::kLanes) {
      // Pairs with CountsSubscriber::finish: receive_starts(source) is this call's.
      if (P::template load_acquire<Scope::block>(&rank_.os.counts_known[source]) != call_.epoch) {
        missing = true;
        continue;
      }
      const u32 rows = rank_.os.rows_received(source);
      const bool deduplicated = rank_.deduplicates(source, rows);
      chunks += deduplicated ? ceil_div(rows, geometry.chunk_rows) : 0;
      replicated += deduplicated ? geometry.chunks_replicated(rows) : 0;
    }
    if (P::ballot(missing) != 0) {
      return false;
    }
    all_ = P::broadcast(P::inclusive_scan(chunks), P::kLanes - 1);
    replicated = P::broadcast(P::inclusive_scan(replicated), P::kLanes - 1);
    if (P::lane() == 0) {
      // Relaxed: a number by which couriers see that there will be no more.
      P::template store_relaxed<Scope::device>(&state_.replications_all.value, 1 + replicated);
    }
    return true;
  }

  /// Lists the chunks of a source that have landed since the last time, except the first ones,
  /// which bring all of their rows.
  void list(u32 source) {
    const u32 before = rank_.os.landed_listed[source];
    const u32 end = flags_.prefix(source);
    const u32 first = minimum(maximum(before, rank_.geometry().dedup_after), end);
    MOEOS_CHECK(listed_ + (end - first) <= rank_.geometry().replications_max());
    const u32 listed = first + (MOEOS_PLANTED(first_chunks_have_no_courier) ? 1 : 0);
    for (u32 chunk = listed + P::lane(); chunk < end; chunk += P::kLanes) {
      rank_.memory.replication_list[listed_ + chunk - first] =
          replicate_word(call_.epoch, source, chunk).sealed();
    }
    P::sync_lanes();  // all lanes have read where this source's chunks begin
    if (P::lane() == 0) {
      rank_.os.landed_listed[source] = end;
    }
    landed_ += end - before;
    listed_ += end - first;
  }

  const Rank<P>& rank_;
  CallState& state_;
  const Call& call_;
  ChunkFlags<P> flags_;
  GraceTime<P> grace_time_;
  u32 landed_ = 0;   // chunks
  u32 all_ = kNone;  // that there will be, once all counts are here
  u32 listed_ = 0;   // of those that have landed
};

}  // namespace moeos
