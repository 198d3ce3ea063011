// SPDX-License-Identifier: Apache-2.0
// The scheduler alone, sweep by sweep: which tiles' GEMMs it hands out in which order, and which of
// them in halves.
//
// Built and run by tests/native/test_native.py. What a part computes does not depend on any of
// this, so no comparison of results would notice.
#include <vector>

#include "runtime/scheduler.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::Geometry;
using moeos::MailboxView;
using moeos::ReadyWord;
using moeos::Scheduler;
using moeos::TaskKind;
using moeos::u32;
using moeos::twin::Machine;

constexpr u32 kEpoch = LoneRank::kEpoch;
constexpr u32 kProcessors = 16;

Geometry geometry_of(u32 processors) {
  Geometry g = small_geometry(1, 4, 4096);
  g.processors = processors;
  return g;
}

/// A rank whose processors claim whatever is handed out, at once.
class Handed {
 public:
  explicit Handed(u32 processors = kProcessors)
      : alone_(geometry_of(processors)), scheduler_(alone_.rank, alone_.call) {
    alone_.rank.memory.call(kEpoch).routed.value = 1;  // and there is nothing to send
  }
  Handed(const Handed&) = delete;
  Handed& operator=(const Handed&) = delete;

  /// Posts a GEMM of the next tile of its kind.
  void post(TaskKind kind, u32 parts = kParts) {
    u32& posted = kind == TaskKind::gemm0 ? first_ : second_;
    const MailboxView mailbox = alone_.rank.memory.mailbox(kind);
    mailbox.words[posted] = ReadyWord(kEpoch, kind, posted, parts).sealed();
    ++posted;
  }
  void post_all(TaskKind kind, u32 tiles) {
    for (u32 i = 0; i < tiles; ++i) {
      post(kind);
    }
  }
  /// There will be no more tiles than so many, of which the scheduler is given all but `others`.
  void all_made(u32 tiles, u32 others = 0) {
    *alone_.os.tiles_made = 1 + tiles;
    *alone_.os.tiles_posted = 1 + tiles - others;
  }
  /// Sweeps until nothing is left; what was handed out, in its order.
  std::vector<ReadyWord> hand_out() {
    std::vector<ReadyWord> words;
    for (bool more = true; more;) {
      const u32 before = *alone_.os.published;
      alone_.rank.memory.call(kEpoch).ring_claimed.value = before;
      scheduler_.step();
      more = *alone_.os.published > before;
      for (u32 slot = before; slot < *alone_.os.published; ++slot) {
        words.emplace_back(alone_.rank.memory.ring[slot]);
      }
    }
    return words;
  }

 private:
  LoneRank alone_;
  Scheduler<Machine> scheduler_;
  u32 first_ = 0;
  u32 second_ = 0;
};

u32 count(const std::vector<ReadyWord>& words, TaskKind kind) {
  u32 found = 0;
  for (const ReadyWord word : words) {
    found += word.kind() == kind ? 1 : 0;
  }
  return found;
}

/// Of the second GEMMs of so many tiles, handed out when all first ones have been: the parts.
u32 parts_of_second_gemms(u32 tiles) {
  Handed handed;
  handed.post_all(TaskKind::gemm0, tiles);
  handed.hand_out();
  handed.all_made(tiles);
  handed.post_all(TaskKind::gemm1, tiles);
  return count(handed.hand_out(), TaskKind::gemm1);
}

void the_rest_is_cut_where_each_half_has_a_processor() {
  expect(parts_of_second_gemms(1) == kNarrowParts, "one tile's 4 parts become 8");
  expect(parts_of_second_gemms(2) == 2 * kNarrowParts, "8 parts become 16, one a processor");
  expect(parts_of_second_gemms(3) == 3 * kParts, "of 24 halves, some processors would have two");
  expect(parts_of_second_gemms(4) == 4 * kParts, "16 parts are a round, and no rest");
  expect(parts_of_second_gemms(5) == 4 * kParts + kNarrowParts, "of 20, the last 4 are cut");
  expect(parts_of_second_gemms(7) == 7 * kParts, "of 28, the last 12 stay whole");
}

void only_the_last_tiles_are_cut() {
  Handed handed;
  handed.post_all(TaskKind::gemm0, 5);
  handed.hand_out();
  handed.all_made(5);
  handed.post_all(TaskKind::gemm1, 5);
  const std::vector<ReadyWord> words = handed.hand_out();
  for (u32 i = 0; i < words.size(); ++i) {
    expect(words[i].half_width() == (i >= 4 * kParts),
           "the last tile's parts are halves, no other's");
  }
}

void nothing_is_cut_before_all_first_gemms_are_handed_out() {
  Handed handed;
  handed.all_made(2);
  handed.post(TaskKind::gemm0);
  handed.hand_out();
  handed.post(TaskKind::gemm1);
  expect(count(handed.hand_out(), TaskKind::gemm1) == kParts, "another tile's are still to come");
}

void first_gemms_that_others_handed_out_are_not_waited_for() {
  Handed handed;
  handed.all_made(1, 1);
  handed.post(TaskKind::gemm1);
  expect(count(handed.hand_out(), TaskKind::gemm1) == kNarrowParts, "the one tile is cut");
}

void a_narrow_tile_is_not_cut_again() {
  Handed handed;
  handed.post(TaskKind::gemm0, kNarrowParts);
  handed.hand_out();
  handed.all_made(1);
  handed.post(TaskKind::gemm1, kNarrowParts);
  const std::vector<ReadyWord> words = handed.hand_out();
  expect(words.size() == kNarrowParts && !words[0].half_width(),
         "its parts are half as wide already");
}

/// When as many tiles of both GEMMs are ready: parts of second ones that go before the last part of
/// a first one.
u32 second_parts_before_the_last_first_one() {
  // As many processors as a tile has parts: no sweep ends amid a tile, and gives others the rest.
  Handed handed(kParts);
  handed.post_all(TaskKind::gemm0, 4);
  handed.post_all(TaskKind::gemm1, 4);
  const std::vector<ReadyWord> words = handed.hand_out();
  u32 before = 0;
  u32 found = 0;
  for (const ReadyWord word : words) {
    found += word.kind() == TaskKind::gemm1 ? 1 : 0;
    before = word.kind() == TaskKind::gemm0 ? found : before;
  }
  return before;
}

void both_gemms_have_turns() {
  const u32 turns = 2 * kParts;
  expect(second_parts_before_the_last_first_one() >= turns, "second ones do not wait for the end");
}

}  // namespace

int main() {
  the_rest_is_cut_where_each_half_has_a_processor();
  only_the_last_tiles_are_cut();
  nothing_is_cut_before_all_first_gemms_are_handed_out();
  first_gemms_that_others_handed_out_are_not_waited_for();
  a_narrow_tile_is_not_cut_again();
  both_gemms_have_turns();
  return failed == 0 ? 0 : 1;
}
