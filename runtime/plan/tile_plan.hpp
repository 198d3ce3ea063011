// SPDX-License-Identifier: Apache-2.0
// Algorithm 2's decoding step: arrived rows become row tiles, product tasks with up to eight
// segments.
//
// A tile full of one source's rows is made as soon as these rows are here. Each source's remainder,
// less than a tile, is merged with the other sources' remainders once all of them are complete, so
// that at decode sizes a weight is read once and not once a source; when processors idle,
// remainders that are here are packed without waiting. A large expert's full tiles also wait until
// the expert's rows are complete, or until processors have nothing else to compute: then all of its
// tiles are consecutive, and its weights are read once and not once a source. Rows are independent,
// so packing never changes a result.
//
// A tile is made when there are slots for its rows between the two products. Where there are fewer
// slots than a call may have rows (Geometry::reuses_places), they form a ring: the next tile takes
// the slots after the last tile's, once the tiles that had them have been multiplied. No tile that
// is made waits for one that is not, so there is no cycle of waits.
//
// A source that has more rows for this rank than its cell has slots waits for its own rows to be
// computed (courier.hpp). So none of these rows may wait for another source: the source's remainder
// is a tile of its own. Must not depend on: flags, queues, how a tile is computed.
#pragma once

#include "runtime/memory/layout.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/os_memory.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Keeps one call's packing state in the OS block's memory; only the arrivals subscriber's warp
/// accesses it, a lane for each expert. Every function is called by all lanes.
template <Platform P>
class TilePlan {
 public:
  TilePlan(const Layout& layout, const RankMemory& memory, const OsMemory& os)
      : layout_(layout), memory_(memory), os_(os) {}

  /// Forgets the last call.
  void begin(u32 epoch) {
    const Geometry& geometry = layout_.geometry();
    epoch_ = epoch;
    tiles_ = 0;
    results_ = 0;
    multiplied_ = 0;
    free_to_ = geometry.pool_rows();
    held_back_ = false;
    early_left_ = geometry.early_tiles();
    up_front_ = false;
    all_fed_ = false;
    unpacked_ = geometry.local_experts();
    for (u32 i = P::lane(); i < geometry.world * geometry.local_experts(); i += P::kLanes) {
      os_.taken[i] = 0;
    }
    for (u32 p = P::lane(); p < geometry.world; p += P::kLanes) {
      os_.rows_arrived[p] = kNone;
    }
    for (u32 e = P::lane(); e < geometry.local_experts(); e += P::kLanes) {
      os_.packed[e] = 0;
    }
    P::sync_lanes();
  }

  /// Writes the Product0 descriptors of new tiles; false if there are none.
  ///
  /// `news`: rows have arrived since the last time; OsMemory::rows_arrived has them. `parts`: how
  /// many parts could be computed at once. For these, full tiles of large experts that are
  /// incomplete are made, the first experts' first, whose rows all sources send first; a smaller
  /// expert's full tile is made as soon as its rows are here. `early`: the number of experts, those
  /// with most rows, whose rows that are here are all packed, complete or not, while the budget for
  /// early tiles lasts.
  bool advance(bool news, u32 parts, u32 early) {
    const Geometry& geometry = layout_.geometry();
    const u32 before = tiles_;
    if (geometry.reuses_places() && held_back_ && find_free_places()) {
      held_back_ = false;
      news = true;
    }
    parts = geometry.large_experts != 0 && (news || !all_fed_) ? parts : 0;
    // One round for news and wants, then one for early packing; a loop, so that there is one copy
    // of plan()'s code.
#pragma unroll 1
    for (u32 round = 0; round < 2; ++round) {
      const bool packs = round == 1;
      const Fullest fullest =
          packs ? find_fullest(minimum(early, early_left_ / geometry.remainder_tiles()))
                : Fullest{};
      if (packs ? fullest.none() : !news && parts == 0) {
        continue;
      }
      const u32 had = tiles_;
      plan(packs ? 0 : parts, fullest);
      early_left_ -= packs ? minimum(early_left_, tiles_ - had) : 0;
    }
    return tiles_ != before;
  }

  /// Writes the descriptors of all of the call's tiles that have not been made, whether their rows
  /// are here or not: the processors that compute them wait for the rows. Requires that all counts
  /// are known.
  void plan_rest() {
    for (u32 source = P::lane(); source < layout_.geometry().world; source += P::kLanes) {
      os_.rows_arrived[source] = os_.rows_received(source);
    }
    P::sync_lanes();
    up_front_ = true;
    plan(0, Fullest{});
    MOEOS_CHECK(complete());
  }

  /// Whether all tiles of the call get slots between the products that no other tile has had.
  /// Requires that all counts are known.
  bool fits() const {
    const Geometry& geometry = layout_.geometry();
    if (!geometry.reuses_places()) {
      return true;
    }
    // The padding that a tile may waste beyond its segments' padding: a full tile wastes none; each
    // other tile but the last has the maximum number of segments, each the last rows of one source.
    const u32 align = maximum(Geometry::kSegmentAlign, geometry.segment_align);
    const u32 waste =
        Geometry::kSegmentAlign * (geometry.world / geometry.max_segments_of(false) + 1);
    u32 rows = 0;
    for (u32 expert = P::lane(); expert < geometry.local_experts(); expert += P::kLanes) {
      u32 its = 0;
      for (u32 source = 0; source < geometry.world; ++source) {
        const u32* starts = os_.receive_starts(source);
        its += align_up(starts[expert + 1] - starts[expert] - taken(source, expert), align);
      }
      rows += its == 0 ? 0 : its + waste;
    }
    return results_ + P::broadcast(P::inclusive_scan(rows), P::kLanes - 1) <= geometry.pool_rows();
  }

  /// Tiles planned so far in this call. A tile's number is its descriptor's.
  u32 tiles() const { return tiles_; }
  /// Whether these are all of this call's tiles: all rows are here, and in tiles.
  bool complete() const { return unpacked_ == 0; }

 private:
  /// What is known of an expert's rows.
  struct Rows {
    u32 full = 0;          // full tiles of one source each, of rows that are here and in no tile
    u32 more = 0;          // such rows beyond these tiles
    u32 padded = 0;        // all rows that are announced, each source's padded
    bool apart = false;    // some source's remainder waits for no other (is_apart)
    bool complete = true;  // all are announced, and here
  };
  /// The experts with most rows that are here and in no tile: all that have more than `more_than`,
  /// and the first `of_as_many` of those that have exactly as many.
  struct Fullest {
    u32 more_than = kNone;
    u32 of_as_many = 0;
    bool none() const { return more_than == kNone; }
  };

  /// Finds which tiles, in their order, have been multiplied: their slots are free. True if slots
  /// have become free.
  bool find_free_places() {
    const u32 tile = multiplied_ + P::lane();
    const bool made = tile < tiles_;
    const u32 word = P::template poll<Scope::device>(&memory_.tiles_multiplied[made ? tile : 0]);
    const u32 others = P::ballot(!made || word != seal(epoch_));
    const u32 tiles = others == 0 ? P::kLanes : P::first_lane(others);
    if (tiles == 0) {
      return false;
    }
    // Pairs with Processor::complete: their rows have been read.
    P::template acquire_fence<Scope::device>();
    const u32 rows = P::lane() < tiles ? descriptor(tile).padded_rows : 0;
    multiplied_ += tiles;
    free_to_ += P::broadcast(P::inclusive_scan(rows), P::kLanes - 1);
    return true;
  }

  /// The `experts` fullest experts, or all that have rows.
  Fullest find_fullest(u32 experts) const {
    const Geometry& geometry = layout_.geometry();
    if (experts == 0) {
      return {};
    }
    for (u32 expert = P::lane(); expert < geometry.local_experts(); expert += P::kLanes) {
      const Rows rows = rows_of(expert);
      os_.waiting[expert] = rows.full * geometry.tile_rows + rows.more;
    }
    P::sync_lanes();
    experts = minimum(experts, with_rows(1));
    if (experts == 0) {
      return {};
    }
    u32 most = 0;  // the most rows that `experts` experts have, bit by bit
#pragma unroll 1
    for (u32 bit = 1U << 31; bit != 0; bit >>= 1) {
      most |= with_rows(most | bit) >= experts ? bit : 0;
    }
    const Fullest found{most, experts - with_rows(most + 1)};
    P::sync_lanes();  // all lanes have read the numbers
    return found;
  }

  /// How many experts have at least `rows` rows waiting.
  u32 with_rows(u32 rows) const {
    const u32 experts = layout_.geometry().local_experts();
    u32 count = 0;
    for (u32 first = 0; first < experts; first += P::kLanes) {
      const u32 expert = first + P::lane();
      count += P::count(P::ballot(expert < experts && os_.waiting[expert] >= rows));
    }
    return count;
  }

  /// Plans the new tiles of experts that are complete; the full tiles of all others, or, with large
  /// experts, of the first ones that make up `parts` parts; and for the fullest experts all rows
  /// that are here.
  ///
  /// A step of the subscriber is mostly this function, and processors wait as long as it takes for
  /// rows that are here: so it keeps what it has looked at, and the lanes share out the writing of
  /// full tiles, which are all alike.
  void plan(u32 parts, Fullest fullest) {
    const Geometry& geometry = layout_.geometry();
    u32 fed = 0;  // full tiles, also of complete experts
    bool all_fed = true;
    u32 as_many = 0;  // experts that have as many rows as the last of the fullest
    for (u32 first = 0; first < geometry.local_experts(); first += P::kLanes) {
      const u32 expert = minimum(first + P::lane(), geometry.local_experts() - 1);
      const bool open = first + P::lane() < geometry.local_experts() && os_.packed[expert] == 0;
      const Rows rows = rows_of(expert);
      bool complete = open && rows.complete;
      const u32 waiting = rows.full * geometry.tile_rows + rows.more;
      const u32 ties = P::ballot(open && waiting == fullest.more_than);
      const bool tie =
          waiting == fullest.more_than && as_many + P::lanes_before(ties) < fullest.of_as_many;
      as_many += P::count(ties);
      bool merge = complete || (open && (waiting > fullest.more_than || tie));
      bool apart = open && !merge && rows.apart;
      const bool narrow = geometry.is_narrow(rows.padded);
      MOEOS_CHECK(rows.full == 0 || !narrow);
      u32 full = open ? rows.full : 0;
      if (geometry.large_experts != 0) {
        const u32 mine = parts > 0 ? full : 0;
        const u32 before = fed + P::inclusive_scan(mine) - mine;
        fed = P::broadcast(before + mine, P::kLanes - 1);
        const bool feeds = before * geometry.product0_parts < parts;
        all_fed = all_fed && P::ballot(mine > 0 && !complete && !feeds) == 0;
        full = merge || apart ? full : feeds ? mine : 0;
      }
      bool merges = (merge && rows.more > 0) || apart;
      Extent extent{full, full * geometry.tile_rows};
      if (merges) {
        const Extent merged = merge_sources<false>(expert, apart, narrow, 0, 0);
        extent = {full + merged.tiles, extent.rows + merged.rows};
      }
      if (geometry.reuses_places() && !up_front_) {
        const u32 before = P::inclusive_scan(extent.rows) - extent.rows;  // earlier lanes first
        const u32 room = free_to_ - results_ - minimum(free_to_ - results_, before);
        const bool all = extent.rows <= room || MOEOS_PLANTED(rows_share_places);
        held_back_ = P::ballot(!all) != 0 || held_back_;
        complete = all && complete;
        merge = all && merge;
        apart = all && apart;
        merges = all && merges;
        full = all ? full : minimum(full, room / geometry.tile_rows);
        extent = all ? extent : Extent{full, full * geometry.tile_rows};
      }
      const u32 tiles = P::inclusive_scan(extent.tiles);
      const u32 results = P::inclusive_scan(extent.rows);
      const Extent begin{tiles_ + tiles - extent.tiles, results_ + results - extent.rows};
      write_full_tiles(first, full, begin);
      if (merges) {
        merge_sources<true>(expert, apart, narrow, begin.tiles + full,
                            begin.rows + full * geometry.tile_rows);
      }
      P::sync_lanes();  // all lanes have read what is in tiles already
      if (merge || apart || full > 0) {
        take(expert, full, merge, apart);
      }
      if (complete) {
        os_.packed[expert] = 1;
      }
      unpacked_ -= P::count(P::ballot(complete));
      tiles_ += P::broadcast(tiles, P::kLanes - 1);
      results_ += P::broadcast(results, P::kLanes - 1);
      MOEOS_CHECK(tiles_ <= geometry.tiles_max());
      MOEOS_CHECK(geometry.reuses_places() || results_ <= geometry.tiled_rows_max());
    }
    all_fed_ = parts > 0 && all_fed;
    P::sync_lanes();
  }

  Rows rows_of(u32 expert) const {
    const Geometry& geometry = layout_.geometry();
    Rows rows;
    for (u32 source = 0; source < geometry.world; ++source) {
      if (os_.rows_arrived[source] == kNone) {
        rows.complete = false;
        continue;
      }
      const u32* starts = os_.receive_starts(source);
      const u32 announced = starts[expert + 1] - starts[expert];
      const u32 here = ready(source, expert);
      rows.full += here / geometry.tile_rows;
      rows.more += here % geometry.tile_rows;
      rows.padded += align_up(announced, Geometry::kSegmentAlign);
      rows.apart = rows.apart || is_apart(source, expert);
      rows.complete = rows.complete && here + taken(source, expert) == announced;
    }
    return rows;
  }

  /// Rows of (source, expert) that are here and in no tile yet.
  u32 ready(u32 source, u32 expert) const {
    const u32 arrived = os_.rows_arrived[source];
    if (arrived == kNone) {
      return 0;  // its counts are not known yet: the starts below would be another call's
    }
    const u32* starts = os_.receive_starts(source);
    const u32 start = starts[expert];
    return minimum(maximum(arrived, start), starts[expert + 1]) - start - taken(source, expert);
  }

  /// Whether a source's remainder of an expert, less than a tile, waits for no other source's: all
  /// of these rows are here, and the source has more rows for this rank than its cell has slots.
  bool is_apart(u32 source, u32 expert) const {
    const Geometry& geometry = layout_.geometry();
    if (!geometry.rings_cells() || os_.rows_arrived[source] == kNone) {
      return false;
    }
    const u32* starts = os_.receive_starts(source);
    return geometry.overflows(os_.rows_received(source)) &&
           os_.rows_arrived[source] >= starts[expert + 1] &&
           ready(source, expert) % geometry.tile_rows != 0;
  }

  u32& taken(u32 source, u32 expert) const {
    return os_.taken[source * layout_.geometry().local_experts() + expert];
  }

  /// Notes that rows of the expert that are here are now in tiles: those of `full` full tiles, the
  /// first sources' first; all of them if `all` is set; with `apart`, also the remainders that
  /// merge_sources made tiles of.
  void take(u32 expert, u32 full, bool all, bool apart) const {
    const u32 tile_rows = layout_.geometry().tile_rows;
    for (u32 source = 0; source < layout_.geometry().world; ++source) {
      const u32 here = ready(source, expert);
      const u32 tiles = minimum(here / tile_rows, full);
      const bool whole = all || (apart && is_apart(source, expert));
      taken(source, expert) += whole ? here : tiles * tile_rows;
      full -= tiles;
    }
  }

  /// By all lanes: writes the descriptors of full tiles. Expert `first` + lane has `full` of them,
  /// whose numbers and result rows begin at `begin`; the lanes share them out.
  void write_full_tiles(u32 first, u32 full, Extent begin) const {
    const Geometry& geometry = layout_.geometry();
    const u32 ends = P::inclusive_scan(full);
    const u32 all = P::broadcast(ends, P::kLanes - 1);
    for (u32 base = 0; base < all; base += P::kLanes) {
      const u32 number = minimum(base + P::lane(), all - 1);
      const u32 owner = lane_with<P>(ends, number);  // the lane of this tile's expert
      const u32 nth = number - P::broadcast(ends - full, owner);
      const u32 tile = P::broadcast(begin.tiles, owner) + nth;
      const u32 result = P::broadcast(begin.rows, owner) + nth * geometry.tile_rows;
      const u32 expert = first + owner;
      const FullTile its =
          full_tile(geometry, nth, [&](u32 source) { return ready(source, expert); });
      if (base + P::lane() < all) {
        const u32 slot = taken(its.source, expert) + its.nth * geometry.tile_rows;
        const u32 words = append(expert, tile, 0, its.source, slot, geometry.tile_rows);
        close(expert, tile, result, 1, geometry.tile_rows, geometry.tile_rows, false, words);
      }
    }
  }

  /// By one lane: goes through the tiles that the remainders of an expert's sources make, and
  /// writes their descriptors from tile number `tile` and result row `result` on, or only adds up.
  /// `apart`: only remainders that wait for no other source, each in a tile of its own.
  template <bool kWrite>
  Extent merge_sources(u32 expert, bool apart, bool narrow, u32 tile, u32 result) const {
    const u32 tile_rows = layout_.geometry().tile_rows;
    u32 first = 0;  // slot of what is left of a source
    u32 words = 0;
    return merge_remainders(
        layout_.geometry(), narrow, apart,
        [&](u32 source) {
          const u32 here = apart && !is_apart(source, expert) ? 0 : ready(source, expert);
          first = taken(source, expert) + here - here % tile_rows;
          return here % tile_rows;
        },
        [&](u32 nth, u32 segment, u32 source, u32 from, u32 rows) {
          if constexpr (kWrite) {
            words ^= append(expert, tile + nth, segment, source, first + from, rows);
          }
        },
        [&](u32 nth, u32 its_result, u32 segments, u32 rows, u32 padded) {
          if constexpr (kWrite) {
            close(expert, tile + nth, result + its_result, segments, rows, padded, narrow, words);
          }
          words = 0;
        });
  }

  Task& descriptor(u32 tile) const { return memory_.tasks[tile]; }

  /// Makes `rows` rows of (source, expert), from slot `slot` on, a tile's segment; returns
  /// words_of() the segment.
  u32 append(u32 expert, u32 tile, u32 segment, u32 source, u32 slot, u32 rows) const {
    const u32 start = os_.receive_starts(source)[expert];
    const Segment made{layout_.row(expert, slot, start), static_cast<u16>(source),
                       static_cast<u16>(rows)};
    descriptor(tile).segments[segment] = made;
    return words_of(made);
  }

  /// `result`: the tile's first row among the rows of all tiles; its slots follow from it.
  void close(u32 expert, u32 tile, u32 result, u32 segments, u32 rows, u32 padded, bool narrow,
             u32 words) const {
    if (layout_.geometry().reuses_places()) {
      result %= layout_.geometry().pool_rows();
    }
    os_.tile_facts[tile] = TileFacts(expert, narrow);
    Task& task = descriptor(tile);
    describe_tile(task, layout_.geometry(), epoch_, expert, tile, segments, rows, padded, result,
                  narrow);
    task.awaits = up_front_ ? 1 : 0;
    const u32 parts = parts_of(layout_.geometry(), kFirstProduct.kind, narrow);
    task.seal = kIntact ^ first_word(kFirstProduct.kind, segments, parts) ^ epoch_ ^ expert ^ tile ^
                rows ^ padded ^ result ^ task.narrow ^ task.awaits ^ words;
  }

  const Layout& layout_;
  const RankMemory& memory_;
  const OsMemory& os_;
  u32 epoch_ = 0;
  u32 tiles_ = 0;
  u32 results_ = 0;  // rows of these tiles
  // Where slots between the products are used again: the number of tiles, in their order, that are
  // known to be multiplied; the row up to which slots are free; whether rows that could be in tiles
  // have no slots.
  u32 multiplied_ = 0;
  u32 free_to_ = 0;
  bool held_back_ = false;
  u32 early_left_ = 0;
  u32 unpacked_ = 0;       // experts some of whose rows are in no tile
  bool up_front_ = false;  // tiles are made of rows that are awaited
  bool all_fed_ = false;   // every full tile is made: without news there is none to hand out
};

}  // namespace moeos
