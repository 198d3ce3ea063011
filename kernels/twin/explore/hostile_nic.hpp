// SPDX-License-Identifier: Apache-2.0
// A network card that keeps its promises and nothing else.
//
// Puts to a rank overtake each other unless they are fenced, bytes are read when they leave and not
// when they are put, a put arrives in pieces, and a signal comes as late after its bytes as a seed
// chooses. It takes no more than a limit of bytes for one rank, and refuses puts beyond it. Must
// not depend on: rows, windows.
#pragma once

#include <vector>

#include "kernels/twin/explore/schedule.hpp"
#include "runtime/platform/twin/interposer.hpp"
#include "runtime/words/base.hpp"

namespace moeos::twin {

class HostileNic : public Nic, public Device {
 public:
  /// heaps[p]: rank p's heap. Holds at most `limit` bytes for a rank.
  HostileNic(std::vector<u8*> heaps, u64 limit)
      : heaps_(std::move(heaps)), limit_(limit), held_(heaps_.size(), 0) {}

  void put(u32 rank, u64 offset, const void* source, u64 bytes) override;
  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) override;
  void put_word(u32 rank, u64 offset, u64 value) override;
  void add_word(u32 rank, u64 offset, u32 value) override;
  void order_puts() override { ++fences_; }

  /// Lets something that may arrive do so, or not.
  bool act(Random& random, bool all_wait) override;

  /// Puts that were beyond the limit, and never arrive.
  u64 refused() const { return refused_; }
  /// Everything arrives.
  void quiet();

 private:
  enum class Kind : u8 { bytes, signal, word, add };
  struct Piece {
    Kind kind;
    u32 rank;
    u64 offset;
    const u8* source;
    u64 bytes;
    u64 value;
    SignalOp op;
    u64 fences;  // fences before it
    u64 put;     // the put that it is a part of: a signal waits for the bytes of its own put
  };

  bool take(u32 rank, const void* source, u64 offset, u64 bytes);
  bool may_arrive(const Piece& piece) const;
  void arrive(const Piece& piece);
  void note_request() const;

  std::vector<u8*> heaps_;
  u64 limit_;
  std::vector<u64> held_;  // [rank]: bytes
  std::vector<Piece> pieces_;
  std::vector<std::size_t> ready_;
  u32 act_one_in_ = 0;  // accesses: drawn at the first one
  u64 fences_ = 0;
  u64 puts_ = 0;
  u64 refused_ = 0;
  u64 witnessed_ = witness != nullptr ? witness->begins() : Witness::kCaller;
};

}  // namespace moeos::twin
