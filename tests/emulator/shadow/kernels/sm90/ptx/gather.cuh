// SPDX-License-Identifier: Apache-2.0
// The emulator's copies of 16 bytes, in place of kernels/sm90/ptx/gather.cuh: they land after a
// while, those that a lane has begun before an arrival together.
#pragma once

#include <cstring>
#include <utility>

#include "kernels/sm90/ptx/barrier.cuh"

namespace moeos::sm90 {

inline constexpr u32 kCopyBytes = 16;

struct PieceSource {
  const u8* address;
  PieceSource() = default;
  explicit PieceSource(const u8* from) : address(from) {}
  PieceSource piece(u32 nth) const { return PieceSource(address + u64{nth} * kCopyBytes); }
};
struct PieceTarget {
  u8* address;
  explicit PieceTarget(u8* to) : address(to) {}
};

template <bool kSome, bool kCut>
void copy_piece(const PieceSource& from, u32 nth, const PieceTarget& to, u32 behind, u32 bytes) {
  if (kSome && nth == kNone) {
    return;
  }
  const u8* source = from.address;
  u8* target = to.address + behind;
  if (reinterpret_cast<u64>(source) % kCopyBytes != 0 ||
      reinterpret_cast<u64>(target) % kCopyBytes != 0) {
    emulator::stop("copies a piece that is not aligned");
  }
  emulator::copies().push_back([source, target, bytes = kCut ? bytes : kCopyBytes] {
    std::memset(target, 0, kCopyBytes);
    std::memcpy(target, source, bytes);
  });
}

inline void arrive_when_copied(Barrier& barrier) {
  barrier.expect_arrival();
  emulator::later([copies = std::exchange(emulator::copies(), {}), &barrier] {
    for (const auto& copy : copies) {
      copy();
    }
    barrier.arrive();
  });
}

}  // namespace moeos::sm90
