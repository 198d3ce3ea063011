// SPDX-License-Identifier: Apache-2.0
// Puts under way. See hostile_nic.hpp.
#include "kernels/twin/explore/hostile_nic.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace moeos::twin {

/// Everything that the requesting actor has done, and acquired, precedes the card's reads and
/// writes.
void HostileNic::note_request() const {
  if (witness != nullptr) {
    witness->follows(witnessed_, witness->running());
  }
}

bool HostileNic::take(u32 rank, const void* source, u64 offset, u64 bytes) {
  note_request();
  if (held_[rank] + bytes > limit_) {
    ++refused_;
    return false;
  }
  held_[rank] += bytes;
  ++puts_;
  const auto* from = static_cast<const u8*>(source);
  const u64 half = bytes / 2;
  for (const auto& [first, count] : {std::pair{u64{0}, half}, std::pair{half, bytes - half}}) {
    if (count > 0) {
      pieces_.push_back(Piece{Kind::bytes, rank, offset + first, from + first, count, 0,
                              SignalOp::set, fences_, puts_});
    }
  }
  return true;
}

void HostileNic::put(u32 rank, u64 offset, const void* source, u64 bytes) {
  take(rank, source, offset, bytes);
}

void HostileNic::put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal,
                            SignalOp op, u32 value) {
  if (take(rank, source, offset, bytes)) {
    pieces_.push_back(Piece{Kind::signal, rank, signal, nullptr, 0, value, op, fences_, puts_});
  }
}

void HostileNic::put_word(u32 rank, u64 offset, u64 value) {
  note_request();
  pieces_.push_back(
      Piece{Kind::word, rank, offset, nullptr, 0, value, SignalOp::set, fences_, ++puts_});
}

void HostileNic::add_word(u32 rank, u64 offset, u32 value) {
  note_request();
  pieces_.push_back(
      Piece{Kind::add, rank, offset, nullptr, 0, value, SignalOp::add, fences_, ++puts_});
}

bool HostileNic::may_arrive(const Piece& piece) const {
  return std::none_of(pieces_.begin(), pieces_.end(), [&](const Piece& other) {
    const bool fenced = other.fences < piece.fences;
    const bool own_bytes =
        piece.kind == Kind::signal && other.put == piece.put && other.kind == Kind::bytes;
    return other.rank == piece.rank && (fenced || own_bytes);
  });
}

void HostileNic::arrive(const Piece& piece) {
  const u64 before = witness != nullptr ? witness->goes_on(witnessed_) : Witness::kCaller;
  u8* const to = heaps_[piece.rank] + piece.offset;
  const auto low = std::atomic_ref<u32>(*reinterpret_cast<u32*>(to));
  switch (piece.kind) {
    case Kind::bytes:
      std::memcpy(to, piece.source, piece.bytes);
      held_[piece.rank] -= piece.bytes;
      break;
    case Kind::signal:
      piece.op == SignalOp::set ? low.store(static_cast<u32>(piece.value))
                                : void(low.fetch_add(static_cast<u32>(piece.value)));
      break;
    case Kind::word:
      std::atomic_ref<u64>(*reinterpret_cast<u64*>(to)).store(piece.value);
      break;
    case Kind::add:
      low.fetch_add(static_cast<u32>(piece.value));
      break;
  }
  if (witness != nullptr) {
    witness->goes_on(before);
  }
}

bool HostileNic::act(Random& random, bool all_wait) {
  if (act_one_in_ == 0) {
    const u32 slower[] = {1, 4, 30, 200};
    act_one_in_ = slower[draw(random, 0, 3)];
  }
  const bool had = !pieces_.empty();
  if (had && (all_wait || draw(random, 1, act_one_in_) == 1)) {
    ready_.clear();
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (may_arrive(pieces_[i])) {
        ready_.push_back(i);
      }
    }
    // Never empty: the pieces with the fewest fences before them wait for no other put.
    const std::size_t chosen = ready_[random() % ready_.size()];
    const Piece piece = pieces_[chosen];
    pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(chosen));
    arrive(piece);
  }
  return had;
}

void HostileNic::quiet() {
  for (const Piece& piece : pieces_) {  // in the order in which they were put, which is a valid one
    arrive(piece);
  }
  pieces_.clear();
}

}  // namespace moeos::twin
