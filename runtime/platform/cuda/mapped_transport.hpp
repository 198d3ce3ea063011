// SPDX-License-Identifier: Apache-2.0
// Puts between ranks whose heaps one GPU addresses: stores, in the order that the contract
// requires.
//
// For virtual ranks of one launch that treat each other as remote: everything but the network runs,
// staging, requests, windows and echoes, and a sanitizer sees all of it. Must not depend on: the
// contents of puts.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"

namespace moeos::cuda {

class MappedTransport {
 public:
  static constexpr bool kExists = true;

  explicit MappedTransport(u8* const* heaps) : heaps_(heaps) {}

  static void acquire_arrivals() {}

  /// Bytes are a multiple of 16, and so are the addresses.
  void put(u32 rank, u64 offset, const void* source, u64 bytes) const {
    const auto* __restrict__ from = static_cast<const uint4*>(source);
    auto* __restrict__ to = reinterpret_cast<uint4*>(heaps_[rank] + offset);
#pragma unroll 8
    for (u64 i = threadIdx.x % 32; i < bytes / sizeof(uint4); i += 32) {
      to[i] = from[i];
    }
    // The peer reads rows by TMA, through the async proxy.
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) const {
    put(rank, offset, source, bytes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      // Publishes the warp's stores to the peer's subscriber, which polls this word and fences.
      order_puts();
      if (op == SignalOp::set) {
        auto* word = reinterpret_cast<u32*>(heaps_[rank] + signal);
        asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
      } else {
        add_word(rank, signal, value);
      }
    }
  }

  void put_word(u32 rank, u64 offset, u64 value) const {
    auto* word = reinterpret_cast<u64*>(heaps_[rank] + offset);
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }

  void add_word(u32 rank, u64 offset, u32 value) const {
    auto* word = reinterpret_cast<u32*>(heaps_[rank] + offset);
    asm volatile("red.relaxed.sys.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }

  void order_puts() const { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

 private:
  u8* const* heaps_;
};

}  // namespace moeos::cuda
