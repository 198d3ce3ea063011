// SPDX-License-Identifier: Apache-2.0
// The plan of a call of few rows of several ranks: a function of all sources' counts, so that
// nobody need write its tiles down.
//
// Where no expert here has more rows than fit in one tile, and all of these tiles are cut alike,
// which part is the n-th, and of what rows, follows from the counts by a few sums over the lanes of
// a warp. The arrivals subscriber, which alone decides whether a call is planned so, then only says
// in the ready ring which number is whose; processors look at the counts, which were here before,
// and make descriptors themselves, mostly before they are told (Processor::find). They are
// those that TilePlan::plan_rest() would write (tests/native/test_small_batch_plan.cpp). A rank
// alone has a plan of its own (single_rank_plan.hpp). May not know: flags, the ready ring.
#pragma once

#include "runtime/base.hpp"
#include "runtime/call.hpp"
#include "runtime/layout.hpp"
#include "runtime/planted.hpp"
#include "runtime/rank.hpp"
#include "runtime/task.hpp"
#include "runtime/team.hpp"

namespace moeos {

/// Every function by all lanes of a warp. A lane has experts that follow each other, and keeps
/// their rows in registers: loops over them are unrolled where sizes are constants.
template <Platform P>
class SmallBatchPlan {
 public:
  SmallBatchPlan(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {
    const Geometry& geometry = rank.geometry();
    MOEOS_CHECK(geometry.one_tile_rows() <= 0xff &&  // rows_, Before::rows
                geometry.one_tile_rows() * geometry.local_experts() <= 0xffff);
  }

  /// One of the counts, another one for each part and, by `turn`, of each source. Once it has come,
  /// all are worth a look, and not before: many warps that look at all of them slow down those who
  /// send them.
  const u64* sample(u32 number, u32 turn) const {
    const Geometry& geometry = rank_.geometry();
    return count_at((number + turn) % geometry.world,
                    number / geometry.world % geometry.local_experts());
  }
  /// Whether a count, as it lies in memory, is this call's.
  bool has_come(u64 sealed) const { return is_this_calls(open(sealed)); }

  /// What a look at all counts has found.
  enum class Counts : u32 {
    here,
    missing,  ///< one is not this call's
    too_many  ///< an expert has more rows than a tile: the call has no such plan
  };
  /// Looks at all counts.
  Counts look() {
    const Geometry& geometry = rank_.geometry();
    bool missing = false;
    bool too_many = false;
    for (u32 i = 0; i < experts_each(); ++i) {
      const bool there = first_expert() + i < geometry.local_experts();
      for (u32 four = 0; four < fours(); ++four) {
        const u32 sources = minimum(4U, geometry.world - 4 * four);
        u64 words[4];  // asked for together; of more there are no registers
        for (u32 n = 0; n < sources; ++n) {
          words[n] = count(4 * four + n, minimum(first_expert() + i, geometry.local_experts() - 1));
        }
        u32 rows = 0;
        for (u32 n = 0; n < sources; ++n) {
          const bool came = is_this_calls(words[n]);
          missing = missing || !came;
          too_many = too_many || (came && is_too_many(words[n]));
          rows |= static_cast<u32>(words[n]) << (8 * n);
        }
        rows_[i * fours() + four] = there ? rows : 0;
      }
    }
    return P::ballot(too_many) != 0  ? Counts::too_many
           : P::ballot(missing) != 0 ? Counts::missing
                                     : Counts::here;
  }

  /// Says which count look() did not want.
  void name_damaged(Failure& failure) const {
    const Geometry& geometry = rank_.geometry();
    bool found = false;
#pragma unroll 1
    for (u32 i = 0; i < geometry.world * geometry.local_experts() && !found; ++i) {
      const u64 word = count(i / geometry.local_experts(), i % geometry.local_experts());
      found = !is_this_calls(word) || is_too_many(word);
      failure.peer = i / geometry.local_experts();
      failure.expert = i % geometry.local_experts();
      failure.seen = word;
    }
  }

  /// Parts of both GEMMs of so many tiles.
  static constexpr u32 parts(const Geometry& geometry, u32 tiles) {
    const bool narrow = geometry.narrow_rows != 0;
    return tiles * (geometry.gemm0_parts_of(narrow) + geometry.gemm1_parts_of(narrow));
  }

  /// Part `number` of the plan of what look() has found, first GEMMs before second ones: returns
  /// its word, and makes `task`, which all lanes see, its tile's descriptor; there is no such part:
  /// a word of no call. Sums are made again for each part, which takes less than registers to keep
  /// them would.
  ReadyWord part(u32 number, Task& task) const {
    const Geometry& geometry = rank_.geometry();
    u32 tiles = 0;
    Before before;
    for (u32 i = 0; i < experts_each(); ++i) {
      const Rows rows = rows_of(i);
      tiles += rows.all > 0 ? 1 : 0;
      before.results += rows.laid_out;
    }
    const u32 ends = P::inclusive_scan(tiles);
    const u32 firsts = P::broadcast(ends, P::kLanes - 1) * geometry.gemm0_parts_of(narrow());
    before.tiles = ends - tiles;
    before.results = P::inclusive_scan(before.results) - before.results;
    for (u32 two = 0; two < twos(); ++two) {
      u32 rows = 0;
      for (u32 i = 0; i < experts_each(); ++i) {
        rows += rows_from_two(i, two);
      }
      before.rows[two] = P::inclusive_scan(rows) - rows;
    }
    const bool second = number >= firsts;
    const u32 of_gemm = second ? number - firsts : number;
    const u32 each = second ? geometry.gemm1_parts_of(narrow()) : geometry.gemm0_parts_of(narrow());
    const u32 tile = of_gemm / each;
    if (tile >= P::broadcast(ends, P::kLanes - 1)) {
      return ReadyWord();
    }
    Found found = find(tile, before);
    const u32 owner = lane_with<P>(ends, tile);
    found.expert = P::broadcast(found.expert, owner);
    for (u32 four = 0; four < fours(); ++four) {
      found.rows[four] = P::broadcast(found.rows[four], owner);
    }
    for (u32 two = 0; two < twos(); ++two) {
      found.starts[two] = P::broadcast(found.starts[two], owner);
    }
    const u32 segments = write_segments(found, task);
    if (P::lane() == owner) {
      task.kind = TaskKind::gemm0;
      task.segment_count = static_cast<u8>(segments);
      task.parts = static_cast<u16>(geometry.gemm0_parts_of(narrow()));
      task.epoch = call_.epoch;
      task.local_expert = found.expert;
      task.tile = tile;
      task.rows = found.its.all;
      task.padded_rows = found.its.laid_out;
      task.first_result = found.result;
      task.narrow = narrow() ? 1 : 0;
      task.half_width = 0;
      task.awaits = 1;
      task.in_place = 0;
      if (second) {
        become_gemm1(task, geometry, false);
      }
    }
    P::sync_lanes();  // all lanes see the descriptor
    return ReadyWord(call_.epoch, second ? TaskKind::gemm1 : TaskKind::gemm0, tile, of_gemm % each);
  }

 private:
  static constexpr u32 kSources = Geometry::kMaxSegments;
  /// Words in which a lane keeps its experts' rows, at most: of four sources each.
  static constexpr u32 kOfALane = Geometry::kPlanCounts / P::kLanes + kSources / 4;
  constexpr u32 fours() const { return ceil_div(rank_.geometry().world, 4U); }
  constexpr u32 twos() const { return ceil_div(rank_.geometry().world, 2U); }

  /// What an expert's rows add up to.
  struct Rows {
    u32 all = 0;
    u32 laid_out = 0;  // in its tile, padding included
  };
  /// Of a lane's expert; and of two sources, one in each half of the word.
  u32 rows_from(u32 i, u32 source) const {
    return rows_[i * fours() + source / 4] >> (8 * (source % 4)) & 0xff;
  }
  u32 rows_from_two(u32 i, u32 two) const {
    return rows_from(i, 2 * two) | rows_from(i, 2 * two + 1) << 16;
  }
  Rows rows_of(u32 i) const {
    const u32 align = rank_.geometry().segment_align_of(narrow());
    Rows found;
    for (u32 four = 0; four < fours(); ++four) {  // a byte each, none of which passes into the next
      const u32 rows = rows_[i * fours() + four];
      found.all += sum_of_bytes(rows);
      found.laid_out += sum_of_bytes((rows + (align - 1) * kEach) & ~((align - 1) * kEach));
    }
    found.laid_out = align_up(found.laid_out, Geometry::kSegmentAlign);
    return found;
  }
  static constexpr u32 kEach = 0x01010101;  // one in each byte
  /// Which is below 256.
  static constexpr u32 sum_of_bytes(u32 word) { return word * kEach >> 24; }

  // Of a count, as count_word was before it was sealed.
  bool is_this_calls(u64 count) const { return static_cast<u32>(count >> 32) == call_.epoch; }
  bool is_too_many(u64 count) const {
    return static_cast<u32>(count) > rank_.geometry().one_tile_rows();
  }
  const u64* count_at(u32 source, u32 expert) const {
    return rank_.template here<u64>(rank_.layout.count(call_.epoch, source, expert));
  }
  u64 count(u32 source, u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(count_at(source, expert)));
  }

  constexpr bool narrow() const { return rank_.geometry().narrow_rows != 0; }
  constexpr u32 experts_each() const {
    return ceil_div(rank_.geometry().local_experts(), P::kLanes);
  }
  u32 first_expert() const { return P::lane() * experts_each(); }

  /// What experts before a lane's first one have.
  struct Before {
    u32 tiles = 0;
    u32 results = 0;         // rows of the buffer between the GEMMs
    u32 rows[kSources / 2];  // of each source, in half a word
  };
  /// The expert of a tile, for the lane that has it.
  struct Found {
    u32 expert = 0;
    u32 result = 0;  // the tile's first row in the buffer between the GEMMs
    Rows its;
    u32 rows[kSources / 4];    // of each source: a byte,
    u32 starts[kSources / 2];  // and where they start: half a word
  };

  Found find(u32 tile, Before before) const {
    Found found;
    for (u32 i = 0; i < experts_each(); ++i) {  // no early end, so that nothing is indexed
      const Rows rows = rows_of(i);
      const bool is_it = rows.all > 0 && before.tiles == tile;
      found.expert = is_it ? first_expert() + i : found.expert;
      found.result = is_it ? before.results : found.result;
      found.its = is_it ? rows : found.its;
      for (u32 four = 0; four < fours(); ++four) {
        found.rows[four] = i == 0 || is_it ? rows_[i * fours() + four] : found.rows[four];
      }
      for (u32 two = 0; two < twos(); ++two) {
        found.starts[two] = i == 0 || is_it ? before.rows[two] : found.starts[two];
        before.rows[two] +=
            MOEOS_PLANTED(few_rows_begin_where_others_do) ? 0 : rows_from_two(i, two);
      }
      before.tiles += rows.all > 0 ? 1 : 0;
      before.results += rows.laid_out;
    }
    return found;
  }

  /// All lanes, a source each: writes the segments of a tile; returns how many it has.
  u32 write_segments(const Found& found, Task& task) const {
    u32 segments = 0;
    for (u32 first = 0; first < rank_.geometry().world; first += P::kLanes) {
      const u32 source = first + P::lane();
      u32 its = 0;
      for (u32 four = 0; four < fours(); ++four) {
        its = source / 4 == four ? found.rows[four] >> (8 * (source % 4)) & 0xff : its;
      }
      u32 start = 0;
      for (u32 two = 0; two < twos(); ++two) {
        start = source / 2 == two ? found.starts[two] >> (16 * (source % 2)) & 0xffff : start;
      }
      const u32 all = P::ballot(its > 0);
      if (its > 0) {
        task.segments[segments +
                      (MOEOS_PLANTED(segments_share_a_place) ? 0 : P::lanes_before(all))] =
            Segment{rank_.layout.row(found.expert, 0, start), static_cast<u16>(source),
                    static_cast<u16>(its)};
      }
      segments += P::count(all);
    }
    return segments;
  }

  const Rank<P>& rank_;
  const Call& call_;
  u32 rows_[kOfALane];  // [expert of this lane][source / 4]: a byte for each source
};

}  // namespace moeos
