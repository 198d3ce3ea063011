// SPDX-License-Identifier: Apache-2.0
// The plan of a call of few rows of several ranks: every processor makes the tiles that the
// subscriber would have written down.
//
// Built and run by tests/native/test_native.py. What a part computes does not depend on its place
// in the order, so no comparison of results would notice.
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "runtime/plan/counted_rows.hpp"
#include "runtime/plan/tile_plan.hpp"
#include "runtime/rows/packet.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::count_word;
using moeos::Failure;
using moeos::FewRows;
using moeos::Geometry;
using moeos::Plan;
using moeos::ReadyWord;
using moeos::Task;
using moeos::TaskKind;
using moeos::TilePlan;
using moeos::u32;
using moeos::u64;
using moeos::twin::Machine;
using Counts = FewRows<Machine>::Counts;
using Planned = Plan<Machine, FewRows<Machine>>;

constexpr u32 kEpoch = LoneRank::kEpoch;
constexpr u32 kMost = kNarrowRows;
constexpr u32 kIdentity = 77;

/// The rows of each expert, by source.
using Rows = std::vector<std::vector<u32>>;

Geometry geometry_of(u32 world, u32 local_experts, u32 narrow_rows) {
  Geometry g = small_geometry(world, world * local_experts, 512);
  g.up_front_rows = kMost;
  g.narrow_rows = narrow_rows;
  g.product1_narrow_parts = narrow_rows != 0 ? kNarrowParts : kParts;
  g.processors = 16;
  return g;
}

/// The first rank of a world, whose counts have come.
class Counted {
 public:
  Counted(const Rows& rows, u32 narrow_rows)
      : Counted(rows, geometry_of(static_cast<u32>(rows[0].size()), static_cast<u32>(rows.size()),
                                  narrow_rows)) {}
  Counted(const Rows& rows, const Geometry& geometry) : rows_(rows), rank_(geometry) {
    rank_.call.identity = kIdentity;
    for (u32 source = 0; source < rows[0].size(); ++source) {
      make_call(source, kEpoch, kIdentity);
    }
    for (u32 expert = 0; expert < rows.size(); ++expert) {
      for (u32 source = 0; source < rows[expert].size(); ++source) {
        count(source, expert, kEpoch, rows[expert][source]);
      }
    }
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  void count(u32 source, u32 expert, u32 epoch, u32 rows) {
    *reinterpret_cast<u64*>(rank_.heaps[0] + rank_.layout.count(kEpoch, source, expert)) =
        count_word(epoch, rows);
  }
  void make_call(u32 source, u32 epoch, u32 identity) {
    *reinterpret_cast<u64*>(rank_.heaps[0] + rank_.layout.call_of(kEpoch, source)) =
        count_word(epoch, identity);
  }
  FewRows<Machine> rows() const { return FewRows<Machine>(rank_.rank, rank_.call); }
  const Geometry& geometry() const { return rank_.geometry; }

  /// What the arrivals subscriber would write down.
  std::vector<Task> written() {
    TilePlan<Machine> plan(rank_.layout, rank_.rank.memory, rank_.os);
    plan.begin(kEpoch);
    for (u32 source = 0; source < rows_[0].size(); ++source) {
      u32* starts = rank_.os.receive_starts(source);
      starts[0] = 0;
      for (u32 expert = 0; expert < rows_.size(); ++expert) {
        starts[expert + 1] = starts[expert] + rows_[expert][source];
      }
    }
    plan.plan_rest();
    const Task* first = rank_.rank.memory.tasks;
    return std::vector<Task>(first, first + plan.tiles());
  }

 private:
  Rows rows_;
  LoneRank rank_;
};

bool same_tile(const Task& made, const Task& written) {
  bool same = made.segment_count == written.segment_count && made.epoch == written.epoch &&
              made.local_expert == written.local_expert && made.tile == written.tile &&
              made.rows == written.rows && made.padded_rows == written.padded_rows &&
              made.first_result == written.first_result && made.narrow == written.narrow &&
              made.awaits == moeos::kAwaitsByCounts && written.awaits == 1 &&
              made.half_width == 0 && made.from == product_of(made.kind, false).rows;
  for (u32 s = 0; same && s < made.segment_count; ++s) {
    same = std::memcmp(&made.segments[s], &written.segments[s], sizeof(moeos::Segment)) == 0;
  }
  return same;
}

void processors_make_the_tiles_that_would_be_written(const Rows& rows, u32 narrow_rows) {
  Counted counted(rows, narrow_rows);
  const Geometry& g = counted.geometry();
  expect(g.one_tile_rows() == kMost, "such a layer has such plans");
  const std::vector<Task> written = counted.written();
  const u32 tiles = static_cast<u32>(written.size());
  const bool narrow = narrow_rows != 0;
  const u32 firsts = tiles * g.product0_parts_of(narrow);
  const u32 parts = firsts + tiles * g.product1_parts_of(narrow);
  for (u32 number = 0; number < parts; ++number) {
    FewRows<Machine> here = counted.rows();
    expect(here.look() == Counts::here, "all counts are here");
    Planned plan(here);
    plan.make();
    expect(plan.parts() == parts, "a processor finds as many as are handed out");
    Task made;
    std::memset(&made, 0xa5, sizeof(made));  // what is not written would be seen
    const ReadyWord word = plan.part(number, made);
    const bool second = number >= firsts;
    const u32 each = second ? g.product1_parts_of(narrow) : g.product0_parts_of(narrow);
    const u32 tile = (second ? number - firsts : number) / each;
    expect(word.epoch() == kEpoch && word.kind() == made.kind &&
               made.kind == (second ? TaskKind::product1 : TaskKind::product0),
           "first GEMMs go before second ones");
    expect(word.part() == (second ? number - firsts : number) % each && made.parts == each,
           "a tile's parts follow each other");
    expect(same_tile(made, written[tile]), "a tile is the one that would be written");
  }
}

void a_count_of_each_source_is_waited_for_in_turn() {
  Counted counted({{1, 2}, {0, 3}, {4, 0}}, kNarrowRows);
  const FewRows<Machine> counts = counted.rows();
  for (u32 number = 0; number < 7; ++number) {
    const u64* first = counts.sample(number, 0);
    const u64* second = counts.sample(number, 1);
    expect(first != second && first == counts.sample(number, 2), "two sources have turns");
    expect(counts.has_come(*first) && counts.has_come(*second), "both have come");
  }
  counted.count(0, 1, kEpoch - 1, 2);
  expect(!counts.has_come(*counts.sample(2, 0)) && counts.has_come(*counts.sample(2, 1)),
         "one is another call's");
}

Rows draw_rows(std::mt19937& random, u32 experts, u32 sources) {
  Rows rows(experts, std::vector<u32>(sources));
  for (auto& of_expert : rows) {
    u32 room = kMost;
    for (u32& its : of_expert) {
      its = random() % 3 == 0 ? 0 : std::min<u32>(random() % 30, room);
      room -= moeos::align_up(its, 8U);
    }
  }
  return rows;
}

void a_count_that_is_overwritten_is_named() {
  Counted counted({{1, 2}, {0, 3}, {4, 0}}, kNarrowRows);
  expect(counted.rows().look() == Counts::here, "all are here");
  for (const auto& [wrong, what] : {std::pair{u64{kEpoch - 2} << 32 | 3, Counts::missing},
                                    std::pair{u64{kEpoch} << 32 | (kMost + 1), Counts::too_many}}) {
    counted.count(1, 1, static_cast<u32>(wrong >> 32), static_cast<u32>(wrong));
    FewRows<Machine> here = counted.rows();
    expect(here.look() == what, "one is another call's, or too large");
    Failure failure{};
    here.name_damaged(failure);
    expect(failure.peer == 1 && failure.expert == 1 && failure.seen == wrong, "which, and what");
  }
}

Counts found(const Rows& rows, const Geometry& geometry) {
  return Counted(rows, geometry).rows().look();
}

/// The subscriber makes tiles then, and must see the same.
void rows_that_are_not_few_have_no_such_plan() {
  for (const u32 narrow_rows : {kNarrowRows, 0U}) {
    const Geometry g = geometry_of(4, 2, narrow_rows);
    expect(found({{0, 0, 0, 0}, {16, 16, 16, 16}}, g) == Counts::here, "a tile is full");
    expect(found({{0, 0, 0, 0}, {16, 16, 16, 17}}, g) == Counts::too_many, "one row is too many");
    // Of four times as many rows as a byte has sums that are none.
    expect(found({{64, 64, 64, 64}, {1, 0, 0, 0}}, g) == Counts::too_many, "nor sources' sums");
  }
  expect(found({{57, 1}}, geometry_of(2, 1, kNarrowRows)) == Counts::too_many, "padded they are");

  Geometry once = geometry_of(2, 4, kNarrowRows);
  once.dedup_rows = 40;
  expect(!once.few_rows_come_alone(), "a source may send so many rows that its tokens go once");
  expect(found({{20, 19}, {0, 20}, {0, 0}, {0, 0}}, once) == Counts::here, "each comes as it is");
  expect(found({{20, 19}, {0, 21}, {0, 0}, {0, 0}}, once) == Counts::too_many, "then no more");

  Geometry rings = geometry_of(2, 4, kNarrowRows);
  rings.max_tokens = rings.capacity = 4096;
  rings.ring_rows = 1;
  expect(rings.rings_cells() && rings.few_rows_of_source() == 160, "cells have few places");
  expect(found({{0, 60}, {0, 50}, {0, 50}, {0, 0}}, rings) == Counts::here, "each has its own");
  expect(found({{0, 60}, {0, 50}, {0, 50}, {0, 1}}, rings) == Counts::too_many, "there is no more");

  Geometry pool = geometry_of(2, 6, kNarrowRows);
  pool.max_tokens = pool.capacity = 4096;
  pool.between_rows = 1;
  expect(!pool.few_rows_have_places() && pool.pool_rows() == 256, "few places between products");
  const Rows full(4, {32, 32});
  Rows rows = full;
  rows.resize(6, {0, 0});
  expect(found(rows, pool) == Counts::here, "which so many rows have");
  rows[4][1] = 1;
  expect(found(rows, pool) == Counts::too_many, "and no more");
}

void counts_of_another_call_are_not_planned_by() {
  Counted counted({{1, 2}, {0, 3}}, kNarrowRows);
  counted.make_call(1, kEpoch, kIdentity + 1);
  expect(counted.rows().look() == Counts::missing, "a source makes another call");
  counted.make_call(1, kEpoch - 2, kIdentity);
  expect(counted.rows().look() == Counts::missing, "or has not said which");
  counted.make_call(1, kEpoch, kIdentity);
  expect(counted.rows().look() == Counts::here, "or it makes ours");
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const u32 narrow_rows : {kNarrowRows, 0U}) {
    processors_make_the_tiles_that_would_be_written({{0, 0}, {5, 0}, {0, 0}, {1, 56}}, narrow_rows);
    processors_make_the_tiles_that_would_be_written({{64, 0}}, narrow_rows);
    for (const u32 sources : {2U, 3U, 4U, 7U}) {
      processors_make_the_tiles_that_would_be_written(draw_rows(random, 1, sources), narrow_rows);
      processors_make_the_tiles_that_would_be_written(draw_rows(random, 40, sources), narrow_rows);
    }
  }
  processors_make_the_tiles_that_would_be_written(draw_rows(random, 33, 8), kNarrowRows);
  a_count_of_each_source_is_waited_for_in_turn();
  a_count_that_is_overwritten_is_named();
  rows_that_are_not_few_have_no_such_plan();
  counts_of_another_call_are_not_planned_by();
  std::printf("test_few_rows: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
