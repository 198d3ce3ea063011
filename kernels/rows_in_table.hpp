// SPDX-License-Identifier: Apache-2.0
// Plan's rows for the host: the counts of any number of sources for each expert of a rank.
//
// `moeos plan` asks it what a call has to do, and tests check that processors make the same plan
// (tests/native/plan/test_plan.cpp). Must not depend on: registers, lanes, memory of a rank.
#pragma once

#include "runtime/plan/plan.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// A single lane, which has all experts.
struct OneLane {
  static constexpr u32 kLanes = 1;
  static constexpr u32 lane() { return 0; }
  static constexpr u32 broadcast(u32 value, u32 /*lane*/) { return value; }
  static constexpr u32 inclusive_scan(u32 value) { return value; }
  static constexpr u32 ballot(bool predicate) { return predicate ? 1U : 0U; }
  static constexpr u32 count(u32 ballot) { return ballot; }
  static constexpr void sync_lanes() {}
};

/// Rows of all experts of a rank, from any number of sources. `Count`: count(source, expert).
///
/// The first rows of its segments count from the source's first row for the expert.
template <class Count>
class RowsInTable {
 public:
  /// An expert may have several tiles, cut in several ways.
  static constexpr bool kOneTileEach = false;

  constexpr RowsInTable(const Geometry& geometry, u32 epoch, Count count)
      : geometry_(geometry), epoch_(epoch), count_(count) {}

  constexpr const Geometry& geometry() const { return geometry_; }
  constexpr u32 epoch() const { return epoch_; }
  /// The number of a lane's experts, and the first of them.
  constexpr u32 experts_each() const { return geometry_.local_experts(); }
  constexpr u32 first_expert() const { return 0; }

  /// What is known of one expert; at(i): of the lane's i-th.
  using At = u32;
  constexpr At at(u32 i) const { return i; }
  constexpr ExpertRows of(At expert) const {
    const u32 full = full_tiles(expert);
    u32 padded = 0;
    for (u32 source = 0; source < geometry_.world; ++source) {
      padded += align_up(count_(source, expert), Geometry::kSegmentAlign);
    }
    const bool narrow = geometry_.is_narrow(padded);
    const Extent merged = merge_remainders(
        geometry_, narrow, false, [&](u32 source) { return left(source, expert); },
        [](u32, u32, u32, u32, u32) {}, [](u32, u32, u32, u32, u32) {});
    return {full + merged.tiles, full * geometry_.tile_rows + merged.rows, narrow};
  }

  /// Goes through a lane's experts: begins before the first one, looks at the i-th, and passes it,
  /// unless one has been found or does not pass.
  constexpr At first() const { return 0; }
  constexpr void look(At& /*at*/, u32 /*i*/, bool /*found*/) const {}
  constexpr void pass(At& at, u32 /*i*/, bool passes) const { at += passes ? 1 : 0; }

  /// Writes the segments of tile `nth` of an expert; `owner`: the lane that has found it.
  constexpr TileRows tile(u32 expert, At /*at*/, u32 nth, u32 /*owner*/, Task& task) const {
    const u32 full = full_tiles(expert);
    const u32 tile_rows = geometry_.tile_rows;
    if (nth < full) {
      const FullTile its =
          full_tile(geometry_, nth, [&](u32 source) { return count_(source, expert); });
      task.segments[0] = {its.nth * tile_rows, static_cast<u16>(its.source),
                          static_cast<u16>(tile_rows)};
      return {1, tile_rows, tile_rows, nth * tile_rows};
    }
    TileRows found{};
    merge_remainders(
        geometry_, of(expert).narrow, false, [&](u32 source) { return left(source, expert); },
        [&](u32 tile, u32 segment, u32 source, u32 from, u32 rows) {
          if (full + tile == nth) {
            const u32 first = count_(source, expert) - left(source, expert) + from;
            task.segments[segment] = {first, static_cast<u16>(source), static_cast<u16>(rows)};
          }
        },
        [&](u32 tile, u32 result, u32 segments, u32 rows, u32 padded) {
          found = full + tile == nth ? TileRows{segments, rows, padded, full * tile_rows + result}
                                     : found;
        });
    return found;
  }
  /// Notes the tokens of GEMM0's rows, where these are read in place.
  constexpr void note_tokens(Task& /*task*/) const {}

 private:
  constexpr u32 full_tiles(u32 expert) const {
    u32 full = 0;
    for (u32 source = 0; source < geometry_.world; ++source) {
      full += count_(source, expert) / geometry_.tile_rows;
    }
    return full;
  }
  constexpr u32 left(u32 source, u32 expert) const {
    return count_(source, expert) % geometry_.tile_rows;
  }

  const Geometry& geometry_;
  u32 epoch_;
  Count count_;
};

/// The plan of these counts.
template <class Count>
constexpr auto plan_table(const Geometry& geometry, u32 epoch, Count count) {
  Plan<OneLane, RowsInTable<Count>> plan(RowsInTable<Count>(geometry, epoch, count));
  plan.make();
  return plan;
}

}  // namespace moeos
