// SPDX-License-Identifier: Apache-2.0
// The emulator's machine, in place of runtime/platform/cuda/platform.hpp: all accesses are ordered.
#pragma once

#include <cstring>

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"
#include "tests/emulator/cuda.hpp"

namespace moeos::cuda {

class NoTransport {
 public:
  static constexpr bool kExists = false;
};

template <class Transport, u32 kWorld>
class Machine {
 public:
  static constexpr u32 kLanes = 32;
  static constexpr bool kRemotePeers = Transport::kExists;
  static constexpr u32 kSenders = kRemotePeers ? 8 : 0;
  static constexpr u32 kReturnsSubscribers = kRemotePeers ? 1 : 4;
  static constexpr bool has_faults() { return false; }

  explicit Machine(u8* const* peers) : peers_(peers) {}

  static u32 lane() { return threadIdx.x % 32; }
  static u32 ballot(bool predicate) { return __ballot_sync(~0U, predicate); }
  static u32 lanes_before(u32 ballot) {
    return static_cast<u32>(__builtin_popcount(ballot & ((1U << lane()) - 1)));
  }
  static u32 count(u32 ballot) { return static_cast<u32>(__builtin_popcount(ballot)); }
  static u32 first_lane(u32 ballot) {
    return ballot == 0 ? 0 : static_cast<u32>(__builtin_ctz(ballot));
  }
  template <class T>
  static T broadcast(T value, u32 source_lane) {
    return __shfl_sync(~0U, value, static_cast<int>(source_lane));
  }
  static u32 inclusive_scan(u32 value) {
    const u64* values = emulator::exchange("a scan", value);
    u32 sum = 0;
    for (u32 i = 0; i <= lane(); ++i) {
      sum += static_cast<u32>(values[i]);
    }
    return sum;
  }
  static u32 exclusive_or(u32 value) {
    const u64* values = emulator::exchange("an exclusive-or", value);
    u32 all = 0;
    for (u32 i = 0; i < kLanes; ++i) {
      all ^= static_cast<u32>(values[i]);
    }
    return all;
  }
  static u32 alike(u32 value) { return __match_any_sync(~0U, value); }
  static void sync_lanes() { __syncwarp(); }

  template <Scope S, class T>
  [[nodiscard]] static T load_relaxed(const T* word) {
    return *static_cast<const volatile T*>(word);
  }
  template <Scope S, class T>
  static void store_relaxed(T* word, std::type_identity_t<T> value) {
    *static_cast<volatile T*>(word) = value;
  }
  template <Scope S, class T>
  static T add_relaxed(T* word, std::type_identity_t<T> value) {
    const T before = *word;
    *word = before + value;
    return before;
  }
  template <Scope S, class T>
  static void count_relaxed(T* word, std::type_identity_t<T> value) {
    add_relaxed<S>(word, value);
  }
  template <Scope S, class T>
  static T compare_exchange_relaxed(T* word, std::type_identity_t<T> expected,
                                    std::type_identity_t<T> desired) {
    const T before = *word;
    *word = before == expected ? desired : before;
    return before;
  }
  template <Scope S, class T>
  static bool compare_exchange_release(T* word, std::type_identity_t<T> expected,
                                       std::type_identity_t<T> desired) {
    return compare_exchange_relaxed<S>(word, expected, desired) == expected;
  }
  template <Scope S, class T>
  [[nodiscard]] static T load_acquire(const T* word) {
    return load_relaxed<S>(word);
  }
  template <Scope S, class T>
  static void store_release(T* word, std::type_identity_t<T> value) {
    store_relaxed<S>(word, value);
  }
  template <Scope S>
  static void add_release(u32* word, u32 value) {
    add_relaxed<S>(word, value);
  }
  template <Scope S>
  static u32 add_acquire_release(u32* word, u32 value) {
    return add_relaxed<S>(word, value);
  }
  template <Scope S, class T>
  [[nodiscard]] static T poll(const T* word) {
    return load_relaxed<S>(word);
  }
  template <Scope S>
  [[nodiscard]] static u32 poll_add(u32* word, u32 value) {
    return add_relaxed<S>(word, value);
  }
  template <Scope S>
  static void acquire_fence() {
    sync_lanes();  // as the GPU's: a lane that does not come is noticed
  }
  template <Scope S>
  static void publish_fence() {}
  template <Scope S>
  static void relay_fence() {
    acquire_fence<S>();
  }
  template <Scope S, class T>
  static void publish(T* word, std::type_identity_t<T> value) {
    store_relaxed<S>(word, value);
  }
  template <Scope S>
  static void publish_add(u32* word, u32 value) {
    add_relaxed<S>(word, value);
  }
  static u64 now_ns() { return emulator::now_ns(); }
  static u32 opaque(u32 value) { return value; }
  static void pause(u32&) { emulator::yield(); }
  static void rest(u32&) {}

  u8* peer(u32 rank) const { return peers_[rank]; }
  /// Puts are stores of one lane, which all others wait for; the next turn is another actor's.
  void put(u32 rank, u64 offset, const void* source, u64 bytes) const {
    sync_lanes();
    if (lane() == 0) {
      std::memcpy(peers_[kWorld + rank] + offset, source, bytes);
    }
    sync_lanes();
  }
  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) const {
    put(rank, offset, source, bytes);
    if (lane() == 0) {
      u32& word = *reinterpret_cast<u32*>(peers_[kWorld + rank] + signal);
      word = op == SignalOp::set ? value : word + value;
    }
  }
  void put_word(u32 rank, u64 offset, u64 value) const {
    *reinterpret_cast<u64*>(peers_[kWorld + rank] + offset) = value;
  }
  void add_word(u32 rank, u64 offset, u32 value) const {
    *reinterpret_cast<u32*>(peers_[kWorld + rank] + offset) += value;
  }
  void order_puts() const {}

 private:
  u8* const* peers_;
};

}  // namespace moeos::cuda
