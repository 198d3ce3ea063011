// SPDX-License-Identifier: Apache-2.0
// Watches the flags of sources' chunks, and knows how many of each source's are up in order.
//
// A flag is a word that holds, sealed, the epoch in which its chunk was last ready. Two actors
// watch flags: those of chunks that have come from peers (landings_subscriber.hpp), and those of
// chunks whose rows are all here (arrivals_subscriber.hpp). Must not depend on: what is made of the
// rows.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

/// The flag, by chunk, that says that all rows of a chunk are here, of the `rows` rows from a
/// source: for a chunk that comes without some rows, our couriers' flag.
template <Platform P>
auto complete_chunk_flags(const Rank<P>& rank, u32 source, u32 rows) {
  return [&rank, source, rows](u32 chunk) -> const u32* {
    const bool replicated = MOEOS_PLANTED(full_chunks_count_as_replicated)
                                ? rank.deduplicates(source, rows)
                                : rank.leaves_out(source, rows, chunk);
    return replicated ? rank.memory.replicated_flag(source, chunk)
                      : rank.template here<u32>(rank.layout.arrived(source, chunk));
  };
}

template <Platform P>
class ChunkFlags {
 public:
  /// A source's prefix while its flags are not watched.
  static constexpr u32 kUnwatched = kNone;
  /// Flags that a lane asks for at once.
  static constexpr u32 kLooks = 8;

  /// A peer is one call ahead at most.
  static constexpr u32 kCallsAhead = 1;

  /// `prefix`: [source] chunks whose flags are up, in order; accessed only by this warp.
  ChunkFlags(const Rank<P>& rank, const Call& call, u32* prefix)
      : rank_(rank), call_(call), prefix_(prefix) {
    for (u32 source = P::lane(); source < rank.geometry().world; source += P::kLanes) {
      prefix[source] = kUnwatched;
    }
    P::sync_lanes();
  }

  /// Looks once at the flags of all sources whose counts are known. watched(source, rows): whether
  /// to watch the flags of a source that sends us `rows` rows; flags(source, rows)(chunk): where a
  /// flag is; note(source, chunks): called by one lane when `chunks` more are up, or at the first
  /// look. Returns whether there is anything new. What was published with a new chunk's flag is
  /// then visible to us and to the actors that acquire what we release.
  ///
  /// `unread`: no rows of the chunks before this one are read because of this look; processors look
  /// at their flags themselves (inputs.hpp). So this look may come late: the peer's call has ended,
  /// and the next one has raised the flag again. That says as much of this call's rows, since a
  /// peer's call ends when all of its rows have come back. For other chunks only this call's flag
  /// counts: until this look has seen it, none of their rows goes back.
  template <class Watched, class Flags, class Note>
  bool look(Watched watched, Flags flags, Note note, u32 unread) {
    bool progress = false;
    const u32 world = rank_.geometry().world;
    const u32 at_once = minimum(world, P::kLanes);
    for (u32 first = 0; first < world; first += at_once) {
      progress =
          look_at(first, minimum(at_once, world - first), watched, flags, note, unread) || progress;
    }
    return progress;
  }

  /// Missing is the first chunk of a watched source that was announced and is not ready.
  template <class Watched>
  Answer answer(Watched watched, Failure& failure) const {
    for (u32 source = 0; source < rank_.geometry().world; ++source) {
      const u32 announced = rank_.os.rows_received(source);
      const u32 chunks = prefix_[source] == kUnwatched ? 0 : prefix_[source];
      const u32 ready = chunks * rank_.geometry().chunk_rows;
      const bool decoded = prefix_[source] != kUnwatched;
      if (watched(source, announced) && (!decoded || ready < announced)) {
        failure.kind = FailureKind::rows_late;
        failure.peer = source;
        failure.chunk = chunks;
        failure.expected = announced;
        failure.seen = ready;
        return Answer::missing;
      }
    }
    return Answer::nothing;
  }

  u32 prefix(u32 source) const { return prefix_[source]; }
  /// Rows of the source's chunks that are ready.
  u32 rows(u32 source) const {
    return minimum(prefix_[source] * rank_.geometry().chunk_rows, rank_.os.rows_received(source));
  }
  /// Whether the counts of all sources are here and their flags are watched.
  bool all_watched() const {
    bool missing = false;
    for (u32 source = P::lane(); source < rank_.geometry().world; source += P::kLanes) {
      missing = missing || prefix_[source] == kUnwatched;
    }
    return P::ballot(missing) == 0;
  }

 private:
  /// Advances the prefixes of `sources` sources from `first_source` on. Each has an equal share of
  /// the lanes, and a lane looks at `kLooks` flags.
  template <class Watched, class Flags, class Note>
  bool look_at(u32 first_source, u32 sources, Watched watched, Flags flags, Note note, u32 unread) {
    const Geometry& geometry = rank_.geometry();
    const u32 share = P::kLanes / sources;
    const u32 turn = P::lane() / share;
    const u32 source = first_source + minimum(turn, sources - 1);
    // Pairs with CountsSubscriber::finish: receive_starts(source) is this call's.
    const bool counted = turn < sources && P::template load_acquire<Scope::block>(
                                               &rank_.os.counts_known[source]) == call_.epoch;
    const u32 all_rows = counted ? rank_.os.rows_received(source) : 0;
    const bool known = counted && watched(source, all_rows);
    if (P::ballot(known) == 0) {
      return false;
    }
    const u32 rows = known ? all_rows : 0;
    const bool first_look = known && prefix_[source] == kUnwatched;
    const u32 before = !known || first_look ? 0 : prefix_[source];
    const u32 chunks = ceil_div(rows, geometry.chunk_rows);
    const u32 first = before + P::lane() % share;
    // Asked for together, in one round trip, and so without conditions: where there is no chunk, a
    // lane looks at another chunk's flag.
    const auto flag = flags(source, rows);
    u32 epochs[kLooks];
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 chunk = minimum(first + i * share, maximum(chunks, 1U) - 1);
      epochs[i] = P::template poll<Scope::system>(flag(chunk));
    }
    u32 here = 0;  // bit i: this lane's i-th chunk
    u32 ahead = kNone;
    u32 seen = 0;
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 chunk = first + i * share;
      const u32 epoch = chunk < chunks ? open(epochs[i]) : 0;
      here |= epoch - call_.epoch <= (chunk < unread ? kCallsAhead : 0) ? 1U << i : 0;
      const bool wrong = epoch > call_.epoch + kCallsAhead;
      ahead = wrong ? chunk : ahead;
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
    // Pairs with send_chunk and with Courier::complete: the rows of these chunks are here.
    P::template acquire_fence<Scope::system>();
    P::sync_lanes();  // all lanes have read the prefixes
    if (known && P::lane() % share == 0) {
      prefix_[source] = before + arrived;
      note(source, arrived);
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

  const Rank<P>& rank_;
  const Call& call_;
  u32* prefix_;
};

}  // namespace moeos
