// SPDX-License-Identifier: Apache-2.0
// The scheduler alone, sweep by sweep: which tiles' GEMMs it hands out, and in which order.
//
// Built and run by tests/native/test_native.py. What a part computes does not depend on any of
// this, so no comparison of results would notice.
#include <set>
#include <tuple>
#include <vector>

#include "runtime/actors/scheduler.hpp"
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
    u32& posted = kind == TaskKind::product0 ? first_ : second_;
    const MailboxView mailbox = alone_.rank.memory.mailbox(kind);
    mailbox.words[posted] = ReadyWord(kEpoch, kind, posted, parts).sealed();
    ++posted;
  }
  void post_all(TaskKind kind, u32 tiles) {
    for (u32 i = 0; i < tiles; ++i) {
      post(kind);
    }
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

void each_part_of_a_tile_is_handed_out_once() {
  Handed handed;
  handed.post_all(TaskKind::product0, 3);
  handed.post(TaskKind::product1, kNarrowParts);
  std::set<std::tuple<TaskKind, u32, u32>> seen;
  const std::vector<ReadyWord> words = handed.hand_out();
  for (const ReadyWord word : words) {
    expect(!word.half_width(), "tiles of rows that are here have whole parts");
    seen.emplace(word.kind(), word.task(), word.part());
  }
  expect(words.size() == 3 * kParts + kNarrowParts && seen.size() == words.size(),
         "each part of each tile is handed out once");
}

/// When as many tiles of both GEMMs are ready: parts of second ones that go before the last part of
/// a first one.
u32 second_parts_before_the_last_first_one() {
  // As many processors as a tile has parts: no sweep ends amid a tile, and gives others the rest.
  Handed handed(kParts);
  handed.post_all(TaskKind::product0, 4);
  handed.post_all(TaskKind::product1, 4);
  const std::vector<ReadyWord> words = handed.hand_out();
  u32 before = 0;
  u32 found = 0;
  for (const ReadyWord word : words) {
    found += word.kind() == TaskKind::product1 ? 1 : 0;
    before = word.kind() == TaskKind::product0 ? found : before;
  }
  return before;
}

void both_gemms_have_turns() {
  const u32 turns = 2 * kParts;
  expect(second_parts_before_the_last_first_one() >= turns, "second ones do not wait for the end");
}

}  // namespace

int main() {
  each_part_of_a_tile_is_handed_out_once();
  both_gemms_have_turns();
  return failed == 0 ? 0 : 1;
}
