// SPDX-License-Identifier: Apache-2.0
// Couriers that take listed chunks in another order than these are promised to them. See
// ordered_couriers.hpp.
#include "tests/native/ordered_couriers.hpp"

#include <sys/mman.h>

#include "kernels/twin/explore/schedule.hpp"
#include "runtime/actors/courier.hpp"
#include "runtime/words/courier_part.hpp"
#include "tests/native/lone_rank.hpp"

namespace {

using moeos::Courier;
using moeos::CourierPart;
using moeos::Geometry;
using moeos::Scope;
using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Machine;
using moeos::twin::Schedule;

constexpr u32 kChunks = 4;
constexpr u32 kCouriers = 3;
constexpr u64 kPointsMost = 100'000;

Geometry geometry_of_couriers() {
  Geometry g = small_geometry(2, 4, 256);
  g.dedup_rows = 1;
  g.dispatch_tokens = 1;  // so that a call without tokens has no other parts
  g.processors = kCouriers;
  return g;
}

/// Zeroed memory for as long as this object lives, mapped: a witness looks at no other.
class Mapped {
 public:
  explicit Mapped(u64 bytes)
      : bytes_(moeos::align_up(bytes, u64{4096})),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  }
  ~Mapped() { munmap(memory_, bytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  u8* get() const { return static_cast<u8*>(memory_); }

 private:
  u64 bytes_;
  void* memory_;
};

}  // namespace

bool couriers_take_every_chunk(u64 seed, moeos::twin::Strategy strategy) {
  LoneRank alone(geometry_of_couriers());
  const Mapped memory(moeos::RankMemory::bytes(alone.geometry));
  alone.rank.memory = moeos::RankMemory(alone.geometry, memory.get());
  moeos::CallState& state = alone.rank.memory.call(LoneRank::kEpoch);
  u32 taken = 0;
  Schedule schedule(seed, strategy);
  schedule.spawn(0, [&] {  // as LandingsSubscriber
    for (u32 chunk = 0; chunk < kChunks; ++chunk) {
      alone.rank.memory.replication_list[chunk] =
          moeos::replicate_word(LoneRank::kEpoch, 1, chunk).sealed();
      Machine::add_release<Scope::device>(&state.replications_ready.value, 1U);
    }
    Machine::store_relaxed<Scope::device>(&state.replications_all.value, 1 + kChunks);
  });
  for (u32 i = 0; i < kCouriers; ++i) {
    schedule.spawn(0, [&, i] {
      Courier<Machine> courier(alone.rank, alone.call, i);
      CourierPart part;
      u32 idle = 0;
      while (!courier.over()) {
        if (courier.take(part)) {
          ++taken;
        } else {
          Machine::pause(idle);
        }
      }
    });
  }
  return schedule.run(kPointsMost) && taken == kChunks;
}
