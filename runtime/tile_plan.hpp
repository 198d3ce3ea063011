// Algorithm 2's decoding step: arrived rows become row tiles, GEMM tasks with up to eight segments.
//
// A tile full of one source's rows is made as soon as these rows are here. What is left of each
// source, less than a tile, is merged with the other sources' remainders once all of them are
// complete, so that at decode sizes a weight is read once and not once a source; when processors
// idle, remainders that are here are packed without waiting. Rows are independent, so packing never
// changes a result. May not know: flags, queues, how a tile is computed.
#pragma once

#include "runtime/base.hpp"
#include "runtime/geometry.hpp"
#include "runtime/layout.hpp"
#include "runtime/memory.hpp"
#include "runtime/task.hpp"

namespace moeos {

/// Keeps one call's packing state in the rank's memory; only the arrivals subscriber touches it.
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
    for (u32 i = 0; i < geometry.world * geometry.local_experts(); ++i) {
      os_.taken[i] = 0;
    }
    for (u32 p = 0; p < geometry.world; ++p) {
      os_.rows_arrived[p] = 0;
      os_.expert_cursor[p] = 0;
    }
    for (u32 e = 0; e < geometry.local_experts(); ++e) {
      os_.sources_complete[e] = 0;
    }
  }

  /// Notes that `rows` rows of a source (whose counts are known) have arrived in all, and emits the
  /// tiles that became possible: emit(const Task&) posts the Gemm0 descriptor, which stays where it
  /// is.
  template <class Emit>
  void advance(u32 source, u32 rows, Emit&& emit) {
    const Geometry& geometry = layout_.geometry();
    const u32* starts = os_.receive_starts(source);
    os_.rows_arrived[source] = rows;
    u32 expert = os_.expert_cursor[source];
    for (; expert < geometry.local_experts(); ++expert) {
      while (ready(source, expert) >= geometry.tile_rows) {
        Task& tile = open(expert);
        append(tile, source, geometry.tile_rows);
        close(tile, emit);
      }
      if (rows < starts[expert + 1]) {
        break;
      }
      if (++os_.sources_complete[expert] == geometry.world) {
        pack(expert, emit);
      }
    }
    os_.expert_cursor[source] = expert;
  }

  /// Packs the rows that are here of the expert that has most of them, complete or not; false when
  /// there are none or the budget for early tiles is spent.
  template <class Emit>
  bool pack_early(Emit&& emit) {
    const Geometry& geometry = layout_.geometry();
    u32 best = kNone;
    u32 most = 0;
    for (u32 expert = 0; expert < geometry.local_experts(); ++expert) {
      u32 rows = 0;
      for (u32 source = 0; source < geometry.world; ++source) {
        rows += ready(source, expert);
      }
      if (rows > most) {
        most = rows;
        best = expert;
      }
    }
    if (best == kNone || early_left_ < geometry.remainder_tiles()) {
      return false;
    }
    const u32 before = tiles_;
    pack(best, emit);
    early_left_ -= tiles_ - before;
    return true;
  }

  u32 tiles() const { return tiles_; }

 private:
  /// Rows of (source, expert) that are here and in no tile yet.
  u32 ready(u32 source, u32 expert) const {
    if (os_.rows_arrived[source] == 0) {
      return 0;  // perhaps its counts are not known yet: the starts below would be another call's
    }
    const u32* starts = os_.receive_starts(source);
    const u32 arrived = minimum(os_.rows_arrived[source], starts[expert + 1]);
    const u32 here = arrived > starts[expert] ? arrived - starts[expert] : 0;
    return here - taken(source, expert);
  }

  u32& taken(u32 source, u32 expert) const {
    return os_.taken[source * layout_.geometry().local_experts() + expert];
  }

  /// The next tile's descriptor, empty.
  Task& open(u32 expert) const {
    Task& tile = *os_.tile;
    MOEOS_CHECK(tiles_ < layout_.geometry().tiles_max());
    tile.kind = TaskKind::gemm0;
    tile.segment_count = 0;
    tile.parts = static_cast<u16>(layout_.geometry().gemm0_parts);
    tile.epoch = epoch_;
    tile.local_expert = expert;
    tile.tile = tiles_;
    tile.rows = 0;
    tile.padded_rows = 0;
    tile.first_result = results_;
    return tile;
  }

  void append(Task& tile, u32 source, u32 rows) const {
    const u32 slot = taken(source, tile.local_expert);
    const u32 start = os_.receive_starts(source)[tile.local_expert];
    tile.segments[tile.segment_count++] = Segment{layout_.row(tile.local_expert, slot, start),
                                                  static_cast<u16>(source), static_cast<u16>(rows)};
    tile.rows += rows;
    tile.padded_rows += align_up(rows, Geometry::kSegmentAlign);
    taken(source, tile.local_expert) = slot + rows;
  }

  /// Merges what every source has ready for the expert into tiles.
  template <class Emit>
  void pack(u32 expert, Emit&& emit) {
    const Geometry& geometry = layout_.geometry();
    Task* tile = nullptr;
    for (u32 source = 0; source < geometry.world; ++source) {
      for (u32 rows = ready(source, expert); rows > 0;) {
        if (tile == nullptr) {
          tile = &open(expert);
        }
        const u32 room = geometry.tile_rows - tile->padded_rows;
        if (room == 0 || tile->segment_count == Geometry::kMaxSegments) {
          close(*tile, emit);
          tile = nullptr;
          continue;
        }
        const u32 fitting =
            minimum(rows, room);  // room is a multiple of 8: a cut never adds padding
        append(*tile, source, fitting);
        rows -= fitting;
      }
    }
    if (tile != nullptr) {
      close(*tile, emit);
    }
  }

  template <class Emit>
  void close(Task& tile, Emit&& emit) {
    memory_.tasks[memory_.first_task(TaskKind::gemm0) + tiles_] = tile;
    ++tiles_;
    results_ += tile.padded_rows;
    MOEOS_CHECK(results_ <= layout_.geometry().intermediate_rows_max());
    emit(static_cast<const Task&>(tile));
  }

  const Layout& layout_;
  const RankMemory& memory_;
  const OsMemory& os_;
  u32 epoch_ = 0;
  u32 tiles_ = 0;
  u32 results_ = 0;
  u32 early_left_ = 0;
};

}  // namespace moeos
