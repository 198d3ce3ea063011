// SPDX-License-Identifier: Apache-2.0
// The plan of a call of a rank that is alone: a function of the rows that its experts get, so that
// nobody need hand its parts out.
//
// Whoever has the counts can say which part is the n-th, and of what tile: a processor finds its
// own (processor.hpp), some microseconds before anybody could tell it, and the arrivals subscriber
// how many there are. Each expert's rows are cut into tiles, whether they are here or not; all
// first GEMMs go before all second ones, so that a part waits for none behind it. Of several ranks
// somebody may be late, and then tiles are made of the rows that are here (tile_plan.hpp). May not
// know: flags, the ready ring.
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
class SingleRankPlan {
 public:
  SingleRankPlan(const Rank<P>& rank, const Call& call)
      : rank_(rank), call_(call), in_place_(rank.geometry().reads_in_place(call.tokens)) {}

  /// Looks once at the `nth` word; whether it is here, and the others will be soon. For whoever
  /// waits: all processors do, and if they looked at all words, others would wait for memory.
  bool begun(u32 nth) const {
    const u64 word = in_place_ ? choice(nth % pairs()) : count(nth % rank_.geometry().experts);
    return agreed<P>(epoch_of(word)) == call_.epoch;
  }

  /// Looks once at all words; false as long as one is not here, or cannot be one (then the counts
  /// subscriber ends the call).
  bool look() { return in_place_ ? look_at_choices() : look_at_counts(); }

  /// Makes the plan, of what look() has found. Behind it the others may be called.
  void make() {
    const Geometry& geometry = rank_.geometry();
    u32 tiles = 0;
    u32 results = 0;
    for (u32 i = 0; i < experts_each(); ++i) {
      tiles += ceil_div(rows_[i], geometry.tile_rows);
      results += align_up(rows_[i], Geometry::kSegmentAlign);
    }
    const u32 tile_ends = P::inclusive_scan(tiles);
    const u32 all_tiles = P::broadcast(tile_ends, P::kLanes - 1);
    first_tile_ = tile_ends - tiles;
    first_result_ = P::inclusive_scan(results) - results;
    uncut_tiles_ = all_tiles - geometry.tiles_in_halves(all_tiles);
    for (u32 gemm = 0; gemm < 2; ++gemm) {
      ends_[gemm] = P::inclusive_scan(parts_of_lane(gemm == 1));
    }
  }

  /// Parts of both GEMMs of all tiles.
  u32 parts() const { return parts_of(0) + parts_of(1); }

  /// Part `number` of them: returns its word, and makes `task`, which all lanes see, its tile's
  /// descriptor.
  ReadyWord part(u32 number, Task& task) const {
    const u32 first_parts = parts_of(0);
    const bool second = number >= first_parts;
    const u32 of_gemm = second ? number - first_parts : number;
    const u32 ends = second ? ends_[1] : ends_[0];
    const u32 owner = lane_with<P>(ends, of_gemm);
    u32 part = 0;
    if (P::lane() == owner) {
      part = write(second, of_gemm - (ends - parts_of_lane(second)), task);
    }
    part = P::broadcast(part, owner);
    P::sync_lanes();  // all lanes see the descriptor
    MOEOS_CHECK(task.tile < rank_.geometry().tiles_max());
    if (in_place_ && !second) {
      note_tokens(task);
    }
    const ReadyWord word(call_.epoch, task.kind, task.tile, part);
    return task.half_width != 0 ? word.cut_in_halves() : word;
  }

 private:
  static constexpr u32 kOfALane = Geometry::kPlanExperts / P::kLanes;
  static constexpr u32 kPairsOfALane = ceil_div(Geometry::kInPlacePairs, P::kLanes);

  /// By counts: how many rows each expert gets.
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

  /// By the choices of a call whose tokens are read in place.
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

  /// Notes whose tokens a tile's rows are: those of the first pairs that have chosen its expert, in
  /// their order, as many as are sent (routing_map.hpp).
  void note_tokens(Task& task) const {
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
    tokens = P::exclusive_or(tokens);  // of no two lanes the same bits
    if (P::lane() == 0) {
      task.in_place = 1;
      task.tokens = tokens;
    }
    P::sync_lanes();
  }

  /// Tiles of a large expert whose parts go by turns, the first part of each, then the second: what
  /// is loaded between two parts that share weights is then some other parts, and not a whole
  /// tile's, which the cache does not keep (docs/log/0013-turns.md).
  static constexpr u32 kTurn = 32;

  /// As count_word was before it was sealed.
  u64 count(u32 expert) const {
    // A count word carries its own epoch and publishes nothing but itself.
    return open(P::template load_relaxed<Scope::system>(
        rank_.template here<u64>(rank_.layout.count(call_.epoch, rank_.rank, expert))));
  }
  /// Likewise, of a pair's expert, or kNone (tell_choice).
  u64 choice(u32 pair) const {
    return open(P::template load_relaxed<Scope::device>(&rank_.memory.choices[pair]));
  }
  u32 pairs() const { return call_.tokens * rank_.geometry().top_k; }
  static constexpr u32 epoch_of(u64 count) { return static_cast<u32>(count >> 32); }

  u32 parts_of(u32 gemm) const { return P::broadcast(ends_[gemm], P::kLanes - 1); }

  constexpr u32 experts_each() const { return ceil_div(rank_.geometry().experts, P::kLanes); }
  u32 first_expert() const { return P::lane() * experts_each(); }

  /// How an expert's tiles are cut for one of the GEMMs: some, then some in halves.
  struct Cut {
    u32 tiles;
    u32 parts;  // of each
    u32 tiles_in_halves;
    u32 halves;  // of each of these
    constexpr u32 all() const { return tiles * parts + tiles_in_halves * halves; }
  };
  /// `tile`: its first one.
  Cut cut_of(bool second, u32 rows, u32 tile) const {
    const Geometry& geometry = rank_.geometry();
    const u32 tiles = ceil_div(rows, geometry.tile_rows);
    if (!second || is_narrow(rows)) {
      return {tiles,
              second ? geometry.gemm1_parts_of(true) : geometry.gemm0_parts_of(is_narrow(rows)), 0,
              0};
    }
    const u32 uncut = minimum(tiles, maximum(uncut_tiles_, tile) - tile);
    return {uncut, geometry.gemm1_parts_of(false), tiles - uncut,
            geometry.gemm1_parts_of(!MOEOS_PLANTED(half_of_the_halves_is_missing))};
  }
  bool is_narrow(u32 rows) const {
    return align_up(rows, Geometry::kSegmentAlign) <= rank_.geometry().narrow_rows;
  }
  u32 parts_of_lane(bool second) const {
    u32 parts = 0;
    u32 tile = first_tile_;
    for (u32 i = 0; i < experts_each(); ++i) {
      parts += cut_of(second, rows_[i], tile).all();
      tile += ceil_div(rows_[i], rank_.geometry().tile_rows);
    }
    return parts;
  }

  /// One lane: finds part `left` of those of its experts, writes its tile's descriptor, and returns
  /// which of the tile's parts it is.
  u32 write(bool second, u32 left, Task& task) const {
    const Geometry& geometry = rank_.geometry();
    u32 expert = first_expert();
    u32 rows = 0;
    u32 start = start_;
    u32 tile = first_tile_;
    u32 result = first_result_;
    bool found = false;  // selects, not an early end, so that nothing is indexed
    for (u32 i = 0; i < experts_each(); ++i) {
      const u32 parts = cut_of(second, rows_[i], tile).all();
      const bool passes = !found && left >= parts;
      rows = found ? rows : rows_[i];
      found = !passes;
      left -= passes ? parts : 0;
      expert += passes ? 1 : 0;
      start += passes ? rows_[i] : 0;
      tile += passes ? ceil_div(rows_[i], geometry.tile_rows) : 0;
      result += passes ? align_up(rows_[i], Geometry::kSegmentAlign) : 0;
    }
    MOEOS_CHECK(found);
    const Cut cut = cut_of(second, rows, tile);
    const bool in_halves = left >= cut.tiles * cut.parts;
    left -= in_halves ? cut.tiles * cut.parts : 0;
    const u32 each = in_halves ? cut.halves : cut.parts;
    const u32 turn = geometry.large_experts != 0 ? kTurn : 1;
    const u32 first = left / (turn * each) * turn;
    const u32 of_turn = left - first * each;
    const u32 rest = (in_halves ? cut.tiles_in_halves : cut.tiles) - first;
    const u32 together = MOEOS_PLANTED(turns_go_beyond_tiles) ? turn : minimum(turn, rest);
    const u32 nth = (in_halves ? cut.tiles : 0) + first + of_turn % together;
    const u32 slot = nth * geometry.tile_rows;
    task = Task{};
    task.kind = TaskKind::gemm0;
    task.segment_count = 1;
    task.parts = static_cast<u16>(geometry.gemm0_parts_of(is_narrow(rows)));
    task.epoch = call_.epoch;
    task.local_expert = expert;
    task.tile = tile + nth;
    task.rows = minimum(geometry.tile_rows, rows - slot);
    task.padded_rows = align_up(task.rows, Geometry::kSegmentAlign);
    task.first_result = result + slot;
    task.narrow = is_narrow(rows) ? 1 : 0;
    task.awaits = 1;
    task.segments[0] = Segment{rank_.layout.row(expert, slot, start), static_cast<u16>(rank_.rank),
                               static_cast<u16>(task.rows)};
    if (second) {
      become_gemm1(task, geometry, in_halves);
    }
    const u32 part = of_turn / together;
    return MOEOS_PLANTED(tiles_by_turns_repeat_parts) ? part / 2 * 2 : part;
  }

  const Rank<P>& rank_;
  const Call& call_;
  bool in_place_;
  u32 chosen_[kPairsOfALane];  // of pairs i * P::kLanes + the lane, where tokens are read in place
  u32 rows_[kOfALane];         // of this lane's experts,
  u32 start_ = 0;              // and where the first one's start
  u32 first_tile_ = 0;         // likewise its tiles,
  u32 first_result_ = 0;
  u32 uncut_tiles_ = 0;  // of all tiles, those whose second GEMM is not cut in halves
  u32 ends_[2];          // of each GEMM: parts up to this lane's last one
};

}  // namespace moeos
