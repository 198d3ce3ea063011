// SPDX-License-Identifier: Apache-2.0
// The parts that everyone knows when a call begins: each is one ticket's, tiles have all tokens,
// and no second product comes before a first one.
//
// Build: g++ -std=c++20 -I. tests/native/plan/test_known_parts.cpp -o test_known_parts
#include <map>
#include <random>
#include <tuple>

#include "runtime/plan/known_parts.hpp"
#include "tests/native/expect.hpp"

namespace {

using namespace moeos;

Geometry draw_geometry(std::mt19937& random) {
  const auto draw = [&random](u32 least, u32 most) {
    return std::uniform_int_distribution<u32>(least, most)(random);
  };
  Geometry geometry{};
  geometry.world = draw(1, 4);
  geometry.experts = geometry.world * draw(1, 4);
  geometry.top_k = 1;
  geometry.max_tokens = draw(1, 400);
  geometry.capacity = geometry.max_tokens;
  geometry.chunk_rows = 32;
  geometry.tile_rows = draw(0, 1) == 0 ? 128 : 16;
  geometry.narrow_rows = draw(0, 1) == 0 ? 0 : geometry.tile_rows / 2;
  geometry.route_tokens = 32;
  geometry.route_slices = 1;
  geometry.processors = draw(1, 9);
  geometry.product0_parts = 1;
  geometry.product1_parts = draw(1, 5);
  geometry.product1_narrow_parts = draw(1, 9);
  geometry.segment_align = Geometry::kSegmentAlign;
  geometry.shared_bytes = 16;
  geometry.shared0_parts = draw(1, 5);
  geometry.shared0_narrow_parts = draw(1, 9);
  return geometry;
}

void check_call(const Geometry& geometry, u32 tokens) {
  const Call call{7, tokens, tokens, 0, 0};
  const u32 parts = known_parts(geometry, call) - route_parts(geometry, call);
  expect(parts <= geometry.shared_parts_max(), "a call has no more parts than there is room for");
  std::map<std::tuple<TaskKind, u32, u32>, u32> times;
  std::map<std::pair<TaskKind, u32>, Task> tiles;
  bool second = false;
  for (u32 number = 0; number < parts; ++number) {
    const ReadyWord word = shared_word(geometry, call, number);
    const Task task = shared_task(geometry, call, 3, word);
    second = second || word.kind() == TaskKind::product1;
    expect((word.kind() == TaskKind::product1) == second,
           "first products come before all second ones");
    expect(word.epoch() == call.epoch && task.kind == word.kind(), "word and task say the same");
    expect(word.part() < task.parts, "a part is one of its tile's");
    expect(is_shared(geometry, task) && task.tile >= geometry.tiles_max(),
           "tiles of tokens are told from those of rows");
    expect(second || task.parts == first_parts_of(geometry, task),
           "second products wait for as many parts as there are");
    ++times[{word.kind(), word.task(), word.part()}];
    tiles.emplace(std::pair{word.kind(), word.task()}, task);
  }
  for (const auto& [part, seen] : times) {
    expect(seen == 1, "each part is one ticket's");
  }
  u32 of_firsts = 0;
  u32 of_seconds = 0;
  u32 expected = 0;
  for (const auto& [tile, task] : tiles) {
    (task.kind == TaskKind::product0 ? of_firsts : of_seconds) += task.rows;
    expect(task.segments[0].first_row == task.first_result && task.segments[0].source == 3,
           "a tile's results are those of its tokens");
    expect(task.first_result + task.rows <= tokens && task.padded_rows >= task.rows,
           "a tile has none but the call's tokens");
    expected += task.parts;
  }
  expect(of_firsts == tokens && of_seconds == tokens, "all tokens pass both products");
  expect(expected == parts, "each part of each tile is a ticket's");
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (u32 i = 0; i < 300; ++i) {
    const Geometry geometry = draw_geometry(random);
    for (const u32 tokens : {0U, 1U, geometry.max_tokens / 2, geometry.max_tokens}) {
      check_call(geometry, tokens);
    }
  }
  return failed == 0 ? 0 : 1;
}
