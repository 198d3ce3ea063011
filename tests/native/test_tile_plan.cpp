// The tile plan alone, arrival by arrival: which rows become tiles when, in which order and layout.
//
// Built and run by tests/native/test_native.py. What a tile computes does not depend on any of
// this, so no comparison of results would notice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "runtime/platform/twin/platform.hpp"
#include "runtime/tile_plan.hpp"

namespace {

using moeos::Geometry;
using moeos::kCacheLine;
using moeos::kNone;
using moeos::laid_out_rows;
using moeos::Layout;
using moeos::OsMemory;
using moeos::RankMemory;
using moeos::Task;
using moeos::TaskKind;
using moeos::TilePlan;
using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Machine;

constexpr u32 kSources = 3;
constexpr u32 kExperts = 2;  // of this rank
constexpr u32 kTileRows = 128;
constexpr u32 kNarrowRows = 64;
constexpr u32 kParts = 4;  // of a wide tile
constexpr u32 kEpoch = 3;

int failed = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("not so: %s\n", what);
    ++failed;
  }
}

Geometry geometry_of(u32 large_experts, u32 segment_align) {
  Geometry g{};
  g.world = kSources;
  g.experts = kSources * kExperts;
  g.top_k = 2;
  g.max_tokens = 600;
  g.row_bytes = g.hidden_bytes = 16;
  g.row_map = moeos::RowMap::ragged;
  g.capacity = g.max_tokens;
  g.chunk_rows = 32;
  g.tile_rows = kTileRows;
  g.route_tokens = 64;
  g.route_slices = 1;
  g.gemm0_parts = g.gemm1_parts = kParts;
  g.narrow_rows = kNarrowRows;
  g.gemm0_narrow_parts = g.gemm1_narrow_parts = 2 * kParts;
  g.segment_align = segment_align;
  g.large_experts = large_experts;
  g.processors = 1;
  return g;
}

u8* take(std::vector<u8*>& all, u64 bytes) {
  all.push_back(
      static_cast<u8*>(std::aligned_alloc(kCacheLine, (bytes / kCacheLine + 1) * kCacheLine)));
  std::fill_n(all.back(), bytes, u8{0});
  return all.back();
}

/// A rank's arrivals, of which nobody computes anything.
class Arrivals {
 public:
  explicit Arrivals(const Geometry& geometry)
      : geometry_(geometry),
        layout_(geometry_),
        memory_(geometry_, take(taken_, RankMemory::bytes(geometry_))),
        os_(geometry_, take(taken_, OsMemory::bytes(geometry_))),
        plan_(layout_, memory_, os_) {
    plan_.begin(kEpoch);
  }
  ~Arrivals() {
    for (u8* memory : taken_) {
      std::free(memory);
    }
  }
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  /// The counts of a source have come, and none of its rows.
  void announce(u32 source, u32 first_experts_rows, u32 second_experts_rows) {
    u32* starts = os_.receive_starts(source);
    starts[0] = 0;
    starts[1] = first_experts_rows;
    starts[2] = first_experts_rows + second_experts_rows;
    os_.rows_arrived[source] = 0;
  }
  /// So many of its rows are here.
  void arrive(u32 source, u32 rows) { os_.rows_arrived[source] = rows; }

  TilePlan<Machine>& plan() { return plan_; }
  const Geometry& geometry() const { return geometry_; }
  const Task& tile(u32 number) const {
    return memory_.tasks[memory_.first_task(TaskKind::gemm0) + number];
  }
  /// The experts of all tiles, one digit each, in the order of the tiles.
  u64 experts() const {
    u64 digits = 0;
    for (u32 i = 0; i < plan_.tiles(); ++i) {
      digits = 10 * digits + tile(i).local_expert + 1;
    }
    return digits;
  }

 private:
  std::vector<u8*> taken_;
  Geometry geometry_;
  Layout layout_;
  RankMemory memory_;
  OsMemory os_;
  TilePlan<Machine> plan_;
};

void small_experts_have_tiles_as_rows_arrive() {
  Arrivals arrivals(geometry_of(0, 1));
  for (u32 source = 0; source < kSources; ++source) {
    arrivals.announce(source, 256, 256);
  }
  arrivals.arrive(0, 512);
  expect(arrivals.plan().advance(true, 0, 0), "full tiles are made at once");
  arrivals.arrive(1, 256);
  arrivals.plan().advance(true, 0, 0);
  expect(arrivals.experts() == 112211, "tiles of small experts are in the order of arrival");
}

void large_experts_wait_until_they_are_complete() {
  Arrivals arrivals(geometry_of(1, 1));
  for (u32 source = 0; source < kSources; ++source) {
    arrivals.announce(source, 256, 256);
  }
  arrivals.arrive(0, 512);
  arrivals.arrive(1, 400);
  expect(!arrivals.plan().advance(true, 0, 0), "nobody wants parts, so full tiles wait");
  arrivals.arrive(2, 300);
  expect(arrivals.plan().advance(true, 0, 0), "a complete expert has its tiles");
  expect(arrivals.experts() == 111111, "all of them, and no other's");
  arrivals.arrive(1, 512);
  arrivals.arrive(2, 512);
  arrivals.plan().advance(true, 0, 0);
  expect(arrivals.experts() == 111111222222, "so the tiles of an expert follow each other");
}

void large_experts_are_fed_to_processors_that_would_idle() {
  Arrivals arrivals(geometry_of(1, 1));
  for (u32 source = 0; source < kSources; ++source) {
    arrivals.announce(source, 300, 300);
  }
  arrivals.arrive(0, 600);
  expect(arrivals.plan().advance(true, 1, 0), "one part is wanted");
  expect(arrivals.experts() == 11, "the first expert's full tiles are made for it");
  expect(arrivals.plan().advance(false, kParts, 0), "more are wanted");
  expect(arrivals.experts() == 1122, "the second's are, too");
  expect(!arrivals.plan().advance(false, 100, 0), "there are no more full tiles");
  arrivals.arrive(1, 300);
  arrivals.arrive(2, 300);
  arrivals.plan().advance(true, 0, 0);
  // 600 rows of two sources, and 44 that were left of the first.
  expect(arrivals.experts() == 1122111111, "the rest of a complete expert follows");
  expect(arrivals.tile(9).rows == 4 && arrivals.tile(9).padded_rows == 8, "its last tile is small");
}

void idle_processors_get_rows_of_the_fullest_expert() {
  Arrivals arrivals(geometry_of(1, 1));
  for (u32 source = 0; source < kSources; ++source) {
    arrivals.announce(source, 100, 200);
  }
  arrivals.arrive(0, 160);
  arrivals.arrive(1, 190);
  expect(!arrivals.plan().advance(true, 100, 0), "no source has a full tile");
  expect(arrivals.plan().advance(false, 100, 1), "one expert is packed early");
  expect(arrivals.experts() == 11 && arrivals.tile(0).rows == 128 && arrivals.tile(1).rows == 72,
         "the one that has most rows, in tiles of several sources");
}

void experts_of_few_rows_are_cut_narrow() {
  Arrivals arrivals(geometry_of(1, 1));
  arrivals.announce(0, 20, 140);
  arrivals.announce(1, 20, 0);
  arrivals.announce(2, 9, 0);
  arrivals.arrive(0, 160);
  arrivals.arrive(1, 20);
  arrivals.arrive(2, 9);
  arrivals.plan().advance(true, 0, 0);
  expect(arrivals.experts() == 122, "a tile of the first expert, two of the second");
  const Task& first = arrivals.tile(0);
  expect(first.narrow == 1 && first.parts == 2 * kParts, "64 padded rows in all are narrow");
  expect(first.padded_rows == 64 && first.segment_count == 3, "each segment is padded there");
  expect(arrivals.tile(2).rows == 12 && arrivals.tile(2).narrow == 0 &&
             arrivals.tile(2).parts == kParts,
         "twelve rows that are left of 140 are cut as the other 128 are");
}

void segments_of_wide_tiles_lie_side_by_side() {
  Arrivals arrivals(geometry_of(1, 1));
  arrivals.announce(0, 29, 0);
  arrivals.announce(1, 30, 0);
  arrivals.announce(2, 41, 0);
  arrivals.arrive(0, 29);
  arrivals.arrive(1, 30);
  arrivals.arrive(2, 41);
  arrivals.plan().advance(true, 0, 0);
  const Task& tile = arrivals.tile(0);
  const Geometry& g = arrivals.geometry();
  expect(arrivals.plan().tiles() == 1 && tile.rows == 100 && tile.padded_rows == 104,
         "a hundred rows are padded once");
  expect(laid_out_rows(g, tile, 0, 0) == 29 && laid_out_rows(g, tile, 1, 29) == 30 &&
             laid_out_rows(g, tile, 2, 59) == 45,
         "the last segment takes the padding");
  expect(is_whole(tile), "the descriptor is sealed");
}

}  // namespace

int main() {
  small_experts_have_tiles_as_rows_arrive();
  large_experts_wait_until_they_are_complete();
  large_experts_are_fed_to_processors_that_would_idle();
  idle_processors_get_rows_of_the_fullest_expert();
  experts_of_few_rows_are_cut_narrow();
  segments_of_wide_tiles_lie_side_by_side();
  return failed == 0 ? 0 : 1;
}
