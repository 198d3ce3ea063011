// SPDX-License-Identifier: Apache-2.0
// The arrivals subscriber alone, when counts have come: which calls it plans whole, and in which
// order it hands their parts out.
//
// Built and run by tests/native/test_native.py. What a part computes does not depend on any of
// this, so no comparison of results would notice.
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "runtime/actors/os.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::ArrivalsSubscriber;
using moeos::FoundBy;
using moeos::Geometry;
using moeos::Planned;
using moeos::ReadyWord;
using moeos::TaskKind;
using moeos::u32;
using moeos::u64;
using moeos::twin::Machine;

constexpr u32 kEpoch = LoneRank::kEpoch;
constexpr u32 kSources = 2;
constexpr u32 kProcessors = 6;

/// What the sources send to each expert, alike.
using Rows = std::vector<u32>;

Geometry geometry_of(u32 experts) {
  Geometry g = small_geometry(kSources, kSources * experts, 4096);
  g.up_front_rows = kNarrowRows;
  g.processors = kProcessors;
  return g;
}

/// A rank to which two sources send rows.
class Arrivals {
 public:
  explicit Arrivals(const Rows& rows, u32 hidden_bytes = 16, u32 may_be_unsent = 0,
                    u32 between_rows = 0, u32 tokens = 4)
      : rows_(rows), rank_([&] {
          Geometry g = geometry_of(static_cast<u32>(rows.size()));
          g.hidden_bytes = hidden_bytes;
          g.between_rows = between_rows;
          return g;
        }()) {
    rank_.call.tokens = tokens;
    rank_.call.may_be_unsent = may_be_unsent;
    moeos::begin_call(rank_.rank, rank_.call);
    subscriber_.emplace(rank_.rank, rank_.call);
    for (u32 source = 0; source < kSources; ++source) {
      u32* starts = rank_.os.receive_starts(source);
      for (u32 expert = 0; expert < rows.size(); ++expert) {
        starts[expert + 1] = starts[expert] + rows[expert];
      }
    }
    handed_out_ = *rank_.os.published;
  }
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  void count(u32 source) {
    for (u32 expert = 0; expert < rows_.size(); ++expert) {
      *rank_.rank.here<u64>(rank_.layout.count(kEpoch, source, expert)) =
          moeos::count_word(kEpoch, rows_[expert]);
    }
    *rank_.rank.here<u64>(rank_.layout.call_of(kEpoch, source)) =
        moeos::count_word(kEpoch, rank_.call.identity);
    rank_.os.counts_known[source] = kEpoch;
  }
  void count_all() {
    for (u32 source = 0; source < kSources; ++source) {
      count(source);
    }
  }
  void all_rows_come(u32 source, u32 epoch = kEpoch) {
    for (u32 chunk = 0; chunk * geometry().chunk_rows < rank_.os.rows_received(source); ++chunk) {
      *rank_.rank.here<u32>(rank_.layout.arrived(source, chunk)) = moeos::seal(epoch);
    }
  }
  /// Steps until it is decided how tiles are made, for a second at most; the parts that are handed
  /// out.
  std::vector<ReadyWord> steps_until_planned() {
    std::vector<ReadyWord> words;
    const u64 begun_ns = Machine::now_ns();
    while (planned() == Planned::unknown && Machine::now_ns() - begun_ns < 1'000'000'000) {
      for (const ReadyWord word : step()) {
        words.push_back(word);
      }
    }
    return words;
  }
  /// Steps for twice as long as counts are awaited; whether nothing is decided or handed out.
  bool steps_in_vain() {
    bool in_vain = true;
    const u64 begun_ns = Machine::now_ns();
    while (Machine::now_ns() - begun_ns < 2 * ArrivalsSubscriber<Machine>::kCountsPatienceNs) {
      in_vain = step().empty() && planned() == Planned::unknown && in_vain;
    }
    return in_vain;
  }
  /// Tiles that wait in the scheduler's mailbox.
  std::set<u32> posted() const {
    std::set<u32> tiles;
    const moeos::MailboxView mailbox = rank_.rank.memory.mailbox(TaskKind::product0);
    for (u32 slot = 0; slot < mailbox.capacity; ++slot) {
      const ReadyWord word(mailbox.words[slot]);
      if (word.epoch() == kEpoch) {
        tiles.insert(word.task());
      }
    }
    return tiles;
  }
  void processors_idle() { *rank_.os.wanted = 100 * kProcessors; }
  void processors_decide() {
    rank_.rank.memory.call(kEpoch).found_by.value = static_cast<u32>(FoundBy::processors);
  }
  FoundBy found_by() const {
    return static_cast<FoundBy>(rank_.rank.memory.call(kEpoch).found_by.value);
  }
  bool has_failed() const { return rank_.rank.leaving(kEpoch); }
  void unsent_are_handed_out() { handed_out_ = ++*rank_.os.published; }

  /// A step; the parts that it hands out.
  std::vector<ReadyWord> step() {
    subscriber_->step();
    std::vector<ReadyWord> words;
    for (; handed_out_ < *rank_.os.published; ++handed_out_) {
      words.emplace_back(rank_.rank.memory.ring[handed_out_]);
    }
    return words;
  }
  /// Steps until every flag has been looked at; a step looks at some of each source.
  void look_at_all() {
    for (u32 chunk = 0; chunk < geometry().chunks(); ++chunk) {
      step();
    }
  }
  /// Of whom rows are missing; kNone: of nobody.
  u32 late_source() {
    moeos::Failure failure{};
    const bool late = subscriber_->answer(failure) == moeos::Answer::missing;
    return late ? failure.peer : moeos::kNone;
  }
  Planned planned() const { return static_cast<Planned>(*rank_.os.planned); }
  const Geometry& geometry() const { return rank_.geometry; }
  u32 tile_of(ReadyWord word) const { return word.task(); }

 private:
  Rows rows_;
  LoneRank rank_;
  std::optional<ArrivalsSubscriber<Machine>> subscriber_;
  u32 handed_out_ = 0;
};

/// Every part of both GEMMs once, a second GEMM's behind all of its first one's.
void nobody_waits_for_a_part_behind_his_own(const Rows& rows, u32 hidden_bytes) {
  Arrivals arrivals(rows, hidden_bytes);
  arrivals.count_all();
  const std::vector<ReadyWord> words = arrivals.step();
  expect(arrivals.planned() == Planned::up_front,
         "a call whose counts are all here is planned up front");
  std::set<std::tuple<TaskKind, u32, u32>> seen;
  std::map<u32, u32> firsts;      // of each tile: parts of its first GEMM so far,
  std::map<u32, u32> last_first;  // and how many all tiles had with the last of them
  u32 all_firsts = 0;
  std::vector<std::pair<u32, u32>> between;  // a tile's GEMMs, and parts before the second one
  std::vector<std::pair<u32, u32>> done_when_second_began;  // of its first one; which tile
  bool in_turn = true;
  bool second = false;
  bool mixed = false;
  for (const ReadyWord word : words) {
    const u32 tile = arrivals.tile_of(word);
    expect(word.epoch() == kEpoch, "a part is this call's");
    expect(seen.emplace(word.kind(), tile, word.part()).second, "no part is there twice");
    if (word.kind() == TaskKind::product0) {
      ++firsts[tile];
      last_first[tile] = ++all_firsts;
      mixed = mixed || second;
      continue;
    }
    second = true;
    expect(word.kind() == TaskKind::product1, "there is no other task");
    between.emplace_back(all_firsts - last_first[tile], all_firsts);
    done_when_second_began.emplace_back(firsts[tile], tile);
  }
  for (const auto& [parts, tile] : done_when_second_began) {
    expect(parts == firsts[tile], "first GEMMs go first");
  }
  for (const auto& [parts, of_all] : between) {
    in_turn = in_turn && (parts >= 2 * kProcessors || of_all == all_firsts);
  }
  u32 tiles = 0;
  for (const u32 its : rows) {
    tiles += its == 0 ? 0 : moeos::ceil_div(kSources * its, kTileRows);
  }
  expect(firsts.size() == tiles, "all rows are in tiles");
  expect(seen.size() >= tiles * 2 * kParts, "and all parts handed out");
  expect(in_turn || hidden_bytes > arrivals.geometry().sent_bytes,
         "two parts a processor are between a tile's GEMMs");
  expect(mixed == (hidden_bytes <= arrivals.geometry().sent_bytes),
         "second GEMMs have their turns, or go last where they are longer");
  expect(arrivals.step().empty(), "and nothing is handed out again");
}

void processors_find_the_parts_of_few_rows() {
  Arrivals arrivals({3, 0, 20});
  arrivals.count_all();
  const std::vector<ReadyWord> words = arrivals.step();
  expect(arrivals.planned() == Planned::up_front, "such a call is planned up front");
  expect(words.size() == 2 * 2 * kNarrowParts, "there are slots for both GEMMs of two tiles");
  for (const ReadyWord word : words) {
    expect(word.epoch() != kEpoch, "and nobody fills them");
  }
}

/// Whoever of processors and subscriber is first.
void tiles_are_made_by_who_has_decided() {
  Arrivals theirs({3, 0, 20});
  theirs.count(0);
  theirs.all_rows_come(0);
  theirs.processors_idle();
  theirs.processors_decide();
  expect(theirs.steps_in_vain() && theirs.posted().empty(),
         "processors know more than is seen here");
  theirs.count(1);
  expect(theirs.step().size() == 2 * 2 * kNarrowParts && theirs.planned() == Planned::up_front,
         "which then has slots");

  Arrivals ours({3, 0, 20});
  ours.count(0);
  ours.all_rows_come(0);
  ours.processors_idle();
  ours.steps_until_planned();
  expect(ours.planned() == Planned::by_arrival && ours.posted().size() == 1, "a rank is late");
  expect(ours.found_by() == FoundBy::subscriber, "processors wait to be told");
  ours.count(1);
  expect(!ours.step().empty() && ours.posted().size() == 1, "also of the rest");
}

void counts_that_processors_have_seen_differently_are_damaged() {
  Arrivals arrivals({300, 300});
  arrivals.count_all();
  arrivals.processors_decide();
  expect(arrivals.step().empty() && arrivals.planned() == Planned::unknown, "nothing is planned");
  expect(arrivals.has_failed(), "since somebody has overwritten counts");
}

void sums_do_not_wait_behind_products_for_what_they_need_first() {
  Arrivals arrivals({300, 300}, 16, 1, 0, 100);
  arrivals.count_all();
  expect(arrivals.step().empty() && arrivals.planned() == Planned::unknown,
         "the Combine of tokens that sent no row gets its slots before");
  arrivals.unsent_are_handed_out();
  expect(!arrivals.step().empty() && arrivals.planned() == Planned::up_front, "then all others");
}

void counts_that_are_a_little_late_are_awaited() {
  Arrivals arrivals({300, 300});
  arrivals.count(1);
  arrivals.all_rows_come(1);
  expect(arrivals.steps_in_vain(), "a rank that is not routed yet plans nothing");
  arrivals.count(0);
  expect(!arrivals.step().empty() && arrivals.planned() == Planned::up_front,
         "when it is, its call is planned up front");
}

void a_late_rank_does_not_hold_up_the_rest() {
  Arrivals without_rows({300, 300});
  without_rows.count(0);
  expect(without_rows.steps_in_vain(), "no row is here");

  Arrivals arrivals({300, 300});
  arrivals.count(0);
  arrivals.all_rows_come(0);
  const u64 begun_ns = Machine::now_ns();
  expect(arrivals.step().empty() && arrivals.planned() == Planned::unknown,
         "counts may come with which all is planned");
  std::set<u32> by_rows;
  for (const ReadyWord word : arrivals.steps_until_planned()) {
    by_rows.insert(arrivals.tile_of(word));
  }
  expect(Machine::now_ns() - begun_ns >= ArrivalsSubscriber<Machine>::kCountsPatienceNs,
         "for some time");
  expect(arrivals.planned() == Planned::by_arrival, "then tiles are made as rows come");
  const std::set<u32> posted = arrivals.posted();
  by_rows.insert(posted.begin(), posted.end());
  constexpr u32 kExperts = 2;
  constexpr u32 kFull = 300 / kTileRows;  // tiles of each expert
  expect(by_rows.size() == kExperts * kFull, "of full tiles");

  arrivals.count(1);
  std::map<std::pair<TaskKind, u32>, u32> parts;
  for (const ReadyWord word : arrivals.step()) {
    ++parts[{word.kind(), arrivals.tile_of(word)}];
    expect(by_rows.count(arrivals.tile_of(word)) == 0, "no tile is handed out twice");
  }
  expect(arrivals.planned() == Planned::by_arrival, "others have been told how it began");
  u32 tiles = 0;
  for (const auto& [what, its] : parts) {
    tiles += what.first == TaskKind::product0 ? 1 : 0;
    expect(its == kParts || its == kNarrowParts, "all of a tile's parts");
  }
  constexpr u32 kLeft = kSources * 300 - kFull * kTileRows;  // rows of each expert
  expect(tiles == kExperts * moeos::ceil_div(kLeft, kTileRows) && parts.size() == 2 * tiles,
         "both GEMMs of the rest are handed out when the late rank's counts are here");
  arrivals.all_rows_come(1);
  expect(arrivals.step().empty() && arrivals.posted() == posted, "and nothing behind them");
}

/// Its call is over, and so are all of its rows here: processors have waited for them themselves.
void a_source_that_is_a_call_ahead_is_not_late() {
  Arrivals arrivals({300, 300});
  arrivals.count_all();
  expect(!arrivals.step().empty() && arrivals.planned() == Planned::up_front,
         "a call planned up front");
  expect(arrivals.late_source() == 0, "no rows are here");
  arrivals.all_rows_come(0, kEpoch + 1);
  arrivals.look_at_all();
  expect(arrivals.late_source() == 1, "a source that makes its next call is not late");
  arrivals.all_rows_come(1, kEpoch + 1);
  arrivals.look_at_all();
  expect(arrivals.late_source() == moeos::kNone, "nor is the other one");
}

void no_tile_is_made_of_rows_of_the_next_call() {
  Arrivals arrivals({300, 300});
  arrivals.count(0);
  arrivals.all_rows_come(0, kEpoch + 1);
  expect(arrivals.steps_until_planned().empty(), "nothing is handed out");
  for (u32 i = 0; i < 100; ++i) {
    expect(arrivals.step().empty() && arrivals.posted().empty(), "nor posted");
  }
  expect(arrivals.late_source() == 0, "this call's rows are missing");
}

/// Rows that have no place between the GEMMs wait until tiles before them are multiplied, and not a
/// processor.
void a_call_without_places_for_all_tiles_is_not_planned_whole() {
  Arrivals fitting({300, 300}, 16, 0, 1400);
  fitting.count_all();
  expect(!fitting.step().empty() && fitting.planned() == Planned::up_front, "all have places");

  Arrivals arrivals({300, 300}, 16, 0, 4 * kTileRows);
  arrivals.count_all();
  arrivals.all_rows_come(0);
  arrivals.all_rows_come(1);
  std::set<u32> tiles;
  for (u32 i = 0; i < 100; ++i) {
    for (const ReadyWord word : arrivals.step()) {
      expect(word.kind() == TaskKind::product0, "nothing that waits is handed out");
      tiles.insert(arrivals.tile_of(word));
    }
  }
  expect(arrivals.planned() == Planned::by_arrival, "four tiles have places, and ten are needed");
  const std::set<u32> posted = arrivals.posted();
  tiles.insert(posted.begin(), posted.end());
  expect(tiles.size() == 4, "four are made");
}

}  // namespace

int main() {
  const Rows many(24, 2 * kTileRows);
  for (const u32 hidden_bytes : {16U, 64U}) {
    nobody_waits_for_a_part_behind_his_own(many, hidden_bytes);
    nobody_waits_for_a_part_behind_his_own({129, 500, 0, 64, 1000, 1, 128, 90, 700, 3, 300, 450},
                                           hidden_bytes);
  }
  processors_find_the_parts_of_few_rows();
  tiles_are_made_by_who_has_decided();
  counts_that_processors_have_seen_differently_are_damaged();
  a_call_without_places_for_all_tiles_is_not_planned_whole();
  sums_do_not_wait_behind_products_for_what_they_need_first();
  counts_that_are_a_little_late_are_awaited();
  a_late_rank_does_not_hold_up_the_rest();
  a_source_that_is_a_call_ahead_is_not_late();
  no_tile_is_made_of_rows_of_the_next_call();
  std::printf("test_arrivals: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
