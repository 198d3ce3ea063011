// SPDX-License-Identifier: Apache-2.0
// An observer of which fiber runs, which can determine what that fiber has acquired from the
// others.
//
// There is none in ordinary use; a program that looks for unordered accesses has one
// (tests/native/test_order.cpp). Must not depend on: why a fiber was chosen, ranks.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::twin {

/// Actors are fibers, devices, and the caller of both, which is there from the beginning. The
/// explorer reports the start and the end of a kernel, and a card's reads for its requests; a mere
/// switch orders nothing.
class Witness {
 public:
  static constexpr u64 kCaller = 1;

  virtual ~Witness() = default;
  /// A new actor's number. The new actor has acquired all that the running one has done.
  virtual u64 begins() = 0;
  /// Accesses belong to this actor from now on; returns the previous actor.
  virtual u64 goes_on(u64 who) = 0;
  virtual u64 running() const = 0;
  /// What `later` does from now on comes after all that `earlier` has done.
  virtual void follows(u64 later, u64 earlier) = 0;
};

inline Witness* witness = nullptr;

}  // namespace moeos::twin
