// SPDX-License-Identifier: Apache-2.0
// What a processor's warp knows of a call's counts, from which it plans its parts (plan.hpp): the
// counts of a rank that is alone, or of few rows from several ranks.
//
// A warp that has the counts can say which part is the n-th, and of what tile. So processors find
// the parts themselves, and the arrivals subscriber says how many there are. A rank alone plans
// every call so: no other rank has rows for it, and none is late. For few rows from several ranks,
// no expert here may have more than fit in one tile, and all of these tiles are cut alike. There
// the first processor that has seen all counts decides that a call is planned so, unless the
// subscriber has begun to make tiles without them (FoundBy). The tiles are those that
// TilePlan::plan_rest() would write (tests/native/plan/test_few_rows.cpp). Must not depend on:
// flags, the ready ring.
#pragma once

#include "runtime/memory/layout.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Informs this rank's processors which expert a token that is read in place has chosen for a pair;
/// kNone: none.
template <Platform P>
void tell_choice(const RankMemory& memory, u32 epoch, u32 pair, u32 expert) {
  // Relaxed, as for a count: the word carries its own epoch and publishes nothing but itself.
  P::template store_relaxed<Scope::device>(&memory.choices[pair], count_word(epoch, expert));
}

/// The rows of a rank that is alone. Every function is called by all lanes of a warp. A lane has
/// consecutive experts and keeps their rows in registers: loops over them are unrolled where sizes
/// are constants.
template <Platform P>
class OneSourceRows {
 public:
  static constexpr bool kOneTileEach = false;

  OneSourceRows(const Rank<P>& rank, const Call& call)
      : rank_(rank), call_(call), in_place_(rank.geometry().reads_in_place(call.tokens)) {}

  /// Looks once at the `nth` word; true if it is here, so that the others will be soon. For waiting
  /// processors: all of them wait, and if they looked at all words, others would wait for memory.
  bool begun(u32 nth) const {
    const u64 word = in_place_ ? choice(nth % pairs()) : count(nth % rank_.geometry().experts);
    return agreed<P>(epoch_of(word)) == call_.epoch;
  }

  /// Looks once at all words; false as long as one is not here or is impossible (then the counts
  /// subscriber ends the call).
  bool look() { return in_place_ ? look_at_choices() : look_at_counts(); }

  const Geometry& geometry() const { return rank_.geometry(); }
  u32 epoch() const { return call_.epoch; }
  constexpr u32 experts_each() const { return ceil_div(rank_.geometry().experts, P::kLanes); }
  u32 first_expert() const { return P::lane() * experts_each(); }

  struct At {
    u32 rows;
    u32 start;  // of these, among all
  };
  At at(u32 i) const { return {rows_[i], 0}; }
  ExpertRows of(const At& at) const {
    const u32 padded = align_up(at.rows, Geometry::kSegmentAlign);
    return {ceil_div(at.rows, geometry().tile_rows), padded, geometry().is_narrow(padded)};
  }
  At first() const { return {0, start_}; }
  void look(At& at, u32 i, bool found) const { at.rows = found ? at.rows : rows_[i]; }
  void pass(At& at, u32 i, bool passes) const { at.start += passes ? rows_[i] : 0; }

  TileRows tile(u32 expert, const At& at, u32 nth, u32 owner, Task& task) const {
    const u32 slot = nth * geometry().tile_rows;
    const u32 rows = minimum(geometry().tile_rows, at.rows - slot);
    if (P::lane() == owner) {
      task.segments[0] = Segment{rank_.layout.row(expert, slot, at.start),
                                 static_cast<u16>(rank_.rank), static_cast<u16>(rows)};
    }
    return {1, rows, align_up(rows, Geometry::kSegmentAlign), slot};
  }

  /// Notes the tokens of a tile's rows: the first pairs that have chosen its expert, in their
  /// order, as many as are sent (routing_map.hpp).
  void note_tokens(Task& task) const {
    if (!in_place_) {
      return;
    }
    u32 tokens = 0;  // this lane's
    u32 rows = 0;
    for (u32 i = 0; i < kPairsOfALane; ++i) {
      const bool chose = chosen_[i] == task.local_expert;
      const u32 all = P::ballot(chose);
      const u32 row = rows + P::lanes_before(all);
      const u32 token = (i * P::kLanes + P::lane()) / rank_.geometry().top_k;
      tokens |=
          chose && row < task.rows
              ? as_row(MOEOS_PLANTED(tiles_in_place_have_other_tokens) ? token / 2 : token, row)
              : 0;
      rows += P::count(all);
    }
    tokens = P::exclusive_or(tokens);  // no two lanes have the same bits
    if (P::lane() == 0) {
      task.from = RowsIn::listed_tokens;
      task.tokens = tokens;
    }
    P::sync_lanes();
  }

 private:
  static constexpr u32 kOfALane = Geometry::kPlanExperts / P::kLanes;
  static constexpr u32 kPairsOfALane = ceil_div(Geometry::kInPlacePairs, P::kLanes);

  /// Looks at the counts: how many rows each expert gets.
  bool look_at_counts() {
    const Geometry& geometry = rank_.geometry();
    u64 words[kOfALane];  // all asked for before the first is looked at
    for (u32 i = 0; i < experts_each(); ++i) {
      words[i] = count(minimum(first_expert() + i, geometry.experts - 1));
    }
    bool missing = false;
    u32 all = 0;
    for (u32 i = 0; i < experts_each(); ++i) {
      const u32 rows = static_cast<u32>(words[i]);
      missing = missing ||
                (epoch_of(words[i]) != call_.epoch && !MOEOS_PLANTED(old_counts_are_planned_by)) ||
                rows > geometry.capacity;
      rows_[i] = first_expert() + i < geometry.experts ? rows : 0;
      all += rows_[i];
    }
    if (P::ballot(missing) != 0) {
      return false;
    }
    const u32 ends = P::inclusive_scan(all);
    start_ = ends - all;
    return P::broadcast(ends, P::kLanes - 1) <= geometry.cell_rows_used();
  }

  /// Looks at the choices of a call whose tokens are read in place.
  bool look_at_choices() {
    u64 words[kPairsOfALane];  // all asked for before the first is looked at
    for (u32 i = 0; i < kPairsOfALane; ++i) {
      words[i] = choice(minimum(i * P::kLanes + P::lane(), pairs() - 1));
    }
    bool missing = false;
    for (u32 i = 0; i < kPairsOfALane; ++i) {
      const bool there = i * P::kLanes + P::lane() < pairs();
      const u32 expert = static_cast<u32>(words[i]);
      missing = missing ||
                (epoch_of(words[i]) != call_.epoch && !MOEOS_PLANTED(old_choices_are_planned_by)) ||
                (expert >= rank_.geometry().experts && expert != kNone);
      chosen_[i] = there ? expert : kNone;
    }
    if (P::ballot(missing) != 0) {
      return false;
    }
    for (u32 i = 0; i < experts_each(); ++i) {
      rows_[i] = 0;
    }
    for (u32 i = 0; i < kPairsOfALane && i * P::kLanes < pairs(); ++i) {
      const u32 left = minimum(P::kLanes, pairs() - i * P::kLanes);
#pragma unroll 4
      for (u32 lane = 0; lane < left; ++lane) {
        const u32 expert = P::broadcast(chosen_[i], lane);
        for (u32 mine = 0; mine < experts_each(); ++mine) {
          rows_[mine] += first_expert() + mine == expert ? 1 : 0;
        }
      }
    }
    u32 all = 0;
    for (u32 i = 0; i < experts_each(); ++i) {
      rows_[i] = minimum(rows_[i], call_.pair_limit);
      all += rows_[i];
    }
    start_ = P::inclusive_scan(all) - all;
    return true;
  }

  /// A count word, opened.
  u64 count(u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.count(call_.epoch, rank_.rank, expert))));
  }
  /// A pair's choice, opened: its expert, or kNone (tell_choice).
  u64 choice(u32 pair) const {
    return open(P::template load_relaxed<Scope::device>(&rank_.memory.choices[pair]));
  }
  u32 pairs() const { return call_.tokens * rank_.geometry().top_k; }
  static constexpr u32 epoch_of(u64 count) { return static_cast<u32>(count >> 32); }

  const Rank<P>& rank_;
  const Call& call_;
  bool in_place_;
  u32 chosen_[kPairsOfALane];  // of pairs i * P::kLanes + lane, where tokens are read in place
  u32 rows_[kOfALane];         // rows of this lane's experts
  u32 start_ = 0;              // where the first expert's rows start
};

/// Few rows of each expert, from up to eight sources. Has the functions of OneSourceRows.
template <Platform P>
class FewRows {
 public:
  static constexpr bool kOneTileEach = true;

  FewRows(const Rank<P>& rank, const Call& call) : rank_(rank), call_(call) {
    const Geometry& geometry = rank.geometry();
    MOEOS_CHECK(geometry.one_tile_rows() <= 0xff &&  // rows_, At::starts
                geometry.one_tile_rows() * geometry.local_experts() <= 0xffff);
  }

  /// One of the counts: another one for each part and, by `turn`, of each source in turn. Once it
  /// has come, all are worth a look, and not before: many warps that look at all counts slow down
  /// the ranks that send them.
  const u64* sample(u32 number, u32 turn) const {
    const Geometry& geometry = rank_.geometry();
    return counts_of(call_.epoch, number / geometry.world % geometry.local_experts()) +
           (number + turn) % geometry.world * geometry.local_experts();
  }
  /// Whether a count, as it lies in memory, is this call's.
  bool has_come(u64 sealed) const { return is_this_calls(open(sealed)); }

  /// What a look at all counts has found.
  enum class Counts : u32 {
    here,
    missing,  ///< one is not this call's
    too_many  ///< of an expert, or of a source: the call has no such plan
  };
  /// Looks at all counts, and at which call each source makes.
  Counts look() {
    const Geometry& geometry = rank_.geometry();
    // For this look only: otherwise the addresses below would take registers for all parts.
    const u32 epoch = P::opaque(call_.epoch);
    bool missing = makes_another_call(epoch);
    bool too_many = false;
    for (u32 i = 0; i < experts_each(); ++i) {
      const bool there = first_expert() + i < geometry.local_experts();
      const u64* const counts =
          counts_of(epoch, minimum(first_expert() + i, geometry.local_experts() - 1));
      for (u32 four = 0; four < fours(); ++four) {
        const u32 sources = minimum(4U, geometry.world - 4 * four);
        u64 words[4];  // asked for together; there are no registers for more
        for (u32 n = 0; n < sources; ++n) {
          words[n] = count_at(counts, 4 * four + n);
        }
        u32 rows = 0;
        for (u32 n = 0; n < sources; ++n) {
          const bool came = is_this_calls(words[n]);
          missing = missing || !came;
          too_many = too_many || (came && is_too_many(words[n]));
          // A missing count counts as one row, so that a plan of incomplete counts is still a valid
          // one.
          rows |= (came ? static_cast<u32>(words[n]) : 1) << (8 * n);
        }
        rows_[i * fours() + four] = there ? rows : 0;
      }
    }
    if (P::ballot(too_many) != 0) {
      return Counts::too_many;
    }
    if (P::ballot(missing) != 0) {
      return Counts::missing;
    }
    return are_few() || MOEOS_PLANTED(many_rows_are_planned_as_few) ? Counts::here
                                                                    : Counts::too_many;
  }

  /// Names the count that look() rejected.
  void name_damaged(Failure& failure) const {
    const Geometry& geometry = rank_.geometry();
    bool found = false;
#pragma unroll 1
    for (u32 i = 0; i < geometry.world * geometry.local_experts() && !found; ++i) {
      const u64 word = count_at(counts_of(call_.epoch, i % geometry.local_experts()),
                                i / geometry.local_experts());
      found = !is_this_calls(word) || is_too_many(word);
      failure.peer = i / geometry.local_experts();
      failure.expert = i % geometry.local_experts();
      failure.seen = word;
    }
  }

  const Geometry& geometry() const { return rank_.geometry(); }
  u32 epoch() const { return call_.epoch; }
  constexpr u32 experts_each() const {
    return ceil_div(rank_.geometry().local_experts(), P::kLanes);
  }
  u32 first_expert() const { return P::lane() * experts_each(); }

  static constexpr u32 kSources = Geometry::kMaxSegments;
  struct At {
    u32 rows[kSources / 4];    // of each source: a byte
    u32 starts[kSources / 2];  // where they start: half a word
  };
  At at(u32 i) const {
    At at;
    look(at, i, false);
    return at;
  }
  ExpertRows of(const At& at) const {
    const u32 align = geometry().segment_align_of(narrow());
    u32 padded = 0;
    for (u32 four = 0; four < fours(); ++four) {
      padded += sum_of_bytes(aligned(at.rows[four], align));
    }
    return {rows_in(at) > 0 ? 1U : 0U, align_up(padded, Geometry::kSegmentAlign), narrow()};
  }
  /// Computes the sums again for each part, which costs less than registers to keep them.
  At first() const {
    At at;
    for (u32 two = 0; two < twos(); ++two) {
      const u32 rows = rows_of_lane(two);
      at.starts[two] = P::inclusive_scan(rows) - rows;
    }
    return at;
  }
  void look(At& at, u32 i, bool found) const {
    for (u32 four = 0; four < fours(); ++four) {
      at.rows[four] = found ? at.rows[four] : rows_[i * fours() + four];
    }
  }
  void pass(At& at, u32 i, bool passes) const {
    for (u32 two = 0; two < twos(); ++two) {
      at.starts[two] +=
          passes && !MOEOS_PLANTED(few_rows_begin_where_others_do) ? rows_from_two(i, two) : 0;
    }
  }

  /// Each lane writes the segment of one source.
  TileRows tile(u32 expert, At at, u32 /*nth*/, u32 owner, Task& task) const {
    TileRows found{0, rows_in(at), of(at).padded, 0};  // for the owner, which has summed them
    expert = P::broadcast(expert, owner);
    for (u32 four = 0; four < fours(); ++four) {
      at.rows[four] = P::broadcast(at.rows[four], owner);
    }
    for (u32 two = 0; two < twos(); ++two) {
      at.starts[two] = P::broadcast(at.starts[two], owner);
    }
    for (u32 first = 0; first < geometry().world; first += P::kLanes) {
      const u32 source = first + P::lane();
      u32 its = 0;
      for (u32 four = 0; four < fours(); ++four) {
        its = source / 4 == four ? at.rows[four] >> (8 * (source % 4)) & 0xff : its;
      }
      u32 start = 0;
      for (u32 two = 0; two < twos(); ++two) {
        start = source / 2 == two ? at.starts[two] >> (16 * (source % 2)) & 0xffff : start;
      }
      const u32 all = P::ballot(its > 0);
      if (its > 0) {
        task.segments[found.segments +
                      (MOEOS_PLANTED(segments_share_a_place) ? 0 : P::lanes_before(all))] = Segment{
            rank_.layout.row(expert, 0, start), static_cast<u16>(source), static_cast<u16>(its)};
      }
      found.segments += P::count(all);
    }
    return found;
  }
  void note_tokens(Task& /*task*/) const {}

 private:
  /// Whether one of this lane's sources has not said that it makes our call; without that its
  /// counts are not known (CountsSubscriber).
  bool makes_another_call(u32 epoch) const {
    bool another = false;
    for (u32 first = 0; rank_.geometry().world > 1 && first < rank_.geometry().world;
         first += P::kLanes) {
      const u32 source = minimum(first + P::lane(), rank_.geometry().world - 1);
      // Relaxed, as for a count: it publishes nothing but itself.
      const u64 said = P::template load_relaxed<Scope::system>(
          rank_.template here<u64>(rank_.layout.call_of(epoch, rank_.everywhere(source))));
      another = another || said != count_word(call_.epoch, call_.identity);
    }
    return another;
  }

  /// Whether each expert's rows are one tile, each source's rows are within the limit, and all rows
  /// have slots between the products. Requires that all counts are here.
  bool are_few() const {
    const Geometry& geometry = rank_.geometry();
    const u32 align = geometry.segment_align_of(narrow());
    bool many = false;
    u32 padded = 0;  // of this lane's experts
    for (u32 i = 0; i < experts_each(); ++i) {
      u32 its = 0;
      for (u32 four = 0; four < fours(); ++four) {  // two bytes' sums in each half
        const u32 rows = aligned(rows_[i * fours() + four], align);
        const u32 two = (rows & kHalves) + (rows >> 8 & kHalves);
        its += (two & 0xffff) + (two >> 16);
      }
      its = align_up(its, Geometry::kSegmentAlign);
      many = many || its > geometry.one_tile_rows();
      padded += its;
    }
    if (!geometry.few_rows_come_alone()) {
      for (u32 two = 0; two < twos(); ++two) {
        const u32 rows = P::broadcast(P::inclusive_scan(rows_of_lane(two)), P::kLanes - 1);
        many = many || (rows & 0xffff) > geometry.few_rows_of_source() ||
               rows >> 16 > geometry.few_rows_of_source();
      }
    }
    if (!geometry.few_rows_have_places()) {
      padded = P::broadcast(P::inclusive_scan(padded), P::kLanes - 1);
      many = many || padded > geometry.pool_rows();
    }
    return P::ballot(many) == 0;
  }

  /// Words in which a lane keeps its experts' rows, at most: each word has four sources.
  static constexpr u32 kOfALane = Geometry::kPlanCounts / P::kLanes + kSources / 4;
  constexpr u32 fours() const { return ceil_div(rank_.geometry().world, 4U); }
  constexpr u32 twos() const { return ceil_div(rank_.geometry().world, 2U); }

  /// Rows of a lane's expert: from one source; and from two sources, one in each half of the word.
  u32 rows_from(u32 i, u32 source) const {
    return rows_[i * fours() + source / 4] >> (8 * (source % 4)) & 0xff;
  }
  u32 rows_from_two(u32 i, u32 two) const {
    return rows_from(i, 2 * two) | rows_from(i, 2 * two + 1) << 16;
  }
  /// Sums over all experts of a lane.
  u32 rows_of_lane(u32 two) const {
    u32 rows = 0;
    for (u32 i = 0; i < experts_each(); ++i) {
      rows += rows_from_two(i, two);
    }
    return rows;
  }
  /// Rows of an expert.
  u32 rows_in(const At& at) const {
    u32 all = 0;
    for (u32 four = 0; four < fours(); ++four) {
      all += sum_of_bytes(at.rows[four]);
    }
    return all;
  }
  static constexpr u32 kEach = 0x01010101;    // one in each byte
  static constexpr u32 kHalves = 0x00ff00ff;  // the lower byte of each half
  /// Each byte rounded up; none passes into the next.
  static constexpr u32 aligned(u32 word, u32 align) {
    return (word + (align - 1) * kEach) & ~((align - 1) * kEach);
  }
  /// Requires that the sum is below 256.
  static constexpr u32 sum_of_bytes(u32 word) { return word * kEach >> 24; }

  // `count`: a count word, opened.
  bool is_this_calls(u64 count) const { return static_cast<u32>(count >> 32) == call_.epoch; }
  bool is_too_many(u64 count) const {
    return static_cast<u32>(count) > rank_.geometry().one_tile_rows();
  }
  /// An expert's count from the first source; other sources' counts follow, each local_experts()
  /// further on.
  const u64* counts_of(u32 epoch, u32 expert) const {
    return rank_.template here<u64>(rank_.layout.count(epoch, 0, expert));
  }
  u64 count_at(const u64* counts, u32 source) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        &counts[u64{source} * rank_.geometry().local_experts()]));
  }

  constexpr bool narrow() const { return rank_.geometry().narrow_rows != 0; }

  const Rank<P>& rank_;
  const Call& call_;
  u32 rows_[kOfALane];  // [expert of this lane][source / 4]: a byte for each source
};

}  // namespace moeos
