// SPDX-License-Identifier: Apache-2.0
// The plan of any counts, part by part, beside one that packs row by row and lists all parts.
//
// Build: g++ -std=c++20 -I. tests/native/plan/test_plan.cpp -o test_plan; run: ./test_plan MATRICES
//
// Each is a matrix of counts, of 1 to 64 sources. What a part computes does not depend on its place
// in the order, so no comparison of results would notice. Must not depend on: lanes.
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/rows_in_table.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/plan/tile_plan.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::align_up;
using moeos::Geometry;
using moeos::kAwaitsByCounts;
using moeos::plan_table;
using moeos::ReadyWord;
using moeos::Segment;
using moeos::Task;
using moeos::TaskKind;
using moeos::TilePlan;
using moeos::u16;
using moeos::u32;
using moeos::twin::Machine;

constexpr u32 kEpoch = LoneRank::kEpoch;
constexpr u32 kTurn = 32;  // tiles of a large expert that go by turns
constexpr u32 kMaxTokens = 4096;
constexpr u32 kExpertsMost = 6;

using Random = std::mt19937;
u32 draw(Random& random, u32 low, u32 high) { return low + random() % (high - low + 1); }
u32 choose(Random& random, const std::vector<u32>& choices) {
  return choices[random() % choices.size()];
}

/// Rows of each expert, by source.
using Matrix = std::vector<std::vector<u32>>;

Matrix draw_rows(Random& random, u32 world, u32 experts) {
  const u32 most = choose(random, {0, 5, 20, 60, 200, world > 8 ? 200U : 700U});
  Matrix rows(experts, std::vector<u32>(world));
  for (auto& of_expert : rows) {
    for (u32& its : of_expert) {
      const double share = std::uniform_real_distribution<>()(random);
      its = static_cast<u32>(share * share * share * most);
    }
  }
  return rows;
}

Geometry draw_geometry(Random& random, u32 world, u32 experts) {
  Geometry g = small_geometry(world, world * experts, kMaxTokens);
  g.tile_rows = choose(random, {16, 128});
  g.narrow_rows = choose(random, {0, g.tile_rows / 2});
  g.product0_parts = draw(random, 1, 3);
  g.product1_parts = draw(random, 1, 3);
  g.product0_narrow_parts = g.product0_parts * draw(random, 1, 2);
  g.product1_narrow_parts = g.product1_parts * draw(random, 1, 2);
  g.segment_align = choose(random, {1, Geometry::kSegmentAlign});
  g.large_experts = draw(random, 0, 1);
  g.processors = draw(random, 1, 132);
  return g;
}

// --- The plan, row by row ---

struct Tile {
  u32 expert = 0;
  bool narrow = false;
  std::vector<Segment> segments;
  u32 result = 0;
};

u32 laid_out(const Tile& tile, u32 align) {
  u32 rows = 0;
  for (const Segment& segment : tile.segments) {
    rows += align_up(u32{segment.rows}, align);
  }
  return rows;
}

/// Adds a row of a source behind a tile's others; false if it has no room.
bool add_row(Tile& tile, const Geometry& g, u32 source, u32 row) {
  Tile with = tile;
  if (with.segments.empty() || with.segments.back().source != source) {
    with.segments.push_back({row, static_cast<u16>(source), 0});
  }
  ++with.segments.back().rows;
  const bool exact = !tile.narrow && g.segment_align == 1;
  const bool fits =
      laid_out(with, exact ? 1 : 8) <= g.tile_rows && with.segments.size() <= (exact ? 7U : 8U);
  tile = fits ? with : tile;
  return fits;
}

std::vector<Tile> tiles_of(const Geometry& g, const Matrix& rows) {
  std::vector<Tile> tiles;
  for (u32 expert = 0; expert < rows.size(); ++expert) {
    u32 padded = 0;
    for (const u32 its : rows[expert]) {
      padded += align_up(its, 8U);
    }
    const Tile empty{expert, padded <= g.narrow_rows, {}, 0};
    for (u32 source = 0; source < g.world; ++source) {
      for (u32 row = 0; row + g.tile_rows <= rows[expert][source]; row += g.tile_rows) {
        tiles.push_back(empty);
        tiles.back().segments = {{row, static_cast<u16>(source), static_cast<u16>(g.tile_rows)}};
      }
    }
    Tile open = empty;
    for (u32 source = 0; source < g.world; ++source) {
      const u32 all = rows[expert][source];
      for (u32 row = all / g.tile_rows * g.tile_rows; row < all; ++row) {
        if (!add_row(open, g, source, row)) {
          tiles.push_back(open);
          open = empty;
          expect(add_row(open, g, source, row), "an empty tile has room for a row");
        }
      }
    }
    if (!open.segments.empty()) {
      tiles.push_back(open);
    }
  }
  u32 result = 0;
  for (Tile& tile : tiles) {
    tile.result = result;
    const bool exact = !tile.narrow && g.segment_align == 1;
    result += align_up(laid_out(tile, exact ? 1 : 8), 8U);
  }
  return tiles;
}

/// All parts, in their order.
std::vector<ReadyWord> words_of(const Geometry& g, const std::vector<Tile>& tiles) {
  std::vector<ReadyWord> words;
  const u32 all = static_cast<u32>(tiles.size());
  for (const TaskKind kind : {TaskKind::product0, TaskKind::product1}) {
    const bool second = kind == TaskKind::product1;
    const u32 uncut = all - (second ? g.tiles_in_halves(all) : 0);
    const auto half_width = [&](u32 tile) { return tile >= uncut && !tiles[tile].narrow; };
    for (u32 first = 0; first < all;) {
      u32 end = first + 1;  // tiles that have turns
      while (g.large_experts != 0 && end < all && end - first < kTurn &&
             tiles[end].expert == tiles[first].expert && half_width(end) == half_width(first)) {
        ++end;
      }
      const bool narrow = tiles[first].narrow || half_width(first);
      const u32 parts = second ? g.product1_parts_of(narrow) : g.product0_parts_of(narrow);
      for (u32 part = 0; part < parts; ++part) {
        for (u32 tile = first; tile < end; ++tile) {
          const ReadyWord word(kEpoch, kind, tile, part);
          words.push_back(half_width(tile) ? word.cut_in_halves() : word);
        }
      }
      first = end;
    }
  }
  return words;
}

// --- Beside it ---

bool is_tile(const Task& made, const Tile& tile, const Geometry& g, u32 awaits) {
  const bool exact = !tile.narrow && g.segment_align == 1;
  u32 rows = 0;
  bool same = made.segment_count == tile.segments.size() && made.local_expert == tile.expert &&
              (made.narrow != 0) == tile.narrow && made.first_result == tile.result &&
              made.padded_rows == align_up(laid_out(tile, exact ? 1 : 8), 8U) &&
              made.epoch == kEpoch && made.awaits == awaits &&
              made.from == product_of(made.kind, false).rows;
  for (u32 s = 0; same && s < made.segment_count; ++s) {
    same = std::memcmp(&made.segments[s], &tile.segments[s], sizeof(Segment)) == 0;
    rows += tile.segments[s].rows;
  }
  return same && made.rows == rows;
}

void parts_follow_from_counts(const Geometry& g, const Matrix& rows,
                              const std::vector<Tile>& tiles) {
  const auto count = [&rows](u32 source, u32 expert) { return rows[expert][source]; };
  const auto plan = plan_table(g, kEpoch, count);
  const std::vector<ReadyWord> words = words_of(g, tiles);
  expect(plan.parts() == words.size(), "there are as many parts");
  expect(tiles.size() <= g.tiles_max(), "tiles are no more than any call's");
  expect(words.size() <= g.parts_max(), "nor are parts");
  for (u32 number = 0; number < words.size() && failed == 0; ++number) {
    Task made;
    std::memset(&made, 0xa5, sizeof(made));  // what is not written would be seen
    const ReadyWord word = plan.part(number, made);
    expect(word.sealed() == words[number].sealed(), "a number stands for the same part");
    expect(made.kind == word.kind() && (made.half_width != 0) == word.half_width() &&
               word.part() < made.parts,
           "its descriptor is of that part");
    expect(is_tile(made, tiles[word.task()], g, kAwaitsByCounts), "its tile has the same rows");
  }
}

void the_subscriber_writes_the_same_tiles(const Geometry& g, const Matrix& rows,
                                          const std::vector<Tile>& tiles) {
  LoneRank rank(g);
  TilePlan<Machine> plan(rank.layout, rank.rank.memory, rank.os);
  plan.begin(kEpoch);
  for (u32 source = 0; source < g.world; ++source) {
    u32* starts = rank.os.receive_starts(source);
    starts[0] = 0;
    for (u32 expert = 0; expert < rows.size(); ++expert) {
      starts[expert + 1] = starts[expert] + rows[expert][source];
    }
  }
  plan.plan_rest();
  expect(plan.tiles() == tiles.size(), "there are as many tiles");
  for (u32 nth = 0; nth < tiles.size() && failed == 0; ++nth) {
    Task made = rank.rank.memory.tasks[nth];
    for (u32 s = 0; s < made.segment_count; ++s) {
      made.segments[s].first_row -=
          rank.os.receive_starts(made.segments[s].source)[made.local_expert];
    }
    expect(is_tile(made, tiles[nth], g, 1), "a tile that is written has the same rows");
  }
}

/// The compiler can work a plan out, too: two sources, an expert.
constexpr u32 parts_of_two_sources() {
  Geometry g{};
  g.world = g.experts = 2;
  g.top_k = 1;
  g.max_tokens = g.capacity = 512;
  g.tile_rows = 128;
  g.product0_parts = g.product0_narrow_parts = g.product1_parts = g.product1_narrow_parts = 3;
  g.segment_align = g.processors = 1;
  const auto count = [](u32 source, u32) { return source == 0 ? 300U : 84U; };
  return plan_table(g, kEpoch, count).parts();
}
static_assert(parts_of_two_sources() == 3 * 2 * 3);

void draw_one(u32 seed) {
  Random random(seed);
  const u32 world = choose(random, {1, 2, 3, 4, 7, 8, seed % 8 == 0 ? draw(random, 9, 64) : 5U});
  const u32 experts = draw(random, 1, kExpertsMost);
  const Geometry g = draw_geometry(random, world, experts);
  const Matrix rows = draw_rows(random, world, experts);
  const std::vector<Tile> tiles = tiles_of(g, rows);
  parts_follow_from_counts(g, rows, tiles);
  if (seed % 64 == 0) {
    the_subscriber_writes_the_same_tiles(g, rows, tiles);
  }
  if (failed != 0) {
    std::printf("of matrix %u\n", seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const u32 matrices = argc > 1 ? static_cast<u32>(std::atoi(argv[1])) : 1000;
  for (u32 seed = 1; seed <= matrices && failed == 0; ++seed) {
    draw_one(seed);
  }
  std::printf("test_plan: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
