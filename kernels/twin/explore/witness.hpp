// SPDX-License-Identifier: Apache-2.0
// Who is told which fiber goes on, and so can say what of the others it has acquired.
//
// There is none in ordinary use; a program that looks for what nothing orders has one
// (tests/native/test_order.cpp). May not know: why a fiber was chosen, ranks.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::twin {

/// Actors are fibers, devices, and the caller of both, which is there from the beginning. What the
/// explorer tells of stands for the start and the end of a kernel, and for a card that reads what
/// it was asked to; a mere switch orders nothing.
class Witness {
 public:
  static constexpr u64 kCaller = 1;

  virtual ~Witness() = default;
  /// A new actor's number. It has all that the running one has done.
  virtual u64 begins() = 0;
  /// Accesses are this actor's from now on; returns whose they were.
  virtual u64 goes_on(u64 who) = 0;
  virtual u64 running() const = 0;
  /// What `later` does from now on lies behind all that `earlier` has done.
  virtual void follows(u64 later, u64 earlier) = 0;
};

inline Witness* witness = nullptr;

}  // namespace moeos::twin
