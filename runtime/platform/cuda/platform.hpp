// SPDX-License-Identifier: Apache-2.0
// The GPU's machine: a block is a block, a warp has 32 lanes, direct peers are mapped memory over
// NVLink, and remote peers are left to a transport (another file of this folder).
//
// Knows PTX's memory model (ld/st/atom/fence with .cta, .gpu, .sys). Must not depend on: the heap's
// layout, what an actor does with a word. Compiled by NVRTC with device as the default execution
// space, so it carries no annotations.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"

namespace moeos::cuda {

/// The transport of a machine whose peers are all direct.
class NoTransport {
 public:
  static constexpr bool kExists = false;
  static void acquire_arrivals() {}
};

/// `Transport` makes puts among `kWorld` ranks; the contract of each is in
/// runtime/platform/concept.hpp.
template <class Transport, u32 kWorld>
class Machine {
 public:
  static constexpr u32 kLanes = 32;
  static constexpr bool kRemotePeers = Transport::kExists;
  // The OS block's idle warps: results come too slowly over a network to keep several busy.
  static constexpr u32 kSenders = kRemotePeers ? 8 : 0;
  static constexpr u32 kReturnsSubscribers = kRemotePeers ? 1 : 4;
  static constexpr bool has_faults() { return false; }

  /// peers[p]: rank p's heap as mapped on this device, own rank included; null for a remote peer.
  /// With a transport, peers[kWorld + p]: the address of rank p's heap that puts go to.
  explicit Machine(u8* const* peers) : peers_(peers) {}

  static u32 lane() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  static u32 ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }
  static u32 lanes_before(u32 ballot) {
    return static_cast<u32>(__popc(static_cast<int>(ballot & ((1U << lane()) - 1))));
  }
  static u32 count(u32 ballot) { return static_cast<u32>(__popc(static_cast<int>(ballot))); }
  static u32 first_lane(u32 ballot) {
    return ballot == 0 ? 0 : static_cast<u32>(__ffs(static_cast<int>(ballot))) - 1;
  }
  template <class T>
  static T broadcast(T value, u32 source_lane) {
    return __shfl_sync(kAllLanes, value, static_cast<int>(source_lane));
  }
  static u32 inclusive_scan(u32 value) {
    for (u32 distance = 1; distance < kLanes; distance *= 2) {
      const u32 below = __shfl_up_sync(kAllLanes, value, distance);
      value += lane() >= distance ? below : 0;
    }
    return value;
  }
  static u32 exclusive_or(u32 value) {
    u32 all;
    asm volatile("redux.sync.xor.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(value));
    return all;
  }
  static u32 alike(u32 value) { return __match_any_sync(kAllLanes, value); }
  static void sync_lanes() { __syncwarp(); }

  template <Scope S>
  [[nodiscard]] static u32 load_relaxed(const u32* word) {
    u32 value;
    if constexpr (S == Scope::block) {
      asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];"
                   : "=r"(value)
                   : "r"(in_shared_memory(word))
                   : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    } else {
      asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    }
    return value;
  }
  template <Scope S>
  [[nodiscard]] static u64 load_relaxed(const u64* word) {
    u64 value;
    if constexpr (S == Scope::block) {
      asm volatile("ld.relaxed.cta.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    } else {
      asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    }
    return value;
  }
  template <Scope S>
  static void store_relaxed(u32* word, u32 value) {
    if constexpr (S == Scope::block) {
      asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(in_shared_memory(word)),
                   "r"(value)
                   : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
    } else {
      asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
    }
  }
  template <Scope S>
  static void store_relaxed(u64* word, u64 value) {
    if constexpr (S == Scope::block) {
      asm volatile("st.relaxed.cta.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    } else {
      asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    }
  }
  template <Scope S>
  [[nodiscard]] static u32 add_relaxed(u32* word, u32 value) {
    u32 before;
    if constexpr (S == Scope::block) {
      asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "r"(in_shared_memory(word)), "r"(value)
                   : "memory");
    } else {
      static_assert(S == Scope::device);
      asm volatile("atom.add.relaxed.gpu.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(word), "r"(value)
                   : "memory");
    }
    return before;
  }
  /// A reduction: it returns nothing, so nothing waits for it.
  template <Scope S>
  static void count_relaxed(u32* word, u32 value) {
    if constexpr (S == Scope::block) {
      asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(in_shared_memory(word)),
                   "r"(value)
                   : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(in_global_memory(word)),
                   "r"(value)
                   : "memory");
    } else {
      asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(in_global_memory(word)),
                   "r"(value)
                   : "memory");
    }
  }
  template <Scope S>
  static void count_relaxed(u64* word, u64 value) {
    static_assert(S == Scope::device);
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(in_global_memory(word)),
                 "l"(value)
                 : "memory");
  }
  template <Scope S>
  [[nodiscard]] static u32 compare_exchange_relaxed(u32* word, u32 expected, u32 desired) {
    u32 before;
    if constexpr (S == Scope::block) {
      asm volatile("atom.cas.relaxed.cta.b32 %0, [%1], %2, %3;"
                   : "=r"(before)
                   : "l"(word), "r"(expected), "r"(desired)
                   : "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("atom.cas.relaxed.gpu.b32 %0, [%1], %2, %3;"
                   : "=r"(before)
                   : "l"(word), "r"(expected), "r"(desired)
                   : "memory");
    } else {
      asm volatile("atom.cas.relaxed.sys.b32 %0, [%1], %2, %3;"
                   : "=r"(before)
                   : "l"(word), "r"(expected), "r"(desired)
                   : "memory");
    }
    return before;
  }
  template <Scope S>
  static bool compare_exchange_release(u32* word, u32 expected, u32 desired) {
    publish_fence<S>();
    return compare_exchange_relaxed<S>(word, expected, desired) == expected;
  }

  /// Rare and only of system scope: it only raises failures.
  template <Scope S>
  static bool compare_exchange_release(u64* word, u64 expected, u64 desired) {
    static_assert(S == Scope::system);
    publish_fence<S>();
    u64 before;
    asm volatile("atom.cas.relaxed.sys.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(desired)
                 : "memory");
    return before == expected;
  }

  // PTX defines a release as a fence before, and an acquire as a fence after, a relaxed access (PTX
  // ISA, memory consistency model, "release and acquire patterns"): so every stronger access is
  // made of the four above. A fence that only acquires waits for nothing, while one that releases
  // waits for this thread's stores: about as long as a load from L2, and longer while others store.
  template <Scope S, class T>
  [[nodiscard]] static T load_acquire(const T* word) {
    const T value = load_relaxed<S>(word);
    acquiring_fence<S>();
    return value;
  }
  template <Scope S, class T>
  static void store_release(T* word, T value) {
    publish_fence<S>();
    store_relaxed<S>(word, value);
  }
  template <Scope S>
  static void add_release(u32* word, u32 value) {
    publish_fence<S>();
    count_relaxed<S>(word, value);
  }
  template <Scope S>
  [[nodiscard]] static u32 add_acquire_release(u32* word, u32 value) {
    publish_fence<S>();
    const u32 before = add_relaxed<S>(word, value);
    acquiring_fence<S>();
    return before;
  }

  template <Scope S, class T>
  [[nodiscard]] static T poll(const T* word) {
    return load_relaxed<S>(word);
  }
  template <Scope S>
  [[nodiscard]] static u32 poll_add(u32* word, u32 value) {
    return add_relaxed<S>(word, value);
  }
  // By all lanes. What one lane has read is acquired for all: a fence covers its own thread's
  // loads, and a shuffle by which the others learn of them orders nothing (PTX ISA, memory
  // consistency model, "synchronizes-with"); the barrier after it does.
  template <Scope S>
  static void acquire_fence() {
    acquiring_fence<S>();
    if constexpr (S == Scope::system) {
      Transport::acquire_arrivals();
    }
    sync_lanes();
  }
  template <Scope S>
  static void publish_fence() {
    if constexpr (S == Scope::block) {
      asm volatile("fence.release.cta;" ::: "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("fence.release.gpu;" ::: "memory");
    } else {
      asm volatile("fence.release.sys;" ::: "memory");
    }
  }
  // By all lanes: the barrier stands between its two fences, so what one lane has read is published
  // by every lane's word.
  template <Scope S>
  static void relay_fence() {
    acquire_fence<S>();
    publish_fence<S>();
  }
  template <Scope S, class T>
  static void publish(T* word, T value) {
    store_relaxed<S>(word, value);
  }

  template <Scope S>
  static void publish_add(u32* word, u32 value) {
    count_relaxed<S>(word, value);
  }

  static u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  static u32 opaque(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  /// A short sleep frees issue slots for the warps that compute on the same SM.
  static void pause(u32& idle) {
    constexpr u32 kSpins = 16;
    constexpr u32 kNapNs = 32;
    if (idle < kSpins) {
      ++idle;
    } else {
      __nanosleep(kNapNs);
    }
  }
  static void rest(u32& idle) { idle = 0; }

  u8* peer(u32 rank) const { return peers_[rank]; }

  void put(u32 rank, u64 offset, const void* source, u64 bytes) const {
    if constexpr (kRemotePeers) {
      transport().put(rank, offset, source, bytes);
    }
  }
  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) const {
    if constexpr (kRemotePeers) {
      transport().put_signal(rank, offset, source, bytes, signal, op, value);
    }
  }
  void put_word(u32 rank, u64 offset, u64 value) const {
    if constexpr (kRemotePeers) {
      transport().put_word(rank, offset, value);
    }
  }
  void add_word(u32 rank, u64 offset, u32 value) const {
    if constexpr (kRemotePeers) {
      transport().add_word(rank, offset, value);
    }
  }
  void order_puts() const {
    if constexpr (kRemotePeers) {
      transport().order_puts();
    }
  }

 private:
  Transport transport() const { return Transport(peers_ + kWorld); }

  static constexpr u32 kAllLanes = 0xFFFFFFFFU;

  /// The shared-memory address of a word of Scope::block: all such words are OsMemory's.
  static u32 in_shared_memory(const u32* word) {
    return static_cast<u32>(__cvta_generic_to_shared(word));
  }

  template <class T>
  static u64 in_global_memory(const T* word) {
    return __cvta_generic_to_global(word);
  }

  template <Scope S>
  static void acquiring_fence() {
    if constexpr (S == Scope::block) {
      asm volatile("fence.acquire.cta;" ::: "memory");
    } else if constexpr (S == Scope::device) {
      asm volatile("fence.acquire.gpu;" ::: "memory");
    } else {
      asm volatile("fence.acquire.sys;" ::: "memory");
    }
  }
  u8* const* peers_;
};

}  // namespace moeos::cuda
