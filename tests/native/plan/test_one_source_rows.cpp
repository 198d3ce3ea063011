// SPDX-License-Identifier: Apache-2.0
// The plan of a rank that is alone, from its counts or its choices: which parts there are, in which
// order, and of which rows.
//
// Built and run by tests/native/test_native.py. What a part computes does not depend on its place
// in the order, so no comparison of results would notice.
#include <set>
#include <tuple>
#include <vector>

#include "runtime/plan/counted_rows.hpp"
#include "runtime/rows/packet.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::align_up;
using moeos::ceil_div;
using moeos::count_word;
using moeos::Geometry;
using moeos::kAwaitsByCounts;
using moeos::OneSourceRows;
using moeos::Plan;
using moeos::ReadyWord;
using moeos::RowsIn;
using moeos::Task;
using moeos::TaskKind;
using moeos::u32;
using moeos::u64;
using moeos::twin::Machine;
using Planned = Plan<Machine, OneSourceRows<Machine>>;

constexpr u32 kEpoch = LoneRank::kEpoch;
constexpr u32 kTurn = 32;  // tiles of a large expert that go by turns

Geometry geometry_of(u32 experts, u32 large_experts) {
  Geometry g = small_geometry(1, experts, 8192);
  g.large_experts = large_experts;
  g.up_front_rows = kNarrowRows;
  g.processors = 16;
  return g;
}

struct Part {
  ReadyWord word;
  Task task;
};

/// A rank whose counts come one by one.
class Alone {
 public:
  Alone(const std::vector<u32>& rows, u32 large_experts)
      : rows_(rows),
        alone_(geometry_of(static_cast<u32>(rows.size()), large_experts)),
        plan_(OneSourceRows<Machine>(alone_.rank, alone_.call)) {}
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

  void count(u32 expert, u32 epoch, u32 rows) {
    *reinterpret_cast<u64*>(alone_.heaps[0] + alone_.layout.count(kEpoch, 0, expert)) =
        count_word(epoch, rows);
  }
  bool look() { return plan_.rows().look(); }
  bool begun(u32 expert) { return plan_.rows().begun(expert); }

  /// All parts, in their order.
  std::vector<Part> parts() {
    for (u32 expert = 0; expert < rows_.size(); ++expert) {
      count(expert, kEpoch, rows_[expert]);
    }
    expect(look(), "all counts are here");
    plan_.make();
    std::vector<Part> parts(plan_.parts());
    for (u32 number = 0; number < parts.size(); ++number) {
      parts[number].word = plan_.part(number, parts[number].task);
    }
    return parts;
  }

  const Geometry& geometry() const { return alone_.geometry; }

 private:
  std::vector<u32> rows_;
  LoneRank alone_;
  Planned plan_;
};

constexpr u32 kSmall = 0;
constexpr u32 kLarge = 1;

void nothing_is_known_before_all_counts_are_here() {
  Alone alone({5, 0, 7}, kSmall);
  expect(!alone.look() && !alone.begun(0), "there are no counts");
  alone.count(0, kEpoch, 5);
  alone.count(1, kEpoch, 0);
  alone.count(2, kEpoch - 2, 7);
  expect(alone.begun(3) && !alone.begun(2), "of this call, one is here, and one is not");
  expect(!alone.look(), "one is of another call");
  alone.count(2, kEpoch, alone.geometry().capacity + 1);
  expect(!alone.look(), "one is more than an expert can get");
  alone.count(2, kEpoch, 7);
  expect(alone.look(), "all are here");
}

/// Every row of every expert is in one tile, every tile has each of its parts once in each GEMM,
/// and all first GEMMs go first.
void expect_a_whole_plan(const std::vector<u32>& rows, u32 large_experts) {
  Alone alone(rows, large_experts);
  const Geometry& g = alone.geometry();
  const std::vector<Part> parts = alone.parts();
  std::vector<u32> covered(rows.size(), 0);
  std::set<std::tuple<TaskKind, u32, u32>> seen;
  u32 starts = 0;
  std::vector<u32> start(rows.size());
  u32 tiles = 0;
  for (u32 expert = 0; expert < rows.size(); ++expert) {
    start[expert] = starts;
    starts += rows[expert];
    tiles += ceil_div(rows[expert], kTileRows);
  }
  u32 expected = 0;
  u32 result = 0;
  std::vector<bool> known(tiles, false);
  bool second = false;
  for (const Part& part : parts) {
    const Task& task = part.task;
    expect(task.kind == part.word.kind() && task.epoch == kEpoch && task.awaits == kAwaitsByCounts,
           "a part's word and its descriptor agree");
    second = second || task.kind == TaskKind::product1;
    expect(second == (task.kind == TaskKind::product1), "no first GEMM is behind a second one");
    expect(part.word.part() < task.parts, "a part is one of its tile's");
    expect(task.tile < tiles, "a tile is one of the call's");
    expect(seen.emplace(task.kind, task.tile, part.word.part()).second, "no part is there twice");
    const bool narrow = align_up(rows[task.local_expert], 8U) <= kNarrowRows;
    expect((task.narrow != 0) == narrow, "experts of few rows are cut narrow");
    const bool half_width = second && !narrow && task.tile + g.tiles_in_halves(tiles) >= tiles;
    expect((task.half_width != 0) == half_width, "the last tiles' second GEMMs are cut in halves");
    if (task.tile < tiles && !known[task.tile]) {
      known[task.tile] = true;
      covered[task.local_expert] += task.rows;
      result += task.padded_rows;
      expected += g.product0_parts_of(narrow);
      const bool uncut = !narrow && task.tile + g.tiles_in_halves(tiles) < tiles;
      expected += g.product1_parts_of(!uncut);
      expect(task.segment_count == 1 && task.segments[0].rows == task.rows, "a tile is one run");
      expect(task.padded_rows == align_up(task.rows, 8U), "a tile is padded to eights");
      const u32 first = task.segments[0].first_row - start[task.local_expert];
      expect(first % kTileRows == 0 && first + task.rows <= rows[task.local_expert] &&
                 (task.rows == kTileRows || first + task.rows == rows[task.local_expert]),
             "a tile is full, or an expert's last one");
      expect(task.first_result + task.padded_rows <= g.intermediate_rows_max(), "results fit");
    }
  }
  expect(parts.size() == expected, "there are as many parts as all tiles have");
  expect(covered == rows, "all rows are in tiles");
  expect(result <= g.intermediate_rows_max(), "all results fit");
}

constexpr u32 kNone = moeos::kNone;

/// Tokens that are read in place: the plan follows from their choices alone, and says which token
/// each row is.
void choices_make_the_plan_of_few_tokens(u32 limit, const std::vector<u32>& choices) {
  constexpr u32 kExperts = 7;
  Geometry g = geometry_of(kExperts, kSmall);
  g.dispatch_tokens = 4;
  g.in_place_tokens = Geometry::kInPlaceTokens;
  LoneRank alone(g);
  alone.call.tokens = static_cast<u32>(choices.size()) / g.top_k;
  alone.call.pair_limit = limit;
  alone.call.may_be_unsent = 1;
  expect(g.reads_in_place(alone.call.tokens), "so few tokens are read in place");
  Planned plan(OneSourceRows<Machine>(alone.rank, alone.call));
  u64* const words = alone.rank.memory.choices;
  for (u32 pair = 0; pair < choices.size(); ++pair) {
    expect(!plan.rows().begun(pair) && !plan.rows().look(), "not all choices are here");
    words[pair] = count_word(kEpoch - 2, choices[pair]);
    expect(!plan.rows().begun(pair) && !plan.rows().look(), "one is of another call");
    words[pair] = count_word(kEpoch, kExperts);
    expect(!plan.rows().look(), "one is no expert");
    moeos::tell_choice<Machine>(alone.rank.memory, kEpoch, pair, choices[pair]);
    expect(plan.rows().begun(pair), "it is here");
  }
  expect(plan.rows().look(), "all choices are here");
  plan.make();
  std::vector<std::vector<u32>> tokens(kExperts);
  u32 sent = 0;
  for (u32 pair = 0; pair < choices.size(); ++pair) {
    if (choices[pair] != kNone && tokens[choices[pair]].size() < limit) {
      tokens[choices[pair]].push_back(pair / g.top_k);
      ++sent;
    }
  }
  u32 tiles = 0;
  for (const auto& of_expert : tokens) {
    tiles += of_expert.empty() ? 0 : 1;
  }
  expect(plan.parts() == tiles * 2 * kNarrowParts, "each expert that is chosen has a tile");
  u32 rows = 0;
  for (u32 number = 0; number < plan.parts(); ++number) {
    Task task;
    const ReadyWord word = plan.part(number, task);
    const bool first = word.kind() == TaskKind::product0;
    expect(task.from == (first ? RowsIn::listed_tokens : RowsIn::between),
           "first GEMMs read tokens in place");
    expect(first != moeos::waits_for_inputs(task), "and wait for nothing");
    if (first && word.part() == 0) {
      const std::vector<u32>& its = tokens[task.local_expert];
      expect(task.rows == its.size(), "a tile has a row for each token");
      for (u32 row = 0; row < task.rows && row < its.size(); ++row) {
        expect(moeos::token_of_row(task, row) == its[row], "in the order of tokens");
      }
      expect(task.segments[0].first_row == rows, "results go behind those of experts before");
      rows += task.rows;
    }
  }
  expect(rows == sent, "all pairs that are sent have a row");
}

void tiles_of_large_experts_go_by_turns() {
  const u32 tiles = kTurn + 3;
  Alone alone({tiles * kTileRows}, kLarge);
  const std::vector<Part> parts = alone.parts();
  for (u32 i = 0; i < tiles * kParts; ++i) {
    const bool rest = i >= kTurn * kParts;
    const u32 of_turn = rest ? i - kTurn * kParts : i;
    const u32 together = rest ? tiles - kTurn : kTurn;
    expect(parts[i].task.tile == (rest ? kTurn : 0) + of_turn % together &&
               parts[i].word.part() == of_turn / together,
           "the first part of each tile, then the second");
  }
  Alone small({3 * kTileRows}, kSmall);
  const std::vector<Part> others = small.parts();
  for (u32 i = 0; i < 3 * kParts; ++i) {
    expect(others[i].task.tile == i / kParts && others[i].word.part() == i % kParts,
           "tiles of small experts one after the other");
  }
}

}  // namespace

int main() {
  nothing_is_known_before_all_counts_are_here();
  for (const u32 large : {kSmall, kLarge}) {
    expect_a_whole_plan({0, 0, 0}, large);
    expect_a_whole_plan({1}, large);
    expect_a_whole_plan({64, 65, 0, 128, 129, 300}, large);
    expect_a_whole_plan({0, 5000, 0, 12}, large);
    expect_a_whole_plan({17, 130, 700, 0, 64, 4200}, large);
    expect_a_whole_plan(std::vector<u32>(64, 3), large);
    expect_a_whole_plan(std::vector<u32>(40, 200), large);
  }
  choices_make_the_plan_of_few_tokens(8, {6, 2});
  choices_make_the_plan_of_few_tokens(8, {0, 5, 5, 0, 3, 5, 6, 5});
  choices_make_the_plan_of_few_tokens(8, {kNone, 5, kNone, kNone, 3, 5});
  choices_make_the_plan_of_few_tokens(1, {0, 5, 5, 0, 3, 5, 6, 5});
  choices_make_the_plan_of_few_tokens(8, {kNone, kNone});
  tiles_of_large_experts_go_by_turns();
  std::printf("test_one_source_rows: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
