// SPDX-License-Identifier: Apache-2.0
// The emulator's mbarriers and named barriers, in place of kernels/sm90/ptx/barrier.cuh.
#pragma once

#include "runtime/words/base.hpp"
#include "tests/emulator/cuda.hpp"

namespace moeos::sm90 {

inline u8* dynamic_shared_memory() { return emulator::shared_memory(); }

[[noreturn]] inline void trap() {
  emulator::stop("trap");
  __builtin_unreachable();
}

/// As PTX ISA has it: a phase ends when no arrival and no byte is pending.
struct alignas(8) Barrier {
  u32 arrivals : 12;
  u32 pending : 12;
  u32 phase : 1;
  i32 bytes;

  void initialise(u32 count) { *this = Barrier{count, count, 0, 0}; }
  void arrive() { arrive(1); }
  void arrive(u32 count) {
    if (count > pending) {
      throw_fault("more arrivals at a barrier than its phase has");
    }
    pending -= count;
    end_phase();
  }
  void expect(u32 count) { bytes += static_cast<i32>(count); }
  void arrive_expecting(u32 count) {
    bytes += static_cast<i32>(count);
    arrive(1);
  }
  /// One more arrival belongs to the phase, which must not end before.
  void expect_arrival() { ++pending; }
  void complete(u32 count) {
    bytes -= static_cast<i32>(count);
    end_phase();
  }
  /// A look that lasts until the phase ends, or as long as hardware suspends a thread.
  bool done(u32 parity) const {
    const u64 look_ends = emulator::now_ns() + kLookNs;
    emulator::wait_until(
        kWhat[parity], [&] { return ended(parity) || emulator::now_ns() > look_ends; }, this);
    return ended(parity);
  }
  void wait(u32 parity) const {
    emulator::wait_until(kWhat[parity], [&] { return ended(parity); }, this);
  }

 private:
  static constexpr u64 kLookNs = 20'000;
  static constexpr const char* kWhat[] = {"phase 0 of an mbarrier", "phase 1 of an mbarrier"};

  bool ended(u32 parity) const { return phase != parity; }
  void end_phase() {
    if (pending == 0 && bytes == 0) {
      pending = arrivals;
      phase ^= 1;
    }
  }
  static void throw_fault(const char* what) { emulator::stop(what); }
};
static_assert(sizeof(Barrier) == 8);

inline void fence_barrier_initialisation() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}
inline void named_barrier(u32 id, u32 threads) { emulator::block_barrier(id, threads); }
template <u32 kRegisters>
inline void raise_registers() {}
template <u32 kRegisters>
inline void lower_registers() {}

}  // namespace moeos::sm90
