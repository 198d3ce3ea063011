// SPDX-License-Identifier: Apache-2.0
// The sender alone, step by step: how much of what was asked for is under way to a remote peer,
// what opens a window again, and which of several failures that peers have put is raised.
//
// Built and run by tests/native/test_native.py. Knows the protocol's words (layout.hpp); the peers'
// calls are not running, so nothing moves that a step here does not move.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/actors/sender.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "tests/native/expect.hpp"

namespace {

using moeos::Answer;
using moeos::Call;
using moeos::Failure;
using moeos::FailureKind;
using moeos::Geometry;
using moeos::kCacheLine;
using moeos::Layout;
using moeos::maximum;
using moeos::OsMemory;
using moeos::Rank;
using moeos::RankMemory;
using moeos::ReadyWord;
using moeos::RowMap;
using moeos::Scope;
using moeos::Segment;
using moeos::Sender;
using moeos::Task;
using moeos::TaskKind;
using moeos::u16;
using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Machine;

constexpr u32 kWorld = 3;
constexpr u32 kTokens = 320;
constexpr u32 kChunks = 10;
constexpr u32 kWindow = 72;  // two chunks, and not a third
constexpr u32 kRowBytes = 16;
constexpr u32 kEpoch = 5;

Geometry make_geometry() {
  Geometry g{};
  g.world = kWorld;
  g.experts = kWorld;
  g.top_k = 1;
  g.max_tokens = kTokens;
  g.row_bytes = g.sent_bytes = g.returned_bytes = kRowBytes;
  g.hidden_bytes = kRowBytes;
  g.row_map = RowMap::ragged;
  g.capacity = kTokens;
  g.chunk_rows = 32;
  g.tile_rows = 64;
  g.route_tokens = 32;
  g.route_slices = 1;
  g.product0_parts = 1;
  g.product1_parts = 1;
  g.segment_align = Geometry::kSegmentAlign;
  g.processors = 1;
  g.remote = 1;
  g.window_rows = kWindow;
  return g;
}

/// Three ranks, each on a node of its own, and a sender of each.
class World {
 public:
  World() : call_{kEpoch, kTokens, kTokens, 0} {
    const Geometry& g = geometry_;
    for (u32 p = 0; p < kWorld; ++p) {
      heaps_.push_back(memory_.take(Layout(g).bytes()));
    }
    for (u32 p = 0; p < kWorld; ++p) {
      ranks_.push_back(std::unique_ptr<Rank<Machine>>(new Rank<Machine>{
          Machine(heaps_.data(), p, 1), Layout(g),
          RankMemory(g, memory_.take(RankMemory::bytes(g))),
          OsMemory(g, memory_.take(OsMemory::bytes(g))), heaps_[p], p, 1'000'000'000ULL}));
      senders_.push_back(std::make_unique<Sender<Machine>>(*ranks_[p], call_, 0));
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const Rank<Machine>& rank(u32 p) const { return *ranks_[p]; }
  Sender<Machine>& sender(u32 p) { return *senders_[p]; }

  /// Rank 0 has staged a full cell for the peer, row i filled with i + 1, and asks for its chunks.
  void ask_for_chunks(u32 peer) {
    const Rank<Machine>& from = rank(0);
    from.memory.send_starts(peer)[1] = kTokens;
    for (u32 row = 0; row < kTokens; ++row) {
      std::memset(moeos::staged_row(from, peer, row), static_cast<int>(row % 255 + 1), kRowBytes);
    }
    for (u32 chunk = 0; chunk < kChunks; ++chunk) {
      moeos::post_request(from, call_, peer, moeos::chunk_word(kEpoch, chunk));
    }
  }

  /// Rank 0 has staged results of a tile whose rows are `rows` of the peer's, from `first` on.
  void ask_for_results(u32 peer, u32 first, u32 rows) {
    const Rank<Machine>& from = rank(0);
    Task& task = from.memory.tasks[0];
    task.kind = TaskKind::product1;
    task.segment_count = 1;
    task.segments[0] = Segment{first, static_cast<u16>(peer), static_cast<u16>(rows)};
    task.seal = moeos::kIntact ^ moeos::first_word(TaskKind::product1, 1, 0) ^
                moeos::words_of(task.segments[0]);
    // The peer has said that its results of rank 0 begin at its first row.
    *from.here<moeos::u64>(from.layout.base(kEpoch, peer)) = moeos::count_word(kEpoch, 0);
    moeos::post_request(from, call_, peer, ReadyWord(kEpoch, TaskKind::product1, 0, 0));
  }

  /// Rows of rank 0 that have landed at the peer.
  u32 landed(u32 peer) const { return *rank(peer).here<u32>(rank(peer).layout.landed(0)); }
  u32 arrived_chunks(u32 peer) const {
    u32 arrived = 0;
    for (u32 chunk = 0; chunk < kChunks; ++chunk) {
      arrived +=
          *rank(peer).here<u32>(rank(peer).layout.arrived(0, chunk)) == moeos::seal(kEpoch) ? 1 : 0;
    }
    return arrived;
  }
  bool rows_are_right(u32 peer) const {
    const Layout& layout = rank(peer).layout;
    for (u32 row = 0; row < kTokens; ++row) {
      const u8* bytes = rank(peer).heap + layout.cell_row(0, row);
      for (u32 i = 0; i < kRowBytes; ++i) {
        if (bytes[i] != row % 255 + 1) {
          return false;
        }
      }
    }
    return true;
  }

  /// A failure of a rank in a call, raised there and told to the others.
  void fail(u32 p, u32 epoch) {
    Failure failure = moeos::failure_of(rank(p), Call{epoch, 0, 0, 0}, FailureKind::rows_late,
                                        moeos::Actor::subscriber);
    failure.chunk = 100 * p;
    rank(p).fail(failure);
    sender(p).leave();
  }
  Failure failure_at(u32 p) const {
    return moeos::first_failure<Machine>(rank(p).layout, rank(p).heap);
  }

 private:
  const Geometry geometry_ = make_geometry();  // outlives what refers to it
  Call call_;
  Memory memory_;
  std::vector<u8*> heaps_;
  std::vector<std::unique_ptr<Rank<Machine>>> ranks_;
  std::vector<std::unique_ptr<Sender<Machine>>> senders_;
};

void step(World& world, u32 p, u32 times) {
  for (u32 i = 0; i < times; ++i) {
    world.sender(p).step();
  }
}

void at_most_a_window_is_under_way_and_an_echo_opens_it() {
  World world;
  world.ask_for_chunks(1);
  u32 told = 0;
  for (u32 round = 0; round < kChunks / 2; ++round) {
    step(world, 0, 20);
    expect(world.landed(1) == told + 64, "two chunks are put in a window of 72 rows");
    Failure failure{};
    expect(world.sender(0).answer(failure) == Answer::missing &&
               failure.kind == FailureKind::echo_late && failure.peer == 1 && failure.seen == 64 &&
               failure.expected == kWindow,
           "the peer that has not told of them is named");
    step(world, 1, 1);
    told = world.landed(1);
  }
  Failure failure{};
  expect(world.sender(0).answer(failure) == Answer::nothing,
         "nothing is missing when all has been told of");
  expect(world.arrived_chunks(1) == kChunks && world.rows_are_right(1), "all rows are there");
}

void a_peer_that_tells_nothing_holds_up_itself_alone() {
  World world;
  world.ask_for_chunks(1);
  world.ask_for_chunks(2);
  for (u32 round = 0; round < 20; ++round) {
    step(world, 0, 1);
    step(world, 1, 1);
  }
  expect(world.arrived_chunks(1) == kChunks, "the rank that tells has all chunks");
  expect(world.arrived_chunks(2) == 2, "the rank that does not has a window of them");
}

void rows_are_counted_beyond_the_largest_number() {
  World world;
  constexpr u32 kBefore = 0xFFFFFFE0U;
  *world.rank(0).memory.rows_put(1) = kBefore;
  *world.rank(0).here<u64>(world.rank(0).layout.echoed(1)) = kBefore;
  *world.rank(1).here<u64>(world.rank(1).layout.landed(0)) = kBefore;
  *world.rank(1).memory.rows_told(0) = kBefore;
  world.ask_for_chunks(1);
  step(world, 0, 20);
  expect(world.landed(1) == kBefore + 64, "a window is a window");
  for (u32 round = 0; round < 20; ++round) {
    step(world, 1, 1);
    step(world, 0, 1);
  }
  expect(world.arrived_chunks(1) == kChunks, "and opens again");
}

void results_and_rows_share_a_window_and_are_counted_as_returned() {
  World world;
  world.rank(0).memory.receive_starts(1)[1] = kTokens;
  world.ask_for_results(1, 40, 50);  // the ends of chunks 1 and 2
  world.ask_for_chunks(1);
  step(world, 0, 20);
  expect(world.landed(1) == 50, "no chunk fits beside 50 rows of 72");
  const auto credit = [&](u32 chunk) {
    return moeos::open(*world.rank(1).here<u32>(world.rank(1).layout.returned(0, chunk)));
  };
  expect(credit(0) == 0 && credit(1) == 24 && credit(2) == 26, "credits are given by chunk");
  expect(world.rank(0).memory.call(kEpoch).rows_returned.value == 50, "they are returned");
  step(world, 1, 1);
  step(world, 0, 20);
  expect(world.arrived_chunks(1) == 2, "then come chunks");
}

void requests_of_an_earlier_call_are_none() {
  World world;
  const Rank<Machine>& from = world.rank(0);
  from.memory.outbox_of(1)[0] = ReadyWord(kEpoch - 1, TaskKind::dispatch, 0, 0).sealed();
  step(world, 0, 3);
  expect(world.landed(1) == 0, "a word of another call is not looked at");
}

void the_earliest_call_that_failed_stays() {
  for (const bool later_first : {false, true}) {
    World world;
    const u32 late = later_first ? 1 : 2;  // fails in call 9, the other in call 7
    const u32 early = 3 - late;
    world.fail(1, late == 1 ? 9 : 7);
    world.fail(2, late == 2 ? 9 : 7);
    step(world, 0, 1);
    const Failure failure = world.failure_at(0);
    expect(failure.rank == early && failure.epoch == 7 && failure.chunk == 100 * early,
           "the failure of the earlier call is raised, with its record");
    expect(!world.rank(0).leaving(6) && world.rank(0).leaving(7), "the call before may end well");
  }
  for (const u32 later : {1U, 2U}) {  // one after the other
    World world;
    world.fail(3 - later, 7);
    step(world, 0, 1);
    world.fail(later, 9);
    step(world, 0, 1);
    expect(world.failure_at(0).epoch == 7, "a later call's failure replaces nothing");
  }
}

void a_host_that_gives_up_replaces_no_failure() {
  World world;
  world.fail(1, 7);
  step(world, 0, 1);
  world.fail(2, 0);  // for all calls, as a host does
  step(world, 0, 1);
  expect(world.failure_at(0).rank == 1, "a host that gives up replaces nothing");
  World alone;
  alone.fail(2, 0);
  step(alone, 0, 1);
  expect(alone.failure_at(0).rank == 2 && alone.rank(0).leaving(1), "where it is alone, it tells");
}

void any_sender_tells_of_a_failure() {
  World world;
  const Rank<Machine>& from = world.rank(1);
  from.fail(
      moeos::failure_of(from, Call{7, 0, 0, 0}, FailureKind::rows_late, moeos::Actor::subscriber));
  // Of the GPU's; the first one stands in a put.
  Sender<Machine>(from, Call{7, 0, 0, 0}, OsMemory::kSendersMax - 1).leave();
  step(world, 0, 1);
  expect(world.failure_at(0).rank == 1 && world.failure_at(0).epoch == 7,
         "the last sender tells of a failure when the first does not");
}

void a_failure_is_put_once() {
  World world;
  world.fail(1, 7);
  step(world, 0, 1);
  Failure* const theirs = world.rank(0).here<Failure>(world.rank(0).layout.failure(1));
  theirs->chunk = 5;  // while its reader holds it, nobody writes it again
  world.fail(1, 8);
  expect(theirs->chunk == 5 && world.failure_at(0).epoch == 7, "a record is put once");
}

}  // namespace

int main() {
  at_most_a_window_is_under_way_and_an_echo_opens_it();
  a_peer_that_tells_nothing_holds_up_itself_alone();
  rows_are_counted_beyond_the_largest_number();
  results_and_rows_share_a_window_and_are_counted_as_returned();
  requests_of_an_earlier_call_are_none();
  the_earliest_call_that_failed_stays();
  a_host_that_gives_up_replaces_no_failure();
  any_sender_tells_of_a_failure();
  a_failure_is_put_once();
  std::printf("test_sender: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
