// SPDX-License-Identifier: Apache-2.0
// Copies of 16 bytes from anywhere in global memory into shared memory, which a thread begins and
// does not wait for. Source: PTX ISA, "cp.async" and "cp.async.mbarrier.arrive".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

inline constexpr u32 kCopyBytes = 16;

// Addresses that many copies have in common. They are opaque to the compiler, so it keeps one
// register for each, and computes no sums for several copies in advance.
struct PieceSource {
  u64 address;
  PieceSource() = default;
  explicit PieceSource(const u8* from) : address(__cvta_generic_to_global(from)) {
    asm volatile("" : "+l"(address));
  }
  /// Piece `nth` after it. Computed here and now: so several addresses are ready before the first
  /// is used, each in registers of its own, which a copy reads some time after it is issued.
  PieceSource piece(u32 nth) const {
    PieceSource found;
    asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(found.address) : "r"(nth), "l"(address));
    return found;
  }
};
struct PieceTarget {
  u32 address;
  explicit PieceTarget(u8* to) : address(shared_address(to)) { asm volatile("" : "+r"(address)); }
};

/// Begins to copy the piece at `from` to `behind` bytes after `to`. `kSome`: unless `nth` is kNone.
/// `kCut`: only its first `bytes` bytes, 16 or 0, followed by zeros.
template <bool kSome, bool kCut>
inline void copy_piece(const PieceSource& from, u32 nth, const PieceTarget& to, u32 behind,
                       u32 bytes) {
  const u32 target = to.address + behind;
  if constexpr (kSome) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0xffffffff;\n"
        "@p cp.async.cg.shared.global [%0], [%1], 16, %3;\n"
        "}" ::"r"(target),
        "l"(from.address), "r"(nth), "r"(kCut ? bytes : kCopyBytes)
        : "memory");
  } else if constexpr (kCut) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from.address),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from.address)
                 : "memory");
  }
}

/// One more arrival at a barrier, which stays pending until all copies that this thread has begun
/// are complete. The phase must not end before it: another arrival has to be pending.
inline void arrive_when_copied(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

}  // namespace moeos::sm90
