// SPDX-License-Identifier: Apache-2.0
// The tile plan alone, arrival by arrival: which rows become tiles when, in which order and layout.
//
// Built and run by tests/native/test_native.py. What a tile computes does not depend on any of
// this, so no comparison of results would notice.
#include <array>

#include "runtime/tile_plan.hpp"
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

Geometry geometry_of(u32 large_experts) {
  Geometry g = small_geometry(kSources, kSources * kExperts, 600);
  g.large_experts = large_experts;
  return g;
}

/// What a source sends to the first and to the second expert.
using Sent = std::array<u32, kExperts>;

/// A rank's arrivals, of which nobody computes anything. All counts have come, and no row.
class Arrivals {
 public:
  Arrivals(u32 large_experts, const std::array<Sent, kSources>& sent)
      : geometry_(geometry_of(large_experts)),
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

  bool complete() const { return plan_.complete(); }

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
  std::printf("test_tile_plan: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
