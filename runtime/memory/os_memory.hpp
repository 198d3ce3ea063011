// SPDX-License-Identifier: Apache-2.0
// What only the actors of the OS block access: lists, counters and facts of one call, sized from
// Geometry.
//
// Must not depend on: the actors that wait; the contents of a rank's own memory (memory.hpp).
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/geometry_of.hpp"

namespace moeos {

/// A chunk of ours that is under way: its number among all peers' chunks, and its rows. One word,
/// because the OS block keeps one for each chunk that a call can send.
class SentChunk {
 public:
  static constexpr u32 kRowBits = 6;
  static constexpr u32 kRows = 1U << kRowBits;
  static constexpr u32 kNumbers = 1U << (32 - kRowBits);

  constexpr SentChunk() = default;
  constexpr SentChunk(u32 number, u32 rows) : bits_(number << kRowBits | rows) {
    MOEOS_CHECK(number < kNumbers && rows < kRows);
  }
  constexpr u32 number() const { return bits_ >> kRowBits; }
  constexpr u32 rows() const { return bits_ & (kRows - 1); }

 private:
  u32 bits_ = 0;
};

/// A group of tokens of one owner, among the owners that hold slices of the same experts
/// (slices.hpp).
class SumGroup {
 public:
  static constexpr u32 kGroupBits = 16;
  /// Groups of an owner, and owners, at most.
  static constexpr u32 kGroupsMost = (1U << kGroupBits) - 1;
  static constexpr u32 kOwnersMost = (1U << (32 - kGroupBits)) - 1;

  constexpr SumGroup() = default;
  constexpr SumGroup(u32 owner, u32 group) : bits_(owner << kGroupBits | group) {
    MOEOS_CHECK(owner < kOwnersMost && group < kGroupsMost);
  }
  constexpr u32 owner() const { return bits_ >> kGroupBits; }
  constexpr u32 group() const { return bits_ & ((1U << kGroupBits) - 1); }

 private:
  u32 bits_ = 0;
};

/// What the OS block looks up of a tile: half a word, because a call may have many.
class TileFacts {
 public:
  static constexpr u32 kExperts = 1U << 15;

  constexpr TileFacts() = default;
  constexpr TileFacts(u32 local_expert, bool narrow)
      : bits_(static_cast<u16>(local_expert << 1 | (narrow ? 1 : 0))) {
    MOEOS_CHECK(local_expert < kExperts);
  }
  constexpr u32 local_expert() const { return bits_ >> 1; }
  constexpr bool narrow() const { return (bits_ & 1) != 0; }

 private:
  u16 bits_ = 0;
};

/// How a call's tiles are made, as the arrivals subscriber announces it to the returns subscribers.
enum class Planned : u32 {
  unknown,     ///< it has not decided
  up_front,    ///< all at once: processors wait for what their parts need
  by_arrival,  ///< as their rows arrive
};

/// What only the actors of the OS block access: in its shared memory on the GPU, where a look costs
/// a tenth of a look at global memory.
class OsMemory {
 public:
  static u64 bytes(const Geometry& geometry) { return OsMemory(geometry, nullptr).bytes_; }

  /// `geometry` must outlive this object.
  OsMemory(const Geometry& geometry, u8* base) : geometry_(geometry) {
    u64 offset = 0;
    const auto take = [&offset, base]<class T>(T*& array, u64 count) {
      array = reinterpret_cast<T*>(base + offset);
      offset = align_up(offset + count * sizeof(T), u64{16});
    };
    const u64 world = geometry.world;
    const u64 local = geometry.local_experts();
    take(rows_expected, 1);
    take(wanted, 1);
    take(inquiry, 1);
    take(returns_ready, 1);
    take(returns_listed, 1);
    take(published, 1);
    take(planned, 1);
    take(tile_facts, geometry.tiles_max());
    take(receive_start, world * (local + 1));
    take(counts_known, world);
    take(alike, world);
    take(taken, world * local);
    take(rows_arrived, world);
    take(packed, local);
    take(waiting, local);
    take(chunk_prefix, world);
    take(landed_prefix, world);
    take(landed_listed, world);
    take(chunks_awaited, geometry.chunks_sent_max() + kReturnsSubscribersMax);
    take(chunks_found, kReturnsSubscribersMax * kFoundMost);
    take(rows_back, ceil_div(geometry.max_tokens, kTokensPerWord));
    if (geometry.sliced()) {
      take(slices_heard, geometry.slices);
      take(sums_awaited, geometry.sum_groups_all());
    }
    if (geometry.remote != 0) {
      take(outbox_next, kSendersMax * world);
    }
    bytes_ = offset;
  }

  u32* receive_starts(u32 source) const {
    return receive_start + u64{source} * (geometry_.get().local_experts() + 1);
  }
  /// Rows that `source` sends us in this call; valid once its counts are known.
  u32 rows_received(u32 source) const {
    return receive_starts(source)[geometry_.get().local_experts()];
  }
  /// The list of one of `subscribers` returns subscribers, which share the chunks out evenly.
  SentChunk* awaited_by(u32 subscriber, u32 subscribers) const {
    return chunks_awaited +
           u64{subscriber} * ceil_div(geometry_.get().chunks_sent_max(), subscribers);
  }
  static constexpr u32 kTokensPerWord = 2;

  u32* rows_expected = nullptr;   // Algorithm 2's bound: rows to return; corrected as counts arrive
  u32* wanted = nullptr;          // parts that the scheduler would publish if it had them
  u32* inquiry = nullptr;         // os.hpp: which subscriber is asked what it waits for
  u32* returns_ready = nullptr;   // returns subscribers that have cleared their share of the words
  u32* returns_listed = nullptr;  // returns subscribers that have listed the chunks that they wait
                                  // for
  u32* published = nullptr;       // slots of the ready ring that hold this call's parts
  u32* planned = nullptr;         // how this call's tiles are made, as Planned
  TileFacts* tile_facts = nullptr;  // [tile]: of this call
  u32* receive_start = nullptr;     // [source][X + 1]: as RankMemory's, which processors read
  u32* counts_known = nullptr;      // [source]: the epoch whose counts are decoded
  u32* alike = nullptr;          // [source]: the epoch in which it has said that it makes our call
  u32* taken = nullptr;          // [source][expert]: rows already in a tile
  u32* rows_arrived = nullptr;   // [source]: kNone while its counts are not known
  u32* packed = nullptr;         // [expert]: 1 once all of its rows are in tiles
  u32* waiting = nullptr;        // [expert]: rows that are here and in no tile, at the last count
  u32* chunk_prefix = nullptr;   // [source]: chunks whose rows are all here, in order
  u32* landed_prefix = nullptr;  // [source]: landed chunks, in order, of a source that sends each
                                 // token once
  u32* landed_listed = nullptr;  // [source]: those of these chunks that have been listed
  SentChunk* chunks_awaited = nullptr;  // awaited_by() each subscriber: chunks that are not back
  static constexpr u32 kFoundMost = 512;
  SentChunk* chunks_found = nullptr;  // [subscriber][kFoundMost]: back, and not counted yet
  u32* rows_back = nullptr;  // [token / 2]: half a word for each token: its rows that are back

  // Slices of experts; null when there are none.
  u32* slices_heard = nullptr;       // [slice]: 1 once it has said which call it makes
  SumGroup* sums_awaited = nullptr;  // groups whose sums are not here

  // Remote peers; null when there are none.
  static constexpr u32 kSendersMax = 8;
  u32* outbox_next = nullptr;  // [sender][peer]: the next request that this sender looks for

 private:
  GeometryOf geometry_;
  u64 bytes_ = 0;
};

}  // namespace moeos
