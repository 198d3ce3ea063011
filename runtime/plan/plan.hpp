// SPDX-License-Identifier: Apache-2.0
// The plan of a call: from counts to numbered parts, one function for any number of ranks.
//
// An expert's rows become tiles by one rule, whatever ranks send them: full tiles of one source's
// rows each, the first source's first, then the remainders of all sources, side by side. Tiles of
// an expert are consecutive, and so are experts. Parts are numbered in order: those of GEMM0 of all
// tiles, then those of GEMM1 of all tiles; the tiles of a large expert take turns. Where rows come
// more slowly than GEMM0 uses them up, as in a gradient call of a rank alone, GEMM1 of earlier
// experts goes between GEMM0 of later ones (Geometry::second_after).
//
// Plan is that function. `Rows` says what is known of the counts, and how it is kept: a processor
// has a few registers of each lane (counted_rows.hpp), the host a table
// (kernels/rows_in_table.hpp). The arrivals subscriber, which makes the same tiles of rows that
// come one by one, uses the rules of this file (tile_plan.hpp). An expert is an expert's place on
// this rank (placement.hpp): the caller gives the counts of its own rank. Must not depend on:
// memory, flags, queues, other ranks.
#pragma once

#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// What tiles add up to.
struct Extent {
  u32 tiles = 0;
  u32 rows = 0;  // padded
};

/// Which source's rows a full tile has.
struct FullTile {
  u32 source;
  u32 nth;  // of this source's full tiles
};
/// Full tile `nth` of an expert; `rows(source)`: the rows that the expert gets from a source.
template <class Rows>
constexpr FullTile full_tile(const Geometry& geometry, u32 nth, Rows rows) {
  u32 source = 0;
  u32 before = 0;  // full tiles of the sources before that one
  for (u32 s = 0, passed = 0; s + 1 < geometry.world; ++s) {
    passed += rows(s) / geometry.tile_rows;
    before = passed <= nth ? passed : before;
    source += passed <= nth ? 1 : 0;
  }
  return {source, nth - before};
}

/// Goes through the tiles that the remainders of an expert's sources make.
///
/// `left(source)`: the source's remainder, less than a tile. append(tile, segment, source, from,
/// rows): a tile's segment has `rows` rows of a source's remainder, from row `from` on. close(tile,
/// result, segments, rows, padded): the tile is complete, and its rows begin at `result`. `apart`:
/// each source has tiles of its own.
template <class Left, class Append, class Close>
constexpr Extent merge_remainders(const Geometry& geometry, bool narrow, bool apart, Left left,
                                  Append append, Close close) {
  const u32 align = geometry.segment_align_of(narrow);
  Extent extent;
  u32 segments = 0;
  u32 rows = 0;
  u32 padded = 0;
  const auto finish = [&] {
    padded = align_up(padded, Geometry::kSegmentAlign);
    close(extent.tiles, extent.rows, segments, rows, padded);
    ++extent.tiles;
    extent.rows += padded;
    segments = rows = padded = 0;
  };
  for (u32 source = 0; source < geometry.world; ++source) {
    u32 from = 0;
    for (u32 its = left(source); its > 0;) {
      // The room is a multiple of `align`: a cut never adds padding.
      const u32 fitting = minimum(its, geometry.tile_rows - padded);
      if (fitting == 0 || segments == geometry.max_segments_of(narrow)) {
        finish();
        continue;
      }
      append(extent.tiles, segments, source, from, fitting);
      ++segments;
      rows += fitting;
      padded += align_up(fitting, align);
      from += fitting;
      its -= fitting;
    }
    if (apart && segments > 0) {
      finish();
    }
  }
  if (segments > 0) {
    finish();
  }
  return extent;
}

/// The part at index `place` of the order in which `tiles` tiles take turns: the first part of
/// each, then the second.
struct Turn {
  u32 tile;
  u32 part;
};
constexpr Turn turn_at(u32 place, u32 tiles) { return {place % tiles, place / tiles}; }

/// Fills a descriptor of a tile's GEMM0, except its segments and its seal.
constexpr void describe_tile(Task& task, const Geometry& geometry, u32 epoch, u32 expert, u32 tile,
                             u32 segments, u32 rows, u32 padded, u32 result, bool narrow) {
  task.kind = kFirstProduct.kind;
  task.segment_count = static_cast<u8>(segments);
  task.parts = static_cast<u16>(parts_of(geometry, kFirstProduct.kind, narrow));
  task.epoch = epoch;
  task.local_expert = expert;
  task.tile = tile;
  task.rows = rows;
  task.padded_rows = padded;
  task.first_result = result;
  task.narrow = narrow ? 1 : 0;
}

/// Totals of an expert's rows.
struct ExpertRows {
  u32 tiles;
  u32 padded;  // rows of these tiles
  bool narrow;
};

/// One tile of an expert.
struct TileRows {
  u32 segments;
  u32 rows;
  u32 padded;
  u32 result;  // its first row, among the expert's rows as they are laid out
};

/// Lanes have consecutive experts. `L`: a warp's lanes; every function is called by all of them.
/// `Rows`: the rows of these experts, with the functions of RowsInTable
/// (kernels/rows_in_table.hpp).
template <class L, class Rows>
class Plan {
 public:
  /// `rows` may become known later.
  explicit constexpr Plan(const Rows& rows) : rows_(rows) {}

  /// Called once the rows are known; the other functions may be called after it.
  constexpr void make() {
    Extent its;
    for (u32 i = 0; i < rows_.experts_each(); ++i) {
      const ExpertRows rows = rows_.of(rows_.at(i));
      its.tiles += rows.tiles;
      its.rows += rows.padded;
    }
    const u32 tile_ends = L::inclusive_scan(its.tiles);
    tiles_ = L::broadcast(tile_ends, L::kLanes - 1);
    first_tile_ = tile_ends - its.tiles;
    first_result_ = L::inclusive_scan(its.rows) - its.rows;
    uncut_tiles_ = tiles_ - rows_.geometry().tiles_in_halves(tiles_);
    for (u32 nth = 0; nth < kProductsOfTile; ++nth) {
      ends_[nth] = Rows::kOneTileEach ? tile_ends * parts_of_tile(nth == 1)
                                      : L::inclusive_scan(parts_of_lane(nth == 1));
    }
  }

  constexpr Rows& rows() { return rows_; }

  /// Parts of all products of all tiles; and of GEMM0 (nth = 0) or GEMM1 (nth = 1).
  constexpr u32 parts() const { return parts_of(0) + parts_of(1); }
  constexpr u32 parts_of(u32 nth) const {
    return Rows::kOneTileEach ? tiles_ * parts_of_tile(nth == 1)
                              : L::broadcast(ends_[nth], L::kLanes - 1);
  }

  /// Returns the word of part `number` and makes `task`, which all lanes see, its tile's
  /// descriptor.
  constexpr ReadyWord part(u32 number, Task& task) const {
    const Geometry& geometry = rows_.geometry();
    const u32 epoch = rows_.epoch();
    const auto [second, of_product] = product_at(number);
    const u32 ends = second ? ends_[1] : ends_[0];
    const u32 owner = lane_with<L>(ends, of_product);
    const u32 begin =
        Rows::kOneTileEach ? first_tile_ * parts_of_tile(second) : ends - parts_of_lane(second);
    Found found{rows_.first()};
    // Only the owner's experts have the part. Where all tiles are cut alike, the other lanes find
    // something harmless, and a condition would cost more.
    if (Rows::kOneTileEach || L::lane() == owner) {
      find(second, of_product - begin, found);
    }
    const TileRows tile = rows_.tile(found.expert, found.at, found.nth, owner, task);
    if (L::lane() == owner) {
      describe_tile(task, geometry, epoch, found.expert, found.tile, tile.segments, tile.rows,
                    tile.padded, found.result + tile.result, found.narrow);
      task.half_width = 0;
      task.awaits = kAwaitsByCounts;
      task.from = kFirstProduct.rows;
      if (second) {
        become_second(task, geometry, found.in_halves);
      }
    }
    const u32 part = L::broadcast(found.part, owner);
    L::sync_lanes();  // all lanes see the descriptor
    MOEOS_CHECK(task.tile < geometry.tiles_max());
    if (!second) {
      rows_.note_tokens(task);
    }
    const ReadyWord word(epoch, product_kind(second ? 1 : 0), task.tile, part);
    return !Rows::kOneTileEach && task.half_width != 0 ? word.cut_in_halves() : word;
  }

 private:
  /// Which product a part is of, and its number among that product's parts.
  struct OfProduct {
    bool second;
    u32 number;
  };
  /// All GEMM0 parts, then all GEMM1 parts; or a lane's experts' GEMM1 parts as soon as
  /// `second_after` GEMM0 parts follow the experts' own (Geometry::second_after). So each part
  /// still comes after all that it awaits.
  constexpr OfProduct product_at(u32 number) const {
    const u32 first_parts = parts_of(0);
    const u32 after = rows_.geometry().second_after;
    if (Rows::kOneTileEach || after == 0) {
      const bool second = number >= first_parts;
      return {second, second ? number - first_parts : number};
    }
    // GEMM0 parts before this lane's GEMM1 parts; these end after them and all earlier lanes'
    // GEMM1.
    const u32 before = minimum(ends_[0] + after, first_parts);
    const u32 passed = L::count(L::ballot(before + ends_[1] <= number));  // lanes, the first ones
    const u32 its = minimum(passed, L::kLanes - 1);
    const u32 done = passed == 0 ? 0 : L::broadcast(ends_[1], passed - 1);
    const u32 first = L::broadcast(before, its);
    const bool second = passed < L::kLanes && number >= first + done;
    return {second, number - (second ? first : done)};
  }

  /// Tiles of a large expert whose parts take turns, the first part of each, then the second:
  /// between two parts that share weights, only the weights of other parts are then loaded, and not
  /// a whole tile's, which the cache does not keep. Turns took 6 % off 8192 tokens of DeepSeek-V3.
  static constexpr u32 kTurn = 32;

  /// How an expert's tiles are cut for one of the products: some whole, the rest in halves.
  struct Cut {
    u32 tiles;
    u32 parts;  // of each
    u32 tiles_in_halves;
    u32 halves;  // of each of these
    constexpr u32 all() const { return tiles * parts + tiles_in_halves * halves; }
  };
  /// `tile`: the expert's first tile.
  constexpr Cut cut_of(bool second, const ExpertRows& its, u32 tile) const {
    const Geometry& geometry = rows_.geometry();
    if (Rows::kOneTileEach) {
      return {its.tiles, parts_of_tile(second), 0, 0};
    }
    if (!second || its.narrow) {
      return {its.tiles, moeos::parts_of(geometry, product_kind(second ? 1 : 0), its.narrow), 0, 0};
    }
    const u32 uncut = minimum(its.tiles, maximum(uncut_tiles_, tile) - tile);
    return {uncut, moeos::parts_of(geometry, kSecondProduct.kind, false), its.tiles - uncut,
            moeos::parts_of(geometry, kSecondProduct.kind,
                            !MOEOS_PLANTED(half_of_the_halves_is_missing))};
  }
  /// Parts of a tile, where each expert has one tile and all are cut alike.
  constexpr u32 parts_of_tile(bool second) const {
    const Geometry& geometry = rows_.geometry();
    const bool narrow = geometry.narrow_rows != 0;
    return moeos::parts_of(geometry, product_kind(second ? 1 : 0), narrow);
  }
  constexpr u32 parts_of_lane(bool second) const {
    u32 parts = 0;
    u32 tile = first_tile_;
    for (u32 i = 0; i < rows_.experts_each(); ++i) {
      const ExpertRows its = rows_.of(rows_.at(i));
      parts += cut_of(second, its, tile).all();
      tile += its.tiles;
    }
    return parts;
  }

  /// A part of a lane's experts.
  struct Found {
    typename Rows::At at;  // its expert
    u32 expert = 0;
    u32 nth = 0;     // which of this expert's tiles
    u32 tile = 0;    // which of all
    u32 result = 0;  // where the expert's rows begin as they are laid out
    u32 part = 0;
    bool narrow = false;
    bool in_halves = false;
  };
  /// Finds part `left` of the parts of a lane's experts; by the lane that has it.
  constexpr void find(bool second, u32 left, Found& its_part) const {
    typename Rows::At at = its_part.at;
    u32 expert = rows_.first_expert();
    u32 tile = first_tile_;
    u32 result = first_result_;
    bool found = false;  // selects, not an early exit, so that nothing is indexed
    for (u32 i = 0; i < rows_.experts_each(); ++i) {
      const ExpertRows its = rows_.of(rows_.at(i));
      const u32 parts = cut_of(second, its, tile).all();
      const bool is_last = i + 1 == rows_.experts_each();  // the last one takes the rest
      const bool passes = !found && !is_last && left >= parts;
      rows_.look(at, i, found);
      rows_.pass(at, i, passes);
      found = !passes;
      left -= passes ? parts : 0;
      expert += passes ? 1 : 0;
      tile += passes ? its.tiles : 0;
      result += passes ? its.padded : 0;
    }
    const ExpertRows its = rows_.of(at);
    const Cut cut = cut_of(second, its, tile);
    MOEOS_CHECK(Rows::kOneTileEach || left < cut.all());
    const bool in_halves = left >= cut.tiles * cut.parts;
    left -= in_halves ? cut.tiles * cut.parts : 0;
    const u32 each = in_halves ? cut.halves : cut.parts;
    const u32 turn = !Rows::kOneTileEach && rows_.geometry().large_experts != 0 ? kTurn : 1;
    const u32 first = Rows::kOneTileEach ? 0 : left / (turn * each) * turn;
    const u32 rest = (in_halves ? cut.tiles_in_halves : cut.tiles) - first;
    const u32 together =
        turn == 1 || MOEOS_PLANTED(turns_go_beyond_tiles) ? turn : minimum(turn, rest);
    const Turn its_turn = turn_at(left - first * each, together);
    const u32 nth = (in_halves ? cut.tiles : 0) + first + its_turn.tile;
    const u32 part =
        MOEOS_PLANTED(tiles_by_turns_repeat_parts) ? its_turn.part / 2 * 2 : its_turn.part;
    its_part = {at, expert, nth, tile + nth, result, part, its.narrow, in_halves};
  }

  Rows rows_;
  u32 tiles_ = 0;                // of all experts
  u32 first_tile_ = 0;           // of this lane's experts
  u32 first_result_ = 0;         // for the owner, which has summed them
  u32 uncut_tiles_ = 0;          // all tiles whose GEMM1 is not cut in halves
  u32 ends_[kProductsOfTile]{};  // of each product: parts up to this lane's last one
};

}  // namespace moeos
