// SPDX-License-Identifier: Apache-2.0
// What an explored run orders: a witness that reports two accesses of two actors that nothing
// orders, one of them a write.
//
// The explorer's fibers take turns in one thread, so every access happens in some order, and a
// missing fence changes no result. This program is compiled as ThreadSanitizer's are, and has
// functions of its own in place of ThreadSanitizer's: each fiber counts as a thread, and a vector
// clock says what of the others it has acquired. Fences order as the C++ memory model says, which
// ThreadSanitizer cannot follow: a release fence with a relaxed write behind it, a relaxed read
// with an acquire fence behind it. Switches between fibers order nothing. It looks at mapped memory
// alone, which is all that actors share: heaps, and what a rank has for itself.
//
// Usage: test_order SEED RUNS [HALF PLACE...]. Exits with 1 at the first report, or at the first
// run that is wrong. Otherwise it prints the places of the program that ordered something, and
// which half of an order each gave: acquire or release. Told places (in hexadecimal) and a half, it
// runs as if these did not give it. Must not depend on: what a word means.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kernels/twin/explore/explore.hpp"
#include "kernels/twin/explore/witness.hpp"
#include "tests/native/ordered_couriers.hpp"

// The linker sends calls of mmap, say, to __wrap_mmap below (--wrap), and of this to mmap.
extern "C" {
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __real_memmove(void* to, const void* from, std::size_t bytes);
void* __real_memset(void* to, int value, std::size_t bytes);
void* __real_mmap(void* at, std::size_t bytes, int access, int flags, int file, off_t offset);
int __real_munmap(void* at, std::size_t bytes);
}

namespace {

using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Outcome;
using moeos::twin::Scenario;
using moeos::twin::Strategy;
using Address = std::uintptr_t;

/// By actor: how many of its steps have been acquired.
using Clock = std::vector<u32>;
using Snapshot = std::shared_ptr<const Clock>;

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) {
    clock.resize(other.size());
  }
  for (std::size_t i = 0; i < other.size(); ++i) {
    clock[i] = other[i] > clock[i] ? other[i] : clock[i];
  }
}

/// An access: whose, at which of its steps, and where in the program.
struct Access {
  u32 actor;  // 0: there is none
  u32 step;
  const void* place;
};

/// Whatever was last done to four bytes.
struct Cell {
  Access write;
  Access atomic_write;
  Access read;
  std::vector<Access>* reads;  // of other actors
};

/// Mapped memory.
struct Region {
  Address end;
  Cell* cells;
};
constexpr u64 kCellBytes = 4;

struct Actor {
  Clock clock;
  Clock seen;          // what relaxed reads have seen, and no fence has acquired yet
  Snapshot published;  // by its last release fence
};

/// A half of what an atomic access or a fence may order, and the orders that have it.
enum class Half { acquire, release };
bool has(int order, Half half) {
  return order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST ||
         order == (half == Half::acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELEASE);
}

class Witness : public moeos::twin::Witness {
 public:
  /// Places without this half.
  void weaken(Half half, std::unordered_set<Address> places) {
    weak_half_ = half;
    weak_places_ = std::move(places);
  }
  void print_places() const {
    for (const auto& [place, half] : places_) {
      std::printf("%s %zx\n", half == Half::acquire ? "acquire" : "release",
                  static_cast<std::size_t>(place));
    }
  }

  /// Nothing has happened, and nothing is mapped: what happens from now on is watched.
  void begin() {
    actors_.assign(2, Actor{});
    actors_[kCaller].clock = {0, 1};
    released_.clear();
    reads_.clear();
    watching_ = true;
  }

  u64 begins() override {
    const Busy busy(*this);
    Actor actor{now().clock, {}, nullptr};
    actor.clock.resize(actors_.size() + 1);
    actor.clock.back() = 1;
    ++step();
    actors_.push_back(std::move(actor));
    return actors_.size() - 1;
  }
  u64 goes_on(u64 who) override {
    const u64 before = running_;
    running_ = who;
    return before;
  }
  u64 running() const override { return running_; }
  void follows(u64 later, u64 earlier) override {
    const Busy busy(*this);
    join(actors_[later].clock, actors_[earlier].clock);
    ++actors_[earlier].clock[earlier];
  }

  void map(Address begin, u64 bytes) {
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    // Zeroed, and there only where it is used.
    void* cells = __real_mmap(nullptr, bytes / kCellBytes * sizeof(Cell), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    regions_[begin] = Region{begin + bytes, static_cast<Cell*>(cells)};
  }
  void unmap(Address begin, u64 bytes) {
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    const auto region = regions_.find(begin);
    if (region != regions_.end()) {
      __real_munmap(region->second.cells, bytes / kCellBytes * sizeof(Cell));
      regions_.erase(region);
      last_ = nullptr;
    }
  }

  void read(Address at, u64 bytes, const void* place) {
    for_cells(at, bytes, [&](Cell& cell) {
      must_follow(cell.write, at, "a write", "a read", place);
      must_follow(cell.atomic_write, at, "an atomic write", "a read", place);
      note_read(cell, place);
    });
  }
  void write(Address at, u64 bytes, const void* place) {
    for_cells(at, bytes, [&](Cell& cell) {
      must_follow(cell.write, at, "a write", "a write", place);
      must_follow(cell.atomic_write, at, "an atomic write", "a write", place);
      must_follow_reads(cell, at, "a write", place);
      cell.write = access(place);
      cell.atomic_write = Access{};
    });
  }

  void load(Address at, u64 bytes, int order, const void* place) {
    for_cells(at, bytes,
              [&](Cell& cell) { must_follow(cell.write, at, "a write", "an atomic read", place); });
    acquire(at, order, place);
  }
  void store(Address at, u64 bytes, int order, const void* place) {
    note_atomic_write(at, bytes, place);
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    released_[at] = released(order, place);
  }
  void exchange(Address at, u64 bytes, int order, const void* place) {
    note_atomic_write(at, bytes, place);
    acquire(at, order, place);
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    const Snapshot mine = released(order, place);
    Snapshot& all = released_[at];
    if (all == nullptr) {
      all = mine;
    } else if (mine != nullptr && mine != all) {
      auto both = std::make_shared<Clock>(*all);
      join(*both, *mine);
      all = both;
    }
  }
  void fence(int order, const void* place) {
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    if (gives(order, Half::acquire, place)) {
      join(now().clock, now().seen);
    }
    if (gives(order, Half::release, place)) {
      now().published = std::make_shared<const Clock>(now().clock);
      ++step();
    }
  }

 private:
  /// While the witness itself works, which may run through code that is watched.
  class Busy {
   public:
    explicit Busy(Witness& witness) : watching_(witness.watching_), before_(watching_) {
      watching_ = false;
    }
    ~Busy() { watching_ = before_; }
    bool nested() const { return !before_; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    bool& watching_;
    bool before_;
  };

  /// Whether an order with such a half gives it at its place.
  bool gives(int order, Half half, const void* place) {
    const auto at = reinterpret_cast<Address>(place);
    if (!has(order, half)) {
      return false;
    }
    places_.emplace(at, half);
    return half != weak_half_ || !weak_places_.contains(at);
  }

  Actor& now() { return actors_[running_]; }
  u32& step() { return now().clock[running_]; }
  Access access(const void* place) { return {static_cast<u32>(running_), step(), place}; }
  Snapshot released(int order, const void* place) {
    if (!gives(order, Half::release, place)) {
      return now().published;
    }
    const auto all = std::make_shared<const Clock>(now().clock);
    ++step();
    return all;
  }
  void acquire(Address at, int order, const void* place) {
    const Busy busy(*this);
    if (busy.nested()) {
      return;
    }
    const bool acquires = gives(order, Half::acquire, place);
    const auto found = released_.find(at);
    if (found != released_.end() && found->second != nullptr) {
      join(acquires ? now().clock : now().seen, *found->second);
    }
  }
  void note_atomic_write(Address at, u64 bytes, const void* place) {
    for_cells(at, bytes, [&](Cell& cell) {
      must_follow(cell.write, at, "a write", "an atomic write", place);
      must_follow_reads(cell, at, "an atomic write", place);
      cell.atomic_write = access(place);
    });
  }

  template <class Visit>
  void for_cells(Address at, u64 bytes, Visit visit) {
    if (!watching_ || !find(at)) {
      return;
    }
    const Busy busy(*this);
    Cell* const first = last_->cells + (at - last_begin_) / kCellBytes;
    Cell* const end = last_->cells + (at + bytes - last_begin_ + kCellBytes - 1) / kCellBytes;
    for (Cell* cell = first; cell < end; ++cell) {
      visit(*cell);
    }
  }
  bool find(Address at) {
    if (last_ != nullptr && at >= last_begin_ && at < last_->end) {
      return true;
    }
    const Busy busy(*this);
    auto region = regions_.upper_bound(at);
    if (region == regions_.begin() || at >= (--region)->second.end) {
      return false;
    }
    last_begin_ = region->first;
    last_ = &region->second;
    return true;
  }

  bool ordered(const Access& earlier) {
    const Clock& clock = now().clock;
    return earlier.actor == 0 || earlier.actor == running_ ||
           (earlier.actor < clock.size() && earlier.step <= clock[earlier.actor]);
  }
  void must_follow(const Access& earlier, Address at, const char* what, const char* then,
                   const void* place) {
    if (!ordered(earlier)) {
      report(earlier, at, what, then, place);
    }
  }
  void must_follow_reads(const Cell& cell, Address at, const char* then, const void* place) {
    must_follow(cell.read, at, "a read", then, place);
    for (u64 i = 0; cell.reads != nullptr && i < cell.reads->size(); ++i) {
      must_follow((*cell.reads)[i], at, "a read", then, place);
    }
  }
  void note_read(Cell& cell, const void* place) {
    if (ordered(cell.read)) {  // whoever follows this one follows that
      cell.read = access(place);
      return;
    }
    if (cell.reads == nullptr) {
      reads_.push_back(std::make_unique<std::vector<Access>>());
      cell.reads = reads_.back().get();
    }
    for (Access& other : *cell.reads) {
      if (other.actor == running_) {
        other = access(place);
        return;
      }
    }
    cell.reads->push_back(access(place));
  }

  [[noreturn]] void report(const Access& earlier, Address at, const char* what, const char* then,
                           const void* place) {
    std::printf(
        "nothing orders %s and %s of byte %zu of mapping %zu; addr2line -Cfie PROGRAM:\n", what,
        then, static_cast<std::size_t>(at - last_begin_),
        static_cast<std::size_t>(std::distance(regions_.begin(), regions_.find(last_begin_))));
    std::printf("%p\n%p\n", earlier.place, place);
    std::fflush(stdout);
    _exit(1);
  }

  std::set<std::pair<Address, Half>> places_;
  Half weak_half_ = Half::acquire;
  std::unordered_set<Address> weak_places_;
  std::vector<Actor> actors_;  // 0 is nobody, 1 the caller
  u64 running_ = kCaller;
  bool watching_ = false;
  std::map<Address, Region> regions_;  // by where they begin
  Address last_begin_ = 0;
  Region* last_ = nullptr;
  std::vector<std::unique_ptr<std::vector<Access>>> reads_;
  std::unordered_map<Address, Snapshot> released_;  // what whoever reads a word may acquire
};

Witness the_witness;  // before it is made it is zero, and watches nothing

}  // namespace

// In place of ThreadSanitizer's functions, of which compilers know names and parameters (GCC,
// gcc/sanitizer.def).
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define MOEOS_READS_AND_WRITES(bytes)                                                     \
  void __tsan_read##bytes(void* at) {                                                     \
    the_witness.read(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0));  \
  }                                                                                       \
  void __tsan_write##bytes(void* at) {                                                    \
    the_witness.write(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0)); \
  }
#define MOEOS_UNALIGNED(bytes)                                                            \
  void __tsan_unaligned_read##bytes(void* at) {                                           \
    the_witness.read(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0));  \
  }                                                                                       \
  void __tsan_unaligned_write##bytes(void* at) {                                          \
    the_witness.write(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0)); \
  }
MOEOS_READS_AND_WRITES(1)
MOEOS_READS_AND_WRITES(2)
MOEOS_READS_AND_WRITES(4)
MOEOS_READS_AND_WRITES(8)
MOEOS_READS_AND_WRITES(16)
MOEOS_UNALIGNED(2)
MOEOS_UNALIGNED(4)
MOEOS_UNALIGNED(8)
MOEOS_UNALIGNED(16)
void __tsan_read_range(void* at, unsigned long bytes) {
  the_witness.read(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* at, unsigned long bytes) {
  the_witness.write(reinterpret_cast<Address>(at), bytes, __builtin_return_address(0));
}

#define MOEOS_ATOMICS(bits, type)                                                                  \
  type __tsan_atomic##bits##_load(const volatile type* at, int order) {                            \
    the_witness.load(reinterpret_cast<Address>(at), sizeof(type), order,                           \
                     __builtin_return_address(0));                                                 \
    return __atomic_load_n(at, __ATOMIC_RELAXED);                                                  \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile type* at, type value, int order) {                     \
    the_witness.store(reinterpret_cast<Address>(at), sizeof(type), order,                          \
                      __builtin_return_address(0));                                                \
    __atomic_store_n(at, value, __ATOMIC_RELAXED);                                                 \
  }                                                                                                \
  type __tsan_atomic##bits##_exchange(volatile type* at, type value, int order) {                  \
    the_witness.exchange(reinterpret_cast<Address>(at), sizeof(type), order,                       \
                         __builtin_return_address(0));                                             \
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);                                       \
  }                                                                                                \
  type __tsan_atomic##bits##_fetch_add(volatile type* at, type value, int order) {                 \
    the_witness.exchange(reinterpret_cast<Address>(at), sizeof(type), order,                       \
                         __builtin_return_address(0));                                             \
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);                                        \
  }                                                                                                \
  type __tsan_atomic##bits##_fetch_sub(volatile type* at, type value, int order) {                 \
    the_witness.exchange(reinterpret_cast<Address>(at), sizeof(type), order,                       \
                         __builtin_return_address(0));                                             \
    return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED);                                        \
  }                                                                                                \
  type __tsan_atomic##bits##_fetch_xor(volatile type* at, type value, int order) {                 \
    the_witness.exchange(reinterpret_cast<Address>(at), sizeof(type), order,                       \
                         __builtin_return_address(0));                                             \
    return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED);                                        \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* at, type* expected, type value, \
                                                    int order, int failed) {                       \
    const bool success = __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_RELAXED, \
                                                     __ATOMIC_RELAXED);                            \
    if (success) {                                                                                 \
      the_witness.exchange(reinterpret_cast<Address>(at), sizeof(type), order,                     \
                           __builtin_return_address(0));                                           \
    } else {                                                                                       \
      the_witness.load(reinterpret_cast<Address>(at), sizeof(type), failed,                        \
                       __builtin_return_address(0));                                               \
    }                                                                                              \
    return success ? 1 : 0;                                                                        \
  }
MOEOS_ATOMICS(8, unsigned char)
MOEOS_ATOMICS(32, u32)
MOEOS_ATOMICS(64, u64)

void __tsan_atomic_thread_fence(int order) {
  the_witness.fence(order, __builtin_return_address(0));
}
void __tsan_atomic_signal_fence(int) {}

// The linker sends calls of these here (--wrap).
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  the_witness.read(reinterpret_cast<Address>(from), bytes, __builtin_return_address(0));
  the_witness.write(reinterpret_cast<Address>(to), bytes, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  the_witness.read(reinterpret_cast<Address>(from), bytes, __builtin_return_address(0));
  the_witness.write(reinterpret_cast<Address>(to), bytes, __builtin_return_address(0));
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::size_t bytes) {
  the_witness.write(reinterpret_cast<Address>(to), bytes, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}
void* __wrap_mmap(void* at, std::size_t bytes, int access, int flags, int file, off_t offset) {
  void* const memory = __real_mmap(at, bytes, access, flags, file, offset);
  if (memory != MAP_FAILED) {
    the_witness.map(reinterpret_cast<Address>(memory), bytes);
  }
  return memory;
}
int __wrap_munmap(void* at, std::size_t bytes) {
  the_witness.unmap(reinterpret_cast<Address>(at), bytes);
  return __real_munmap(at, bytes);
}
}

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s SEED RUNS [HALF PLACE...]\n", arguments[0]);
    return 2;
  }
  if (count > 3) {
    std::unordered_set<Address> places;
    for (int i = 4; i < count; ++i) {
      places.insert(std::strtoull(arguments[i], nullptr, 16));
    }
    the_witness.weaken(arguments[3] == std::string("acquire") ? Half::acquire : Half::release,
                       std::move(places));
  }
  const u64 first = std::strtoull(arguments[1], nullptr, 10);
  const u64 runs = std::strtoull(arguments[2], nullptr, 10);
  moeos::twin::witness = &the_witness;
  constexpr u64 kOfCouriers = 10;  // they take a moment
  for (u64 seed = first; seed < first + runs; ++seed) {
    for (u32 strategy = 0; strategy < moeos::twin::kStrategies; ++strategy) {
      for (u64 order = seed * kOfCouriers; order < (seed + 1) * kOfCouriers; ++order) {
        the_witness.begin();
        if (!couriers_take_every_chunk(order, static_cast<Strategy>(strategy))) {
          std::printf("couriers, seed %llu, strategy %u: a chunk is not taken\n",
                      static_cast<unsigned long long>(order), strategy);
          return 1;
        }
      }
      // Not where memory is damaged: who believes a word that nobody wrote may read anything.
      for (const Scenario scenario : {Scenario::quiet, Scenario::nic, Scenario::late}) {
        the_witness.begin();
        const Outcome outcome =
            moeos::twin::explore(seed, static_cast<Strategy>(strategy), scenario);
        if (!outcome.wrong.empty()) {
          std::printf("seed %llu, scenario %u, strategy %u: %s\n",
                      static_cast<unsigned long long>(seed), static_cast<u32>(scenario), strategy,
                      outcome.wrong.c_str());
          return 1;
        }
      }
    }
  }
  the_witness.print_places();
  std::printf("everything is ordered\n");
  return 0;
}
