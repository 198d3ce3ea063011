// SPDX-License-Identifier: Apache-2.0
// Hooks of the twin's machine: what a test puts between the runtime and memory, clock and network.
//
// None is installed in ordinary use. Must not depend on: what a word means, which actor accesses
// it.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"

namespace moeos::twin {

/// What happens around the accesses of the calling thread. The thread's creator sets it for the
/// thread's life; the runtime never does.
class Interposer {
 public:
  virtual ~Interposer() = default;
  /// Before each atomic access.
  virtual void at_access() = 0;
  /// Instead of a pause between two looks; false: pause as usual.
  virtual bool at_pause() { return false; }
  /// Instead of the clock, in nanoseconds; 0: the machine's own.
  virtual u64 now_ns() { return 0; }
};

inline thread_local Interposer* interposer = nullptr;

/// What else the calling thread must attend to while it waits.
class Bystander {
 public:
  virtual ~Bystander() = default;
  /// Between two looks at what it waits for; `woken`: a signal has ended the nap between them.
  virtual void at_nap(bool woken) = 0;
};

inline thread_local Bystander* bystander = nullptr;

/// A network card instead of puts that are done when they return. Its functions have the contract
/// of Platform's puts (runtime/platform/concept.hpp), for one rank.
class Nic {
 public:
  virtual ~Nic() = default;
  virtual void put(u32 rank, u64 offset, const void* source, u64 bytes) = 0;
  virtual void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal,
                          SignalOp op, u32 value) = 0;
  virtual void put_word(u32 rank, u64 offset, u64 value) = 0;
  virtual void add_word(u32 rank, u64 offset, u32 value) = 0;
  virtual void order_puts() = 0;
};

}  // namespace moeos::twin
