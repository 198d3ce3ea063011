// SPDX-License-Identifier: Apache-2.0
// A GPU in one thread of a CPU: enough of one to run the real kernel, lane by lane.
//
// Each lane is a fiber. A fiber runs until it has to wait: for the other lanes of its warp, for a
// barrier, for a copy, or for time to pass. Warps take turns in an order drawn from a seed, and
// copies land after a delay drawn from it, so a run that fails is repeated exactly by its seed. All
// memory accesses are ordered: a missing fence is not found here (ThreadSanitizer looks for those
// on the twin), but whatever hangs, meets the wrong lanes, or relies on the order of warps and
// copies is. Must not depend on: moeos.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

inline constexpr unsigned kLanes = 32;

/// A mistake of the kernel's, or a hang; what() says where.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();

/// The running block's dynamic shared memory.
unsigned char* shared_memory();

/// Nanoseconds of the emulated clock, which begins at kBeginNs.
inline constexpr unsigned long long kBeginNs = 1'000'000;
unsigned long long now_ns();

/// Waits until ready() is true; `what`, and the offset of `place` in shared memory if there is one,
/// name the wait in a report of a hang.
void wait_until(const char* what, const std::function<bool()>& ready, const void* place = nullptr);

/// Lets all others have a turn.
void yield();

/// What the 32 lanes of the warp bring to a collective, once all of them are there; behind it, the
/// lanes that have brought an odd number.
const unsigned long long* exchange(const char* what, unsigned long long value);

/// Threads of the running block.
unsigned block_threads();

/// Ends the run with a Fault that names the running lane.
[[noreturn]] void stop(const std::string& what);

/// A barrier of the block among `threads` of its threads.
void block_barrier(unsigned id, unsigned threads);

/// Runs `effect` in a while, as hardware beside the lanes does.
void later(std::function<void()> effect);

/// The running lane's stores to memory that have not landed: how many of each group, the last one
/// still open. A group keeps its place as long as it has any.
std::deque<unsigned>& store_groups();

/// The running lane's copies to shared memory that no arrival waits for yet.
std::vector<std::function<void()>>& copies();

/// A warp that is given no turn from one tick on until another: as on a GPU whose scheduler, or
/// whose debugger, favours all others. When nobody else is left it goes on.
struct Starved {
  unsigned block;  // counted through all grids
  unsigned warp;
  unsigned long long from;  // ticks: so many turns of all warps since the launch
  unsigned long long until;
};

struct Launch {
  unsigned blocks;  // of each grid
  unsigned threads;
  std::size_t shared_bytes;
  std::vector<std::function<void()>> kernels;  // each on a grid of its own, all at once
  unsigned long long seed;
  unsigned long long limit_ns;  // of the emulated clock
  std::optional<Starved> starved = {};
};

/// Runs grids to their end. Throws Fault with the waits of all warps when that takes too long.
void run(const Launch& launch);

}  // namespace emulator
