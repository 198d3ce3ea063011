// SPDX-License-Identifier: Apache-2.0
// The plans that processors make, by a warp of 32 lanes as by one lane.
//
// Built and run by tests/native/test_native.py. The twin's warps have one lane, which has every
// part; here most lanes do not have the part that is asked for.
#include <cstring>
#include <random>
#include <vector>

#include "runtime/plan/counted_rows.hpp"
#include "runtime/rows/packet.hpp"
#include "tests/native/lone_rank.hpp"
#include "tests/native/warp.hpp"

namespace {

using moeos::Call;
using moeos::count_word;
using moeos::FewRows;
using moeos::Geometry;
using moeos::kNone;
using moeos::OneSourceRows;
using moeos::Plan;
using moeos::Rank;
using moeos::Task;
using moeos::u32;
using moeos::u64;
using moeos::twin::Machine;

using Random = std::mt19937;

struct Part {
  u64 word;
  Task task;
};

template <class P>
bool all_are_here(OneSourceRows<P>& rows) {
  return rows.look();
}
template <class P>
bool all_are_here(FewRows<P>& rows) {
  return rows.look() == FewRows<P>::Counts::here;
}

/// All parts, in their order. By all lanes.
template <class P, class Rows>
void plan_parts(const Rank<P>& rank, const Call& call, std::vector<Part>& parts) {
  Rows rows(rank, call);
  expect(all_are_here(rows), "all counts are here");
  Plan<P, Rows> plan(rows);
  plan.make();
  const u32 all = plan.parts();
  if (P::lane() == 0) {
    parts.resize(all);
    std::memset(static_cast<void*>(parts.data()), 0, all * sizeof(Part));
  }
  P::sync_lanes();
  for (u32 number = 0; number < all; ++number) {
    parts[number].word = plan.part(number, parts[number].task).sealed();
  }
}

Rank<Warp> warp_of(const LoneRank& lone) {
  return {Warp(lone.rank.platform), lone.rank.layout, lone.rank.memory,     lone.rank.os,
          lone.rank.heap,           lone.rank.rank,   lone.rank.deadline_ns};
}

template <template <class> class Rows>
void a_warp_plans_as_one_lane_does(const LoneRank& lone) {
  std::vector<Part> by_one;
  plan_parts<Machine, Rows<Machine>>(lone.rank, lone.call, by_one);
  const Rank<Warp> rank = warp_of(lone);
  std::vector<Part> by_warp;
  Warp::run([&] { plan_parts<Warp, Rows<Warp>>(rank, lone.call, by_warp); });
  expect(by_warp.size() == by_one.size(), "there are as many parts");
  for (u32 number = 0; number < by_one.size() && failed == 0; ++number) {
    const Part& one = by_one[number];
    const Part& other = by_warp[number];
    expect(one.word == other.word, "a number stands for the same part");
    expect(std::memcmp(&one.task, &other.task, sizeof(Task)) == 0, "of the same tile");
  }
}

/// `narrow`: whether there are narrow tiles; a layer of gradients has none, nor parts of any.
Geometry geometry_of(u32 world, u32 local_experts, bool narrow, u32 large_experts) {
  Geometry g = small_geometry(world, world * local_experts, 4096);
  g.up_front_rows = kNarrowRows;
  g.large_experts = large_experts;
  g.processors = 16;
  if (!narrow) {
    g.narrow_rows = g.product0_narrow_parts = g.product1_narrow_parts = 0;
  }
  return g;
}

void count(LoneRank& lone, u32 source, u32 expert, u32 rows) {
  *reinterpret_cast<u64*>(lone.heaps[0] + lone.layout.count(LoneRank::kEpoch, source, expert)) =
      count_word(LoneRank::kEpoch, rows);
}

void draw_counts(Random& random, LoneRank& lone) {
  for (u32 expert = 0; expert < lone.geometry.experts; ++expert) {
    const u32 most = random() % 4 == 0 ? 700 : 60;
    count(lone, 0, expert, random() % 3 == 0 ? 0 : random() % most);
  }
}

void of_one_source(Random& random, bool narrow, u32 large_experts) {
  LoneRank lone(geometry_of(1, 1 + random() % 80, narrow, large_experts));
  draw_counts(random, lone);
  a_warp_plans_as_one_lane_does<OneSourceRows>(lone);
}

/// Second products go between later first ones: those of a lane's experts as soon as `after` first
/// parts stand behind its own ones, or all. Each product's parts keep their order.
void second_products_go_between(Random& random, u32 after, u32 large_experts) {
  Geometry g = geometry_of(1, 1 + random() % 80, false, large_experts);
  g.second_after = after;
  LoneRank lone(g);
  draw_counts(random, lone);
  std::vector<Part> plain;  // by one lane, whose second parts stand behind all first ones
  plan_parts<Machine, OneSourceRows<Machine>>(lone.rank, lone.call, plain);
  std::vector<Part> first[Warp::kLanes];
  std::vector<Part> second[Warp::kLanes];
  const u32 each = (g.experts + Warp::kLanes - 1) / Warp::kLanes;
  for (const Part& part : plain) {
    auto& of_product = part.task.kind == moeos::kFirstProduct.kind ? first : second;
    of_product[part.task.local_expert / each].push_back(part);
  }
  std::vector<Part> wanted;
  u32 passed = 0;  // first parts
  u32 next = 0;    // whose second parts come next
  u32 end = 0;     // of the first parts up to its own
  const auto add_second_ones = [&](bool all) {
    for (; next < Warp::kLanes; ++next) {
      if (!all && end + first[next].size() + after > passed) {
        return;
      }
      end += first[next].size();
      wanted.insert(wanted.end(), second[next].begin(), second[next].end());
    }
  };
  for (const auto& of_lane : first) {
    for (const Part& part : of_lane) {
      add_second_ones(false);
      wanted.push_back(part);
      ++passed;
    }
  }
  add_second_ones(true);
  const Rank<Warp> rank = warp_of(lone);
  std::vector<Part> found;
  Warp::run([&] { plan_parts<Warp, OneSourceRows<Warp>>(rank, lone.call, found); });
  expect(found.size() == wanted.size(), "there are as many parts");
  for (u32 number = 0; number < found.size() && failed == 0; ++number) {
    expect(found[number].word == wanted[number].word, "a part has its place");
    expect(std::memcmp(&found[number].task, &wanted[number].task, sizeof(Task)) == 0,
           "and its tile");
  }
}

/// Whether calls of such a layer are planned so.
bool of_few_rows(Random& random, bool narrow) {
  const u32 world = 2 + random() % 7;
  const u32 experts = 1 + random() % 50;
  LoneRank lone(geometry_of(world, experts, narrow, 0));
  for (u32 expert = 0; expert < experts; ++expert) {
    for (u32 source = 0; source < world; ++source) {
      count(lone, source, expert, random() % 3 == 0 ? 0 : random() % 9);
    }
  }
  for (u32 source = 0; source < world; ++source) {
    *reinterpret_cast<u64*>(lone.heaps[0] + lone.layout.call_of(LoneRank::kEpoch, source)) =
        count_word(LoneRank::kEpoch, lone.call.identity);
  }
  if (lone.geometry.one_tile_rows() == 0) {
    return false;
  }
  a_warp_plans_as_one_lane_does<FewRows>(lone);
  return true;
}

void of_tokens_in_place(Random& random, bool narrow) {
  Geometry g = geometry_of(1, 1 + random() % 80, narrow, 0);
  g.dispatch_tokens = 4;
  g.in_place_tokens = Geometry::kInPlaceTokens;
  LoneRank lone(g);
  lone.call.tokens = 1 + random() % Geometry::kInPlaceTokens;
  lone.call.pair_limit = 8;
  lone.call.may_be_unsent = 1;
  expect(lone.geometry.reads_in_place(lone.call.tokens), "so few tokens are read in place");
  for (u32 pair = 0; pair < lone.call.tokens * lone.geometry.top_k; ++pair) {
    const u32 expert = random() % 5 == 0 ? kNone : random() % lone.geometry.experts;
    moeos::tell_choice<Machine>(lone.rank.memory, LoneRank::kEpoch, pair, expert);
  }
  a_warp_plans_as_one_lane_does<OneSourceRows>(lone);
}

}  // namespace

int main() {
  Random random(1);
  for (const bool narrow : {true, false}) {
    u32 small_batches = 0;
    for (u32 i = 0; i < 10 && failed == 0; ++i) {
      of_one_source(random, narrow, 0);
      of_one_source(random, narrow, 1);
      small_batches += of_few_rows(random, narrow) ? 1 : 0;
      of_tokens_in_place(random, narrow);
      second_products_go_between(random, 1 + random() % 40, i % 2);
    }
    expect(small_batches > 0, "some layers have a small-batch path");
  }
  std::printf("test_warp_plans: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
