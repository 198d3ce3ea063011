// Algorithm 2's decoding step: arrived rows become row tiles, GEMM tasks with up to eight segments.
//
// A tile full of one source's rows is made as soon as these rows are here. What is left of each
// source, less than a tile, is merged with the other sources' remainders once all of them are
// complete, so that at decode sizes a weight is read once and not once a source; when processors
// idle, remainders that are here are packed without waiting. Of large experts also full tiles wait
// until the expert's rows are complete, or until somebody has nothing else to compute: then all of
// its tiles follow each other, and its weights are read once and not once a source. Rows are
// independent, so packing never changes a result. May not know: flags, queues, how a tile is
// computed.
#pragma once

#include "runtime/base.hpp"
#include "runtime/geometry.hpp"
#include "runtime/layout.hpp"
#include "runtime/memory.hpp"
#include "runtime/platform/concept.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Keeps one call's packing state in the OS block's memory; only the arrivals subscriber's warp
/// touches it, a lane for each expert. Every function is called by all lanes.
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
    early_left_ = geometry.early_tiles();
    all_fed_ = false;
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

  /// Writes the Gemm0 descriptors of new tiles; false if there are none.
  ///
  /// `news`: rows have arrived since the last time; OsMemory::rows_arrived says which. `parts`: so
  /// many would be computed at once. Of large experts, full tiles of incomplete ones are made for
  /// that, the first experts' first, whose rows all sources send first; of others every full tile
  /// is made as soon as it is. `early`: of so many experts, those with most rows, all rows that are
  /// here are packed, complete or not, while the budget for early tiles lasts.
  bool advance(bool news, u32 parts, u32 early) {
    const Geometry& geometry = layout_.geometry();
    const u32 before = tiles_;
    parts = geometry.large_experts != 0 && (news || !all_fed_) ? parts : 0;
    // One round for news and wants, then one for each expert that is packed early; one loop, so
    // that there is one copy of plan()'s code.
    for (bool look = news || parts > 0;; look = false) {
      const bool packs = !look && early > 0 && early_left_ >= geometry.remainder_tiles();
      const u32 expert = packs ? fullest() : kNone;
      if (!look && expert == kNone) {
        return tiles_ != before;
      }
      const u32 had = tiles_;
      plan(look ? parts : 0, expert);
      early_left_ -= packs ? minimum(early_left_, tiles_ - had) : 0;
      early -= packs ? 1 : 0;
    }
  }

  /// Tiles planned so far in this call; their descriptors are tasks from first_task(gemm0) on.
  u32 tiles() const { return tiles_; }

 private:
  /// What the new tiles of one expert add up to.
  struct Extent {
    u32 tiles = 0;
    u32 rows = 0;  // padded
  };

  /// The expert with most rows that are here and in no tile, of several any; kNone: there are none.
  u32 fullest() const {
    const Geometry& geometry = layout_.geometry();
    u32 best = kNone;
    u32 most = 0;
    for (u32 expert = P::lane(); expert < geometry.local_experts(); expert += P::kLanes) {
      u32 rows = 0;
      for (u32 source = 0; source < geometry.world; ++source) {
        rows += ready(source, expert);
      }
      if (rows > most) {
        most = rows;
        best = expert;
      }
    }
    // The lanes with the largest number, bit by bit.
    bool leads = best != kNone;
#pragma unroll 1
    for (u32 bit = 1U << 31; bit != 0; bit >>= 1) {
      const bool has = (most & bit) != 0;
      const bool any = P::ballot(leads && has) != 0;
      leads = leads && (has || !any);
    }
    const u32 leaders = P::ballot(leads);
    return leaders == 0 ? kNone : P::broadcast(best, P::first_lane(leaders));
  }

  /// Full tiles of one source each that an expert's rows make.
  u32 full_tiles(u32 expert) const {
    u32 tiles = 0;
    for (u32 source = 0; source < layout_.geometry().world; ++source) {
      tiles += ready(source, expert) / layout_.geometry().tile_rows;
    }
    return tiles;
  }

  /// Plans the new tiles of experts that are complete; the full ones of all others, or of large
  /// experts of the first ones that make up `parts` parts; and of expert `early` whatever is here.
  void plan(u32 parts, u32 early) {
    const Geometry& geometry = layout_.geometry();
    u32 full = 0;  // tiles, also of complete experts
    bool all_fed = true;
    for (u32 first = 0; first < geometry.local_experts(); first += P::kLanes) {
      const u32 expert = first + P::lane();
      const bool open = expert < geometry.local_experts() && os_.packed[expert] == 0;
      const bool complete = open && all_here(expert);
      const bool merge = complete || (open && expert == early);
      bool take = open;
      if (geometry.large_experts != 0) {
        const u32 mine = parts > 0 && open ? full_tiles(expert) : 0;
        const u32 before = full + P::inclusive_scan(mine) - mine;
        full = P::broadcast(before + mine, P::kLanes - 1);
        const bool feeds = before * geometry.gemm0_parts < parts;
        all_fed = all_fed && P::ballot(mine > 0 && !complete && !feeds) == 0;
        take = merge || (mine > 0 && feeds);
      }
      Extent extent;
      if (take) {
        extent = for_each_tile<false>(expert, merge, 0, 0);
      }
      const u32 tiles = P::inclusive_scan(extent.tiles);
      const u32 rows = P::inclusive_scan(extent.rows);
      if (extent.tiles > 0) {
        for_each_tile<true>(expert, merge, tiles_ + tiles - extent.tiles,
                            results_ + rows - extent.rows);
      }
      if (complete) {
        os_.packed[expert] = 1;
      }
      tiles_ += P::broadcast(tiles, P::kLanes - 1);
      results_ += P::broadcast(rows, P::kLanes - 1);
      MOEOS_CHECK(tiles_ <= geometry.tiles_max());
      MOEOS_CHECK(results_ <= geometry.intermediate_rows_max());
    }
    all_fed_ = parts > 0 && all_fed;
    P::sync_lanes();
  }

  bool all_here(u32 expert) const {
    bool here = true;
    for (u32 source = 0; source < layout_.geometry().world; ++source) {
      const u32 arrived = os_.rows_arrived[source];
      here = here && arrived != kNone && arrived >= os_.receive_starts(source)[expert + 1];
    }
    return here;
  }

  /// Whether all rows of an expert, as far as they are known, fit one narrow tile.
  bool few_rows(u32 expert) const {
    u32 padded = 0;
    for (u32 source = 0; source < layout_.geometry().world; ++source) {
      const u32* starts = os_.receive_starts(source);
      padded += os_.rows_arrived[source] == kNone
                    ? 0
                    : align_up(starts[expert + 1] - starts[expert], Geometry::kSegmentAlign);
    }
    return padded <= layout_.geometry().narrow_rows;
  }

  /// Rows of (source, expert) that are here and in no tile yet.
  u32 ready(u32 source, u32 expert) const {
    if (os_.rows_arrived[source] == kNone) {
      return 0;  // its counts are not known yet: the starts below would be another call's
    }
    const u32* starts = os_.receive_starts(source);
    const u32 arrived = minimum(os_.rows_arrived[source], starts[expert + 1]);
    const u32 here = arrived > starts[expert] ? arrived - starts[expert] : 0;
    return here - taken(source, expert);
  }

  u32& taken(u32 source, u32 expert) const {
    return os_.taken[source * layout_.geometry().local_experts() + expert];
  }

  /// One lane: goes through the new tiles of an expert, and writes their descriptors from tile
  /// number `tile` and result row `result` on, or only adds up.
  template <bool kWrite>
  Extent for_each_tile(u32 expert, bool merge, u32 tile, u32 result) const {
    const Geometry& geometry = layout_.geometry();
    Extent extent;
    for (u32 source = 0; source < geometry.world; ++source) {
      for (u32 rows = ready(source, expert); rows >= geometry.tile_rows;
           rows -= geometry.tile_rows) {
        if constexpr (kWrite) {
          const u32 words = append(expert, tile + extent.tiles, 0, source, geometry.tile_rows);
          close(expert, tile + extent.tiles, result + extent.rows, 1, geometry.tile_rows,
                geometry.tile_rows, few_rows(expert), words);
        }
        ++extent.tiles;
        extent.rows += geometry.tile_rows;
      }
    }
    if (!merge) {
      return extent;
    }
    const bool narrow = few_rows(expert);
    const u32 align = geometry.segment_align_of(narrow);
    u32 segments = 0;
    u32 rows = 0;
    u32 padded = 0;
    u32 words = 0;
    const auto finish = [&] {
      padded = align_up(padded, Geometry::kSegmentAlign);
      if constexpr (kWrite) {
        close(expert, tile + extent.tiles, result + extent.rows, segments, rows, padded, narrow,
              words);
      }
      ++extent.tiles;
      extent.rows += padded;
      segments = rows = padded = words = 0;
    };
    for (u32 source = 0; source < geometry.world; ++source) {
      for (u32 left = ready(source, expert) % geometry.tile_rows; left > 0;) {
        // The room is a multiple of `align`: a cut never adds padding.
        const u32 fitting = minimum(left, geometry.tile_rows - padded);
        if (fitting == 0 || segments == geometry.max_segments_of(narrow)) {
          finish();
          continue;
        }
        if constexpr (kWrite) {
          words ^= append(expert, tile + extent.tiles, segments, source, fitting);
        }
        ++segments;
        rows += fitting;
        padded += align_up(fitting, align);
        left -= fitting;
      }
    }
    if (segments > 0) {
      finish();
    }
    return extent;
  }

  Task& descriptor(u32 tile) const {
    return memory_.tasks[memory_.first_task(TaskKind::gemm0) + tile];
  }

  /// Takes the next `rows` rows of (source, expert) as a tile's segment; returns words_of() it.
  u32 append(u32 expert, u32 tile, u32 segment, u32 source, u32 rows) const {
    const u32 slot = taken(source, expert);
    const u32 start = os_.receive_starts(source)[expert];
    const Segment made{layout_.row(expert, slot, start), static_cast<u16>(source),
                       static_cast<u16>(rows)};
    descriptor(tile).segments[segment] = made;
    taken(source, expert) = slot + rows;
    return words_of(made);
  }

  void close(u32 expert, u32 tile, u32 result, u32 segments, u32 rows, u32 padded, bool narrow,
             u32 words) const {
    Task& task = descriptor(tile);
    const u32 parts = layout_.geometry().gemm0_parts_of(narrow);
    task.kind = TaskKind::gemm0;
    task.segment_count = static_cast<u8>(segments);
    task.parts = static_cast<u16>(parts);
    task.epoch = epoch_;
    task.local_expert = expert;
    task.tile = tile;
    task.rows = rows;
    task.padded_rows = padded;
    task.first_result = result;
    task.narrow = narrow ? 1 : 0;
    task.seal = kWhole ^ first_word(TaskKind::gemm0, segments, parts) ^ epoch_ ^ expert ^ tile ^
                rows ^ padded ^ result ^ task.narrow ^ words;
  }

  const Layout& layout_;
  const RankMemory& memory_;
  const OsMemory& os_;
  u32 epoch_ = 0;
  u32 tiles_ = 0;
  u32 results_ = 0;
  u32 early_left_ = 0;
  bool all_fed_ = false;  // every full tile is made: until there is news, there is none to feed
};

}  // namespace moeos
