// SPDX-License-Identifier: Apache-2.0
// The emulator's fibers and their scheduler; see gpu.hpp.
#include "gpu.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

// Saves the registers that a call must keep on the running stack, and goes on with another one.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;
// Stacks begin at other places of their pages, or those of a warp would push each other out of a
// few sets of the processor's cache.
constexpr std::size_t kStackShift = 17 * 64;
constexpr unsigned kStackShifts = 61;
constexpr unsigned long long kTickNs = 100;  // a turn of all warps
constexpr unsigned kTurnMost = 64;           // runs of a lane in a turn of its warp
constexpr unsigned kSkipOneIn = 32;          // of the runs that lanes could make, on average
constexpr unsigned kLooksOneIn = 4;          // turns end a warp's pause, on average
constexpr unsigned kDelayMost = 24;          // ticks until an effect
constexpr unsigned kLateOneIn = 16;          // effects that take
constexpr unsigned kLateFactor = 16;         // times as long

struct Block;
struct Warp;

struct Lane {
  void* stack_pointer = nullptr;
  Warp* warp = nullptr;
  unsigned thread = 0;
  bool left = false;
  const char* what = nullptr;
  const void* place = nullptr;
  const std::function<bool()>* ready = nullptr;  // it goes on when this is true,
  const unsigned long long* count = nullptr;     // or when this is
  unsigned long long counted = 0;                // no longer this; neither: at any time
  std::deque<unsigned> store_groups{0};
  std::vector<std::function<void()>> copies;
};

struct Warp {
  Block* block = nullptr;
  std::vector<Lane> lanes;
  unsigned left = 0;  // of them
  unsigned long long values[2][kLanes + 1] = {};
  const char* what = nullptr;  // the collective that lanes are waiting in
  unsigned arrived = 0;
  unsigned long long generation = 0;
  unsigned long long pauses = 0;  // that are over
};

struct BlockBarrier {
  unsigned arrived = 0;
  unsigned long long generation = 0;
};

struct Block {
  unsigned index = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  std::map<unsigned, BlockBarrier> barriers;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared = nullptr;
};

struct Effect {
  unsigned long long due;
  std::function<void()> run;
};

struct Grid {
  const Launch* launch = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Effect> effects;
  std::mt19937_64 random;
  unsigned long long tick = 0;
  unsigned live = 0;
  unsigned runs_until_skip = 1;
  Lane* running = nullptr;  // null between the turns of lanes
  void* scheduler = nullptr;
  unsigned char* stacks = nullptr;
  std::string fault;
};

Grid* grid = nullptr;

Lane& running() { return *grid->running; }

void leave_turn() { emulator_switch(&running().stack_pointer, grid->scheduler); }

constexpr const char* kBlockBarrier = "a barrier of the block";

/// Lets a lane wait for what has been noted in it: whoever resumes it has seen that.
void wait(Lane& lane, const char* what) {
  lane.what = what;
  leave_turn();
  lane.what = nullptr;
}

/// Waits until `count`, which is `counted`, has become another number.
void wait_while(const char* what, const unsigned long long& count, unsigned long long counted) {
  Lane& lane = running();
  lane.count = &count;
  lane.counted = counted;
  lane.place = nullptr;
  wait(lane, what);
}

/// Waits for all others of so many threads.
void meet(BlockBarrier& barrier, unsigned threads) {
  const unsigned long long generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    wait_while(kBlockBarrier, barrier.generation, generation);
  }
}

[[noreturn]] void fault(const std::string& text) {
  std::ostringstream said;
  said << "block " << running().warp->block->index << ", thread " << running().thread << ": "
       << text;
  grid->fault = said.str();
  leave_turn();
  std::abort();  // never resumed
}

/// While it lives, a lane that uses an address where nothing is ends the call as any other fault
/// does, and not the process.
class WatchAddresses {
 public:
  WatchAddresses() {
    struct sigaction watch = {};
    watch.sa_sigaction = &report;
    // Not held back while it is handled: the handler never returns, it leaves the lane's stack.
    watch.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &watch, &before());
  }
  ~WatchAddresses() { sigaction(SIGSEGV, &before(), nullptr); }
  WatchAddresses(const WatchAddresses&) = delete;
  WatchAddresses& operator=(const WatchAddresses&) = delete;

 private:
  static void report(int, siginfo_t*, void*) {
    if (grid->running != nullptr) {
      fault("uses an address where nothing is");
    }
    sigaction(SIGSEGV, &before(), nullptr);  // the emulator's own mistake happens again, unhandled
  }
  static struct sigaction& before() {
    static struct sigaction kept = {};
    return kept;
  }
};

void lane_main() {
  const Launch& launch = *grid->launch;
  launch.kernels[running().warp->block->index / launch.blocks]();
  running().left = true;
  ++running().warp->left;
  --grid->live;
  if (running().warp->arrived != 0) {
    fault(std::string("leaves a warp whose other lanes wait in ") + running().warp->what);
  }
  leave_turn();
}

void make_lane(Lane& lane, unsigned number) {
  const std::size_t end = (std::size_t{number} + 1) * kStackBytes;
  auto* top = reinterpret_cast<void**>(grid->stacks + end - number % kStackShifts * kStackShift);
  *--top = nullptr;  // alignment: the stack is as behind a call
  *--top = reinterpret_cast<void*>(&lane_main);
  for (int i = 0; i < 6; ++i) {
    *--top = nullptr;
  }
  lane.stack_pointer = top;
}

bool can_run(const Lane& lane) {
  if (lane.count != nullptr) {
    return *lane.count != lane.counted;
  }
  return !lane.left && (lane.ready == nullptr || (*lane.ready)());
}

/// A lane may fall behind the others of its warp.
bool skip_run() {
  if (--grid->runs_until_skip != 0) {
    return false;
  }
  grid->runs_until_skip = 1 + static_cast<unsigned>(grid->random() % (2 * kSkipOneIn - 1));
  return true;
}

/// Runs the lanes of a warp that can run, up to `most` times each; false if there was none.
bool take_turn(Warp& warp, unsigned most) {
  bool any = false;
  bool moved = true;
  for (unsigned n = 0; n < most && moved; ++n) {
    moved = false;
    for (Lane& lane : warp.lanes) {
      if (!can_run(lane)) {
        continue;
      }
      if (skip_run()) {
        moved = true;
        continue;
      }
      lane.ready = nullptr;
      lane.count = nullptr;
      grid->running = &lane;
      emulator_switch(&grid->scheduler, lane.stack_pointer);
      moved = any = true;
      grid->running = nullptr;
      if (!grid->fault.empty()) {
        throw Fault(grid->fault);
      }
    }
  }
  return any;
}

/// Whether anybody beside a warp still runs, and not only waits with it at its block's barrier.
bool others_run(const Warp& warp) {
  for (const auto& block : grid->blocks) {
    for (const auto& other : block->warps) {
      for (const Lane& lane : other->lanes) {
        const bool waits = block.get() == warp.block && lane.what == kBlockBarrier;
        if (other.get() != &warp && !lane.left && !waits) {
          return true;
        }
      }
    }
  }
  return false;
}

bool is_starved(const Warp& warp) {
  const auto& starved = grid->launch->starved;
  return starved && warp.block->index == starved->block &&
         warp.lanes[0].thread / kLanes == starved->warp && grid->tick >= starved->from &&
         grid->tick < starved->until && others_run(warp);
}

void run_effects() {
  for (std::size_t i = 0; i < grid->effects.size();) {
    if (grid->effects[i].due <= grid->tick) {
      auto effect = std::move(grid->effects[i].run);
      grid->effects[i] = std::move(grid->effects.back());
      grid->effects.pop_back();
      effect();
    } else {
      ++i;
    }
  }
}

std::string describe() {
  std::ostringstream said;
  for (const auto& block : grid->blocks) {
    for (unsigned w = 0; w < block->warps.size(); ++w) {
      std::map<std::string, unsigned> waits;
      for (const Lane& lane : block->warps[w]->lanes) {
        if (!lane.left) {
          std::string what = lane.what == nullptr ? "nothing" : lane.what;
          if (lane.what != nullptr && lane.place != nullptr) {
            const auto offset = static_cast<const unsigned char*>(lane.place) - block->shared;
            what += " at " + std::to_string(offset);
          }
          ++waits[what];
        }
      }
      for (const auto& [what, lanes] : waits) {
        said << "\n  block " << block->index << ", warp " << w << ": " << lanes
             << " lanes wait for " << what;
      }
    }
  }
  return said.str();
}

}  // namespace

void stop(const std::string& what) { fault(what); }
unsigned block_threads() { return grid->launch->threads; }
Index thread_index() { return {running().thread}; }
Index block_index() { return {running().warp->block->index % grid->launch->blocks}; }
unsigned char* shared_memory() { return running().warp->block->shared; }
unsigned long long now_ns() { return kBeginNs + grid->tick * kTickNs; }
std::deque<unsigned>& store_groups() { return running().store_groups; }
std::vector<std::function<void()>>& copies() { return running().copies; }

void wait_until(const char* what, const std::function<bool()>& ready, const void* place) {
  if (ready()) {
    return;
  }
  Lane& lane = running();
  lane.ready = &ready;
  lane.place = place;
  wait(lane, what);
}

void yield() {
  const Warp& warp = *running().warp;
  wait_while("a pause", warp.pauses, warp.pauses);
}

const unsigned long long* exchange(const char* what, unsigned long long value) {
  Warp& warp = *running().warp;
  const unsigned lane = running().thread % kLanes;
  const unsigned long long generation = warp.generation;
  unsigned long long* values = warp.values[generation & 1];
  if (warp.arrived == 0) {
    warp.what = what;
    values[kLanes] = 0;
  } else if (warp.what != what && std::strcmp(warp.what, what) != 0) {
    fault(std::string("meets ") + what + " where other lanes of its warp wait in " + warp.what);
  }
  if (warp.left != 0) {
    fault(std::string("waits in ") + what + " for a lane that has left");
  }
  values[lane] = value;
  values[kLanes] |= (value & 1) << lane;
  warp.arrived |= 1U << lane;
  if (warp.arrived == 0xFFFFFFFFU) {
    warp.arrived = 0;
    ++warp.generation;
    if (grid->random() % 2 == 0) {
      leave_turn();  // others may go on first
    }
  } else {
    wait_while(what, warp.generation, generation);
  }
  return values;
}

void block_barrier(unsigned id, unsigned threads) {
  meet(running().warp->block->barriers[id], threads);
}

void pair_barrier() {
  constexpr unsigned kOfPair = 16;  // behind those of a block
  const unsigned first = running().warp->block->index / 2 * 2;
  if (first + 1 >= grid->blocks.size()) {
    fault("a pair has one block");
  }
  meet(grid->blocks[first]->barriers[kOfPair], 2 * block_threads());
}

void* in_pair(const void* place, unsigned block) {
  const Block& own = *running().warp->block;
  const auto offset = static_cast<const unsigned char*>(place) - own.shared;
  if (offset < 0 || static_cast<std::size_t>(offset) >= grid->launch->shared_bytes) {
    fault("a place in a pair that lies in no shared memory");
  }
  return grid->blocks[own.index / 2 * 2 + block]->shared + offset;
}

void later(std::function<void()> effect) {
  const unsigned long long slow = grid->random() % kLateOneIn == 0 ? kLateFactor : 1;
  const unsigned long long delay = grid->random() % (kDelayMost * slow);
  grid->effects.push_back({grid->tick + delay, std::move(effect)});
}

void run(const Launch& launch) {
  Grid here;
  grid = &here;
  here.launch = &launch;
  here.random.seed(launch.seed);
  const auto blocks = static_cast<unsigned>(launch.blocks * launch.kernels.size());
  const std::size_t threads = std::size_t{blocks} * launch.threads;
  const std::size_t stack_bytes = threads * kStackBytes;
  void* stacks = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<void, std::function<void(void*)>> unmap(
      stacks, [stack_bytes](void* memory) { munmap(memory, stack_bytes); });
  here.stacks = static_cast<unsigned char*>(stacks);
  std::vector<Warp*> warps;
  for (unsigned b = 0; b < blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->index = b;
    block->memory = std::make_unique<unsigned char[]>(launch.shared_bytes + 1024);
    const auto address = reinterpret_cast<std::uintptr_t>(block->memory.get());
    block->shared = reinterpret_cast<unsigned char*>((address + 1023) / 1024 * 1024);
    std::generate(block->shared, block->shared + launch.shared_bytes,
                  [&here] { return static_cast<unsigned char>(here.random()); });
    for (unsigned w = 0; w < launch.threads / kLanes; ++w) {
      auto warp = std::make_unique<Warp>();
      warp->block = block.get();
      warp->lanes.resize(kLanes);
      for (unsigned l = 0; l < kLanes; ++l) {
        warp->lanes[l].warp = warp.get();
        warp->lanes[l].thread = w * kLanes + l;
        make_lane(warp->lanes[l], b * launch.threads + w * kLanes + l);
      }
      warps.push_back(warp.get());
      block->warps.push_back(std::move(warp));
    }
    here.blocks.push_back(std::move(block));
  }
  here.live = static_cast<unsigned>(threads);
  const WatchAddresses watch;
  while (here.live > 0) {
    if (here.tick * kTickNs > launch.limit_ns) {
      throw Fault("the kernel does not end:" + describe());
    }
    std::shuffle(warps.begin(), warps.end(), here.random);
    for (Warp* warp : warps) {
      if (is_starved(*warp)) {
        continue;
      }
      warp->pauses += here.random() % kLooksOneIn == 0 ? 1 : 0;
      take_turn(*warp, 1 + static_cast<unsigned>(here.random() % kTurnMost));
    }
    ++here.tick;
    run_effects();
  }
}

}  // namespace emulator
