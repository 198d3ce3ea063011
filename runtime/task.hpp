// The task descriptor and the word that hands out one part of it.
//
// A descriptor is one cache line, written once by whoever learns that the work is possible and read
// by the processors that run its parts (thesis section 5.2, Figure 5.1). A part is one N-tile of a
// GEMM, one chunk of a Dispatch, one token block of a Route. May not know: how a task is computed;
// addresses.
#pragma once

#include "runtime/base.hpp"
#include "runtime/geometry.hpp"

namespace moeos {

/// In the order in which the scheduler prefers them.
enum class TaskKind : u8 {
  route,  ///< logits, top-k, weights of a block of tokens; first, because every rank waits for our
          ///< counts
  combine,   ///< weighted sum of the tokens whose rows are all back
  gemm1,     ///< second GEMM of a row tile, written into the owners' combine cells
  gemm0,     ///< first GEMM and activation of a row tile
  dispatch,  ///< one chunk of rows to the rank that owns the experts
};
inline constexpr u32 kTaskKinds = 5;

/// Consecutive rows of one source's cell inside a tile. Inside the tile they take align_up(rows, 8)
/// rows.
struct Segment {
  u32 first_row;  // row number in the cell of `source`
  u16 source;
  u16 rows;
};

struct alignas(kCacheLine) Task {
  TaskKind kind;
  u8 segment_count;  // GEMMs
  u16 parts;         // how many ready words this descriptor is handed out in
  u32 epoch;         // the call it belongs to: a reader checks it against its own
  u32 local_expert;  // GEMMs: whose weights
  u32 tile;          // GEMMs: index of the row tile, for its completion counter
  u32 rows;          // GEMMs: rows of the tile that count
  u32 padded_rows;   // GEMMs: rows of the tile as laid out, a multiple of 8
  u32 first_result;  // GEMMs: the tile's first row in the buffer between the GEMMs
  u32 peer;  // dispatch: destination; combine: whose rows came back, or kNone for tokens that sent
             // none
  u32 first_chunk;  // dispatch, combine
  u32 reserved[7];
  Segment segments[Geometry::kMaxSegments];
};
static_assert(sizeof(Task) == 128 && alignof(Task) == 128,
              "a descriptor is one cache line, read in one load");

/// `epoch | kind | part | task`: one part of a descriptor, as it lies in a mailbox (part = number
/// of parts) or in the ready ring (part = which one). The epoch makes a word of an earlier call
/// unmistakable, so that no slot needs clearing between calls.
class ReadyWord {
 public:
  static constexpr u32 kTaskBits = 19;
  static constexpr u32 kPartBits = 10;
  static constexpr u32 kKindBits = 3;
  static_assert(kTaskBits + kPartBits + kKindBits == 32);
  static constexpr u32 kTasks = 1U << kTaskBits;
  static constexpr u32 kParts = 1U << kPartBits;

  constexpr ReadyWord() = default;
  explicit constexpr ReadyWord(u64 bits) : bits_(bits) {}
  constexpr ReadyWord(u32 epoch, TaskKind kind, u32 task, u32 part)
      : bits_(u64{epoch} << 32 | u64{static_cast<u32>(kind)} << (kTaskBits + kPartBits) |
              u64{part} << kTaskBits | task) {
    MOEOS_CHECK(task < kTasks && part < kParts);
  }

  constexpr u64 bits() const { return bits_; }
  constexpr u32 epoch() const { return static_cast<u32>(bits_ >> 32); }
  constexpr TaskKind kind() const {
    return static_cast<TaskKind>((bits_ >> (kTaskBits + kPartBits)) & ((1U << kKindBits) - 1));
  }
  constexpr u32 part() const { return (bits_ >> kTaskBits) & (kParts - 1); }
  constexpr u32 task() const { return bits_ & (kTasks - 1); }
  /// The same word for another part.
  constexpr ReadyWord with_part(u32 part) const { return ReadyWord(epoch(), kind(), task(), part); }

 private:
  u64 bits_ = 0;
};

}  // namespace moeos
