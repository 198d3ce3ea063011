// SPDX-License-Identifier: Apache-2.0
// The tile plan alone, arrival by arrival: which rows become tiles when, in which order and layout.
//
// Built and run by tests/native/test_native.py. What a tile computes does not depend on any of
// this, so no comparison of results would notice.
#include <array>
#include <set>

#include "runtime/plan/tile_plan.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::Geometry;
using moeos::laid_out_rows;
using moeos::Layout;
using moeos::OsMemory;
using moeos::RankMemory;
using moeos::Task;
using moeos::TaskKind;
using moeos::TilePlan;
using moeos::u32;
using moeos::u64;
using moeos::twin::Machine;

constexpr u32 kSources = 3;
constexpr u32 kExperts = 2;  // of this rank
constexpr u32 kEpoch = 3;

/// `between_rows`, `ring_rows`: as Geometry's.
Geometry geometry_of(u32 large_experts, u32 between_rows, u32 ring_rows) {
  Geometry g = small_geometry(kSources, kSources * kExperts, 600);
  g.large_experts = large_experts;
  g.between_rows = between_rows;
  g.ring_rows = ring_rows;
  return g;
}

/// What a source sends to the first and to the second expert.
using Sent = std::array<u32, kExperts>;

/// A rank's arrivals, of which nobody computes anything. All counts have come, and no row.
class Arrivals {
 public:
  Arrivals(u32 large_experts, const std::array<Sent, kSources>& sent, u32 between_rows = 0,
           u32 ring_rows = 0)
      : geometry_(geometry_of(large_experts, between_rows, ring_rows)),
        layout_(geometry_),
        tasks_(geometry_, memory_.take(RankMemory::bytes(geometry_))),
        os_(geometry_, memory_.take(OsMemory::bytes(geometry_))),
        plan_(layout_, tasks_, os_) {
    plan_.begin(kEpoch);
    for (u32 source = 0; source < kSources; ++source) {
      u32* starts = os_.receive_starts(source);
      for (u32 expert = 0; expert < kExperts; ++expert) {
        starts[expert + 1] = starts[expert] + sent[source][expert];
      }
      arrive(source, 0);
    }
  }
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  /// So many of a source's rows are here.
  void arrive(u32 source, u32 rows) { os_.rows_arrived[source] = rows; }
  void all_arrive() {
    for (u32 source = 0; source < kSources; ++source) {
      arrive(source, os_.rows_received(source));
    }
  }
  /// Whether there are new tiles, by this news and so many parts that are wanted.
  bool news(u32 wanted = 0) { return plan_.advance(true, wanted, 0); }
  /// The same without news; of so many experts all that is here is packed.
  bool no_news(u32 wanted, u32 early = 0) { return plan_.advance(false, wanted, early); }

  /// A tile's second GEMM is done.
  void multiply(u32 tile) { tasks_.tiles_multiplied[tile] = moeos::seal(kEpoch); }

  bool complete() const { return plan_.complete(); }
  bool fits() const { return plan_.fits(); }
  u32 tiles() const { return plan_.tiles(); }

  const Geometry& geometry() const { return geometry_; }
  const Task& tile(u32 number) const { return tasks_.tasks[number]; }
  /// Whether what the OS block keeps of each tile is what its descriptor says.
  bool facts_are_those_of_the_descriptors() const {
    bool right = true;
    for (u32 i = 0; i < plan_.tiles(); ++i) {
      const moeos::TileFacts facts = os_.tile_facts[i];
      right = right && facts.local_expert() == tile(i).local_expert &&
              facts.narrow() == (tile(i).narrow != 0);
    }
    return right;
  }
  /// The experts of all tiles, 1 or 2, a digit each, in the order of the tiles.
  u64 experts() const {
    u64 digits = 0;
    for (u32 i = 0; i < plan_.tiles(); ++i) {
      digits = 10 * digits + tile(i).local_expert + 1;
    }
    return digits;
  }

 private:
  Memory memory_;
  Geometry geometry_;
  Layout layout_;
  RankMemory tasks_;
  OsMemory os_;
  TilePlan<Machine> plan_;
};

constexpr u32 kSmall = 0;
constexpr u32 kLarge = 1;
constexpr std::array<Sent, kSources> kTwoTilesEach = {Sent{256, 256}, {256, 256}, {256, 256}};

void small_experts_have_tiles_as_rows_arrive() {
  Arrivals arrivals(kSmall, kTwoTilesEach);
  arrivals.arrive(0, 512);
  expect(arrivals.news(), "full tiles are made at once");
  arrivals.arrive(1, 256);
  arrivals.news();
  expect(arrivals.experts() == 112211, "tiles of small experts are in the order of arrival");
}

void large_experts_wait_until_they_are_complete() {
  Arrivals arrivals(kLarge, kTwoTilesEach);
  arrivals.arrive(0, 512);
  arrivals.arrive(1, 400);
  expect(!arrivals.news(), "nobody wants parts, so full tiles wait");
  arrivals.arrive(2, 300);
  expect(arrivals.news(), "a complete expert has its tiles");
  expect(arrivals.experts() == 111111, "all of them, and no other's");
  arrivals.all_arrive();
  arrivals.news();
  expect(arrivals.experts() == 111111222222, "so the tiles of an expert follow each other");
}

void large_experts_are_fed_to_processors_that_would_idle() {
  Arrivals arrivals(kLarge, {Sent{300, 300}, {300, 300}, {300, 300}});
  arrivals.arrive(0, 600);
  expect(arrivals.news(1), "one part is wanted");
  expect(arrivals.experts() == 11, "the first expert's full tiles are made for it");
  expect(arrivals.no_news(kParts), "more are wanted");
  expect(arrivals.experts() == 1122, "the second's are, too");
  expect(!arrivals.no_news(100), "there are no more full tiles");
  arrivals.arrive(1, 300);
  arrivals.arrive(2, 300);
  arrivals.news();
  // 600 rows of two sources, and 44 that were left of the first.
  expect(arrivals.experts() == 1122111111, "the rest of a complete expert follows");
  expect(arrivals.tile(9).rows == 4 && arrivals.tile(9).padded_rows == 8, "its last tile is small");
}

void idle_processors_get_rows_of_the_fullest_expert() {
  Arrivals arrivals(kLarge, {Sent{100, 200}, {100, 200}, {100, 200}});
  arrivals.arrive(0, 160);
  arrivals.arrive(1, 190);
  expect(!arrivals.news(100), "no source has a full tile");
  expect(arrivals.no_news(100, 1), "one expert is packed early");
  expect(arrivals.experts() == 11 && arrivals.tile(0).rows == 128 && arrivals.tile(1).rows == 72,
         "the one that has most rows, in tiles of several sources");
}

void several_experts_are_packed_at_once() {
  Arrivals both(kSmall, {Sent{100, 50}, {100, 200}, {100, 200}});
  both.arrive(0, 150);
  expect(!both.news(), "no source has a full tile");
  expect(both.no_news(100, 4) && both.experts() == 12, "as many as there are");
  expect(!both.no_news(100, 4), "and nothing is left of them");
  both.arrive(1, 300);
  both.news();
  expect(both.experts() == 122, "a full tile needs no packing");
  expect(both.no_news(100, 4) && both.experts() == 12212, "the rest of both is packed again");
  Arrivals alike(kSmall, {Sent{40, 40}, {100, 100}, {100, 100}});
  alike.arrive(0, 80);
  alike.news();
  expect(alike.no_news(100, 1) && alike.experts() == 1, "of two alike one, if one is asked for");
  expect(alike.no_news(100, 1) && alike.experts() == 12, "then the other");
}

void experts_of_few_rows_are_cut_narrow() {
  Arrivals arrivals(kLarge, {Sent{20, 140}, {20, 0}, {9, 0}});
  arrivals.all_arrive();
  arrivals.news();
  expect(arrivals.experts() == 122, "a tile of the first expert, two of the second");
  const Task& first = arrivals.tile(0);
  expect(first.narrow == 1 && first.parts == 2 * kParts, "64 padded rows in all are narrow");
  expect(first.padded_rows == 64 && first.segment_count == 3, "each segment is padded there");
  const Task& last = arrivals.tile(2);
  expect(last.rows == 12 && last.narrow == 0 && last.parts == kParts,
         "twelve rows that are left of 140 are cut as the other 128 are");
}

void segments_of_wide_tiles_lie_side_by_side() {
  Arrivals arrivals(kLarge, {Sent{29, 0}, {30, 0}, {41, 0}});
  arrivals.all_arrive();
  arrivals.news();
  expect(arrivals.experts() == 1, "one tile");
  const Task& tile = arrivals.tile(0);
  const Geometry& g = arrivals.geometry();
  expect(tile.rows == 100 && tile.padded_rows == 104, "a hundred rows are padded once");
  expect(laid_out_rows(g, tile, 0, 0) == 29 && laid_out_rows(g, tile, 1, 29) == 30 &&
             laid_out_rows(g, tile, 2, 59) == 45,
         "the last segment takes the padding");
  expect(is_intact(tile), "the descriptor is sealed");
}

void a_plan_is_complete_when_all_rows_are_in_tiles() {
  Arrivals arrivals(kSmall, {Sent{20, 140}, {20, 0}, {9, 128}});
  expect(!arrivals.complete(), "no row is here");
  arrivals.arrive(0, 160);
  arrivals.arrive(1, 20);
  arrivals.arrive(2, 136);
  arrivals.news();
  expect(!arrivals.complete(), "a row is missing");
  arrivals.arrive(2, 137);
  arrivals.news();
  expect(arrivals.complete(), "none is");
  expect(arrivals.facts_are_those_of_the_descriptors(), "narrow tiles, wide ones, of both experts");
}

void a_plan_without_rows_is_complete_when_all_have_said_so() {
  Arrivals arrivals(kSmall, {Sent{0, 0}, {0, 0}, {0, 0}});
  arrivals.news();
  expect(arrivals.complete() && arrivals.experts() == 0, "there is no tile, and will be none");
}

constexpr u32 kPool = 5 * kTileRows;

void tiles_wait_for_places_that_others_have() {
  Arrivals arrivals(kSmall, kTwoTilesEach, kPool);
  expect(arrivals.geometry().intermediate_rows_max() == kPool + kTileRows, "a pool and a tile");
  arrivals.all_arrive();
  expect(arrivals.news() && arrivals.tiles() == 5, "five tiles have places");
  expect(!arrivals.no_news(100, 2), "and no other one");
  arrivals.multiply(1);
  expect(!arrivals.no_news(0), "places are free in the order of tiles");
  arrivals.multiply(0);
  expect(!arrivals.no_news(0) || arrivals.tiles() == 6, "a look sees one tile at least");
  arrivals.no_news(0);
  expect(arrivals.tiles() == 7, "two tiles have been multiplied, and two more have places");
  expect(arrivals.tile(5).first_result == arrivals.tile(0).first_result &&
             arrivals.tile(6).first_result == arrivals.tile(1).first_result,
         "those of the first two");
}

/// Multiplies one tile after the other until there are no more; all rows are then in one tile each,
/// and no two tiles that are there at a time share a place.
void all_rows_pass_through_a_pool(u32 large_experts, const std::array<Sent, kSources>& sent,
                                  u32 between_rows) {
  Arrivals arrivals(large_experts, sent, between_rows);
  const Geometry& g = arrivals.geometry();
  expect(g.reuses_places(), "a pool");
  arrivals.all_arrive();
  arrivals.news();
  std::set<std::array<u32, 2>> rows;  // of sources
  for (u32 done = 0; done < arrivals.tiles(); ++done) {
    for (u32 other = done + 1; other < arrivals.tiles(); ++other) {
      const Task& a = arrivals.tile(done);
      const Task& b = arrivals.tile(other);
      expect(a.first_result + a.padded_rows <= b.first_result ||
                 b.first_result + b.padded_rows <= a.first_result,
             "places are one tile's");
    }
    const Task& tile = arrivals.tile(done);
    expect(tile.first_result + tile.padded_rows <= g.intermediate_rows_max() && is_intact(tile),
           "a tile lies in the buffer");
    for (u32 s = 0; s < tile.segment_count; ++s) {
      for (u32 row = 0; row < tile.segments[s].rows; ++row) {
        const std::array<u32, 2> its = {tile.segments[s].source, tile.segments[s].first_row + row};
        expect(rows.insert(its).second, "a row is in one tile");
      }
    }
    arrivals.multiply(done);
    arrivals.no_news(large_experts != 0 ? 1 : 0);
  }
  u32 all = 0;
  for (const Sent& its : sent) {
    all += its[0] + its[1];
  }
  expect(rows.size() == all && arrivals.complete(), "and all are");
}

void a_call_fits_whose_tiles_have_places_of_their_own() {
  const std::array<Sent, kSources> uneven = {Sent{100, 27}, {1, 0}, {3, 129}};
  for (u32 pool = 3 * kTileRows; pool < 6 * kTileRows; pool += 8) {
    Arrivals arrivals(kSmall, uneven, pool);
    const bool fits = arrivals.fits();
    arrivals.all_arrive();
    arrivals.news();
    expect(!fits || arrivals.complete(), "all tiles are made at once of a call that fits");
    expect(fits || pool < 4 * kTileRows, "and one that is well below the pool does");
  }
  expect(Arrivals(kSmall, kTwoTilesEach).fits(), "any fits where places are not used again");
}

/// Of a source that uses places of its cell again, less than a tile is left that is in none,
/// whatever other sources do.
void what_is_left_of_a_ring_waits_for_no_other_source() {
  for (const u32 large_experts : {kSmall, kLarge}) {
    for (const u32 between_rows : {0U, 3 * kTileRows}) {
      Arrivals arrivals(large_experts, {Sent{300, 200}, {10, 10}, {20, 20}}, between_rows, 320);
      expect(arrivals.geometry().overflows(500) && !arrivals.geometry().overflows(320), "a ring");
      arrivals.arrive(0, 299);
      arrivals.news(1);
      arrivals.no_news(1);
      expect(arrivals.tiles() == 2, "two full tiles; of the third one a row is not here");
      arrivals.multiply(0);
      arrivals.multiply(1);
      arrivals.arrive(0, 320);
      expect(arrivals.news(0) && arrivals.tiles() == 3, "what is left of an expert");
      const Task& left = arrivals.tile(2);
      expect(left.rows == 44 && left.segment_count == 1 && left.segments[0].first_row == 256 &&
                 is_intact(left),
             "is a tile of its own");
      arrivals.arrive(1, 20);
      arrivals.arrive(2, 10);
      arrivals.news(0);
      expect(arrivals.tiles() == 3, "rows of others wait for each other");
      arrivals.arrive(2, 20);
      arrivals.news(0);
      expect(arrivals.tiles() == 4 && arrivals.tile(3).rows == 30, "and are merged");
    }
  }
  Arrivals arrivals(kSmall, {Sent{300, 20}, {10, 10}, {20, 20}}, 0, 320);
  arrivals.arrive(0, 320);
  arrivals.news();
  expect(arrivals.tiles() == 2, "all rows of this source have a place, and so they are merged");
}

}  // namespace

int main() {
  small_experts_have_tiles_as_rows_arrive();
  large_experts_wait_until_they_are_complete();
  large_experts_are_fed_to_processors_that_would_idle();
  idle_processors_get_rows_of_the_fullest_expert();
  several_experts_are_packed_at_once();
  experts_of_few_rows_are_cut_narrow();
  segments_of_wide_tiles_lie_side_by_side();
  a_plan_is_complete_when_all_rows_are_in_tiles();
  a_plan_without_rows_is_complete_when_all_have_said_so();
  tiles_wait_for_places_that_others_have();
  for (const u32 large_experts : {kSmall, kLarge}) {
    for (const u32 pool : {0U + 1, 3 * kTileRows + 40, kPool}) {
      all_rows_pass_through_a_pool(large_experts, kTwoTilesEach, pool);
      all_rows_pass_through_a_pool(large_experts, {Sent{600, 0}, {599, 0}, {577, 0}}, pool);
      all_rows_pass_through_a_pool(large_experts, {Sent{127, 127}, {127, 127}, {126, 1}}, pool);
      all_rows_pass_through_a_pool(large_experts, {Sent{20, 140}, {20, 0}, {9, 128}}, pool);
    }
  }
  a_call_fits_whose_tiles_have_places_of_their_own();
  what_is_left_of_a_ring_waits_for_no_other_source();
  std::printf("test_tile_plan: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
