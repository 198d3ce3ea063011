// SPDX-License-Identifier: Apache-2.0
// The twin's machine: a block is a thread, a warp has one lane, peers are mapped memory.
//
// Knows C++ atomics, clocks and sleeping. Must not depend on: the heap's layout, what an actor does
// with a word. Ranks may share a process (virtual ranks) or only memory (one process a rank):
// std::atomic_ref serves both, because lock-free atomics are address-free.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "runtime/platform/concept.hpp"
#include "runtime/platform/twin/interposer.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

// Returns subscribers of a rank. Tests build a twin with two, as a GPU has four.
#ifndef MOEOS_TWIN_RETURNS_SUBSCRIBERS
#define MOEOS_TWIN_RETURNS_SUBSCRIBERS 1
#endif

namespace moeos::twin {

class Machine {
 public:
  static constexpr u32 kLanes = 1;
  static constexpr bool kRemotePeers = true;
  static constexpr u32 kSenders = 1;
  static constexpr u32 kReturnsSubscribers = MOEOS_TWIN_RETURNS_SUBSCRIBERS;
  static constexpr bool has_faults() { return true; }

  /// heaps[p]: rank p's heap as mapped in this process. To the runtime, only the ranks of `self`'s
  /// node are addressable, and it reaches the others by puts: the RDMA path without a NIC, unless
  /// there is one.
  Machine(u8* const* heaps, u32 self, u32 ranks_per_node, Nic* nic = nullptr)
      : heaps_(heaps), node_(self / ranks_per_node), ranks_per_node_(ranks_per_node), nic_(nic) {}

  static u32 lane() { return 0; }
  static u32 ballot(bool predicate) { return predicate ? 1U : 0U; }
  static u32 lanes_before(u32 /*ballot*/) { return 0; }
  static u32 count(u32 ballot) { return ballot; }
  static u32 first_lane(u32 /*ballot*/) { return 0; }
  template <class T>
  static T broadcast(T value, u32 /*source_lane*/) {
    return value;
  }
  static u32 inclusive_scan(u32 value) { return value; }
  static u32 exclusive_or(u32 value) { return value; }
  static u32 alike(u32 /*value*/) { return 1; }
  static void sync_lanes() {}

  template <Scope, class T>
  [[nodiscard]] static T load_relaxed(const T* word) {
    return access(word).load(std::memory_order_relaxed);
  }
  template <Scope, class T>
  [[nodiscard]] static T load_acquire(const T* word) {
    return access(word).load(std::memory_order_acquire);
  }
  template <Scope, class T>
  static void store_relaxed(T* word, T value) {
    access(word).store(value, std::memory_order_relaxed);
  }
  template <Scope, class T>
  static void store_release(T* word, T value) {
    access(word).store(value, MOEOS_PLANTED(releases_are_relaxed) ? std::memory_order_relaxed
                                                                  : std::memory_order_release);
  }
  template <Scope, class T>
  [[nodiscard]] static T add_relaxed(T* word, T value) {
    return access(word).fetch_add(value, std::memory_order_relaxed);
  }
  template <Scope, class T>
  static void count_relaxed(T* word, T value) {
    access(word).fetch_add(value, std::memory_order_relaxed);
  }
  template <Scope, class T>
  static void add_release(T* word, T value) {
    access(word).fetch_add(value, std::memory_order_release);
  }
  template <Scope, class T>
  [[nodiscard]] static T add_acquire_release(T* word, T value) {
    return access(word).fetch_add(value, std::memory_order_acq_rel);
  }
  template <Scope, class T>
  [[nodiscard]] static T compare_exchange_relaxed(T* word, T expected, T desired) {
    access(word).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
    return expected;
  }
  template <Scope, class T>
  static bool compare_exchange_release(T* word, T expected, T desired) {
    return access(word).compare_exchange_strong(expected, desired, std::memory_order_release,
                                                std::memory_order_relaxed);
  }

  // As on the GPU, fences order what is polled and published. ThreadSanitizer does not model
  // fences: under it each word carries its own order instead, and a missing fence is not noticed.
  // The explorer's witness of order notices it (tests/native/test_order.cpp).
#ifdef MOEOS_WORDS_CARRY_ORDER
  static constexpr bool kWordsCarryOrder = true;
#else
  static constexpr bool kWordsCarryOrder = false;
#endif
  template <Scope S, class T>
  [[nodiscard]] static T poll(const T* word) {
    return access(word).load(kWordsCarryOrder ? std::memory_order_acquire
                                              : std::memory_order_relaxed);
  }
  template <Scope S, class T>
  [[nodiscard]] static T poll_add(T* word, T value) {
    return access(word).fetch_add(
        value, kWordsCarryOrder ? std::memory_order_acq_rel : std::memory_order_relaxed);
  }
  template <Scope>
  static void acquire_fence() {
    if constexpr (!kWordsCarryOrder) {
      std::atomic_thread_fence(std::memory_order_acquire);
    }
  }
  template <Scope>
  static void publish_fence() {
    if constexpr (!kWordsCarryOrder) {
      std::atomic_thread_fence(std::memory_order_release);
    }
  }
  template <Scope S>
  static void relay_fence() {
    acquire_fence<S>();
    publish_fence<S>();
  }
  template <Scope S, class T>
  static void publish(T* word, T value) {
    access(word).store(value,
                       kWordsCarryOrder ? std::memory_order_release : std::memory_order_relaxed);
  }
  template <Scope S, class T>
  static void publish_add(T* word, T value) {
    access(word).fetch_add(
        value, kWordsCarryOrder ? std::memory_order_acq_rel : std::memory_order_relaxed);
  }

  static u64 now_ns() {
    const u64 interposed = interposer != nullptr ? interposer->now_ns() : 0;
    if (interposed != 0) {
      return interposed;
    }
    return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch() /
                            std::chrono::nanoseconds(1));
  }

  static u32 opaque(u32 value) { return value; }
  /// Waits a little longer each time: first on the core, then giving it up, then asleep. With fewer
  /// cores than threads the sleepers leave the cores to those that compute.
  static void pause(u32& idle) {
    if (interposer != nullptr && interposer->at_pause()) {
      return;
    }
    constexpr u32 kSpins = 200;
    constexpr u32 kYields = 20;
    constexpr long kShortestSleep = 20'000;
    constexpr long kLongestSleep = 500'000;
    if (idle < kSpins) {
      cpu_relax();
    } else if (idle < kSpins + kYields) {
      sched_yield();
    } else {
      const u32 doublings = minimum(5U, (idle - kSpins - kYields) / 4);
      const timespec nap{0, minimum(kLongestSleep, kShortestSleep << doublings)};
      const bool woken = nanosleep(&nap, nullptr) != 0;
      if (bystander != nullptr) {
        bystander->at_nap(woken);
      }
    }
    ++idle;
  }
  static void rest(u32& idle) { idle = 0; }

  u8* peer(u32 rank) const { return rank / ranks_per_node_ == node_ ? heaps_[rank] : nullptr; }

  // Without a card a put is done when it returns, so a release on the signal or word is all the
  // order that it needs. The runtime reads only the lower half of a signal.
  void put(u32 rank, u64 offset, const void* source, u64 bytes) const {
    if (nic_ != nullptr) {
      nic_->put(rank, offset, source, bytes);
    } else {
      std::memcpy(heaps_[rank] + offset, source, bytes);
    }
  }
  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) const {
    if (nic_ != nullptr) {
      nic_->put_signal(rank, offset, source, bytes, signal, op, value);
      return;
    }
    std::memcpy(heaps_[rank] + offset, source, bytes);
    auto* word = reinterpret_cast<u32*>(heaps_[rank] + signal);
    if (op == SignalOp::set) {
      MOEOS_PLANTED(signal_overtakes_rows) ? store_relaxed<Scope::system>(word, value)
                                           : store_release<Scope::system>(word, value);
    } else {
      add_release<Scope::system>(word, value);
    }
  }
  void put_word(u32 rank, u64 offset, u64 value) const {
    if (nic_ != nullptr) {
      nic_->put_word(rank, offset, value);
      return;
    }
    store_release<Scope::system>(reinterpret_cast<u64*>(heaps_[rank] + offset), value);
  }
  void add_word(u32 rank, u64 offset, u32 value) const {
    if (nic_ != nullptr) {
      nic_->add_word(rank, offset, value);
      return;
    }
    add_release<Scope::system>(reinterpret_cast<u32*>(heaps_[rank] + offset), value);
  }
  void order_puts() const {
    if (nic_ != nullptr) {
      nic_->order_puts();
    }
  }

 private:
  template <class T>
  static std::atomic_ref<T> access(const T* word) {
    static_assert(std::atomic_ref<T>::is_always_lock_free,
                  "shared between processes: must not need a lock");
    if (interposer != nullptr) {
      interposer->at_access();
    }
    return std::atomic_ref<T>(*const_cast<T*>(word));
  }

  static void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }

  u8* const* heaps_;
  u32 node_;
  u32 ranks_per_node_;
  Nic* nic_;
};

}  // namespace moeos::twin
