// SPDX-License-Identifier: Apache-2.0
// The task descriptor and the word that hands out one part of it.
//
// A descriptor is one cache line, written once by the actor that learns that the work is possible
// and read by the processors that run its parts (thesis section 5.2, Figure 5.1). A part is one
// N-tile of a product, a slice of a token block's Route, some tokens' Combine; all but the first
// are known from their words, and have no descriptor in memory. (Parts of couriers:
// courier_part.hpp.) Must not depend on: how a task is computed; addresses.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/dimensions.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/products.hpp"
#include "runtime/words/sealed.hpp"

namespace moeos {

/// Consecutive rows of one source's cell inside a tile; see laid_out_rows().
struct Segment {
  u32 first_row;  // row number in the cell of `source`
  u16 source;
  u16 rows;
};

struct alignas(kCacheLine) Task {
  TaskKind kind;
  u8 segment_count;  // products
  u16 parts;         // how many ready words this descriptor is handed out in
  u32 epoch;         // the call it belongs to: a reader checks it against its own
  u32 local_expert;  // products: the expert; see is_shared(). Combine: what is added up, as
                     // Summands (slices.hpp)
  u32 tile;          // products: index of the row tile, for its completion counter
  u32 rows;          // products: rows of the tile that count; combine: tokens, or 0 for the tokens
                     // of a block that sent no row
  u32 padded_rows;   // products: rows of the tile as laid out, a multiple of 8
  u32 first_result;  // products: the tile's first row in the buffer between the products; for a
                     // shared expert's tile: its first token
  u32 first_ready;   // combine: index of the first token among the complete ones, or the first of
                     // the awaited tokens; or a block
  u32 narrow;        // products: 1 when it is cut into narrow N-tiles
  u32 seal;          // what makes the descriptor whole; see is_intact()
  u32 half_width;    // of a copy for GEMM1: 1 when a wide tile is cut into narrow N-tiles
  u32 awaits;   // products, combine: not 0 when parts are handed out before their inputs are here,
                // so that processors wait for these (inputs.hpp); a copy may have kAwaitsByCounts
  RowsIn from;  // products: where its rows lie; in memory, a first product's
  u32 tokens;   // of a copy whose rows are listed tokens: four bits for each row, which it is
  Segment segments[Dimensions::kMaxSegments];
};
static_assert(sizeof(Task) == 128 && alignof(Task) == 128,
              "a descriptor is one cache line, read in one load");

/// Task::awaits of a tile that its processor has made of counts: every row comes by itself, and it
/// is not known how many rows its sources send.
inline constexpr u32 kAwaitsByCounts = 2;

/// The exclusive-or of all words of a descriptor, except those of segments that it does not have: a
/// reader that finds it knows that the descriptor has not been overwritten.
inline constexpr u32 kIntact = 0x4D6F454FU;

/// Words of a descriptor before its segments.
inline constexpr u32 kTaskHeaderWords = 14;
inline constexpr u32 kTaskWords = sizeof(Task) / sizeof(u32);
static_assert(align_up(u64{kTaskHeaderWords * sizeof(u32) + sizeof(Task::segments)},
                       u64{kCacheLine}) == sizeof(Task));

constexpr u32 first_word(TaskKind kind, u32 segments, u32 parts) {
  return static_cast<u32>(kind) | segments << 8 | parts << 16;
}
constexpr u32 words_of(const Segment& segment) {
  return segment.first_row ^ (u32{segment.source} | u32{segment.rows} << 16);
}

/// Rows that segment `index` takes inside the tile, whose row `first` is its first. The last
/// segment takes the remaining rows.
constexpr u32 laid_out_rows(const Dimensions& dimensions, const Task& task, u32 index, u32 first) {
  return index + 1 == task.segment_count ? task.padded_rows - first
                                         : align_up(u32{task.segments[index].rows},
                                                    dimensions.segment_align_of(task.narrow != 0));
}

/// The number after those of this rank's experts: all shared experts, as one.
constexpr u32 shared_expert(const Dimensions& dimensions) { return dimensions.local_experts(); }
/// Whether a tile has a rank's own tokens, for the shared experts (known_parts.hpp).
constexpr bool is_shared(const Dimensions& dimensions, const Task& task) {
  return dimensions.shares() && task.local_expert == shared_expert(dimensions);
}
/// The product of a tile's part.
constexpr Product product_of(const Dimensions& dimensions, const Task& task) {
  return product_of(task.kind, is_shared(dimensions, task));
}
/// Parts of a tile's GEMM0.
constexpr u32 first_parts_of(const Dimensions& dimensions, const Task& task) {
  const Product first = product_of(kFirstProduct.kind, is_shared(dimensions, task));
  return parts_of(dimensions, first, task.narrow != 0);
}

/// Whether a copy's parts are narrow N-tiles.
constexpr bool has_narrow_parts(const Task& task) {
  return task.narrow != 0 || task.half_width != 0;
}

/// Whether the processor that has claimed a part must wait for its inputs.
constexpr bool waits_for_inputs(const Task& task) {
  return task.awaits != 0 && awaits_of(task.from) != Awaits::nothing;
}

/// The token of row `row` of a tile whose rows are listed; and its bits in Task::tokens.
inline constexpr u32 kTokenBits = 4;
static_assert(Dimensions::kInPlaceTokens * kTokenBits <= 32 &&
              Dimensions::kInPlaceTokens <= 1U << kTokenBits);
constexpr u32 token_of_row(const Task& task, u32 row) {
  return task.tokens >> row * kTokenBits & ((1U << kTokenBits) - 1);
}
constexpr u32 as_row(u32 token, u32 row) { return token << row * kTokenBits; }

/// Turns a private copy of a tile's descriptor into that of GEMM1: the rows stay. The seal of a
/// copy is never checked.
constexpr void become_second(Task& task, const Dimensions& dimensions, bool half_width) {
  task.kind = kSecondProduct.kind;
  task.from = kSecondProduct.rows;
  task.half_width = half_width ? 1 : 0;
  task.parts = static_cast<u16>(parts_of(dimensions, kSecondProduct.kind, has_narrow_parts(task)));
}

/// Whether a descriptor is what its poster has written.
constexpr bool is_intact(const Task& task) {
  u32 all = first_word(task.kind, task.segment_count, task.parts) ^ task.epoch ^ task.local_expert ^
            task.tile ^ task.rows ^ task.padded_rows ^ task.first_result ^ task.first_ready ^
            task.narrow ^ task.awaits ^ task.seal;
  for (u32 s = 0; s < minimum(u32{task.segment_count}, Dimensions::kMaxSegments); ++s) {
    all ^= words_of(task.segments[s]);
  }
  return all == kIntact || MOEOS_PLANTED(torn_descriptors_are_run);
}

/// The share of a lane that holds word `index` of a descriptor in the exclusive-or of all words.
constexpr u32 share_of(u32 index, u32 word, u32 segments) {
  return index < kTaskHeaderWords + segments * (sizeof(Segment) / sizeof(u32)) ? word : 0;
}

/// `epoch | kind | part | task`: one part of a descriptor, as it lies, sealed, in a mailbox (part =
/// number of parts) or in the ready ring (part = its index). The epoch distinguishes a word from
/// those of earlier calls, so that no slot needs clearing between calls.
class ReadyWord {
 public:
  static constexpr u32 kTaskBits = 19;
  static constexpr u32 kPartBits = 10;
  static constexpr u32 kKindBits = 3;
  static_assert(kTaskBits + kPartBits + kKindBits == 32);
  static constexpr u32 kTasks = 1U << kTaskBits;
  static constexpr u32 kParts = 1U << kPartBits;
  /// A kind's value: a part of GEMM1 that is cut like those of narrow tiles.
  static constexpr u32 kHalfWidthProduct1 = kTaskKinds;
  /// A kind's value: a Combine of tokens whose rows are not back.
  static constexpr u32 kAwaitedCombine = kTaskKinds + 1;
  static_assert(kAwaitedCombine < 1U << kKindBits);

  constexpr ReadyWord() = default;
  /// From memory.
  explicit constexpr ReadyWord(u64 sealed) : bits_(open(sealed)) {}
  constexpr ReadyWord(u32 epoch, TaskKind kind, u32 task, u32 part)
      : ReadyWord(epoch, static_cast<u32>(kind), task, part) {}

  /// The word of something that has one number instead of a task and a part.
  static constexpr u32 kNumbers = kTasks * kParts;
  static constexpr ReadyWord of_number(u32 epoch, TaskKind kind, u32 number) {
    return ReadyWord(epoch, kind, number % kTasks, number / kTasks);
  }
  constexpr u32 number() const { return bits_ & (kNumbers - 1); }

  /// For memory.
  constexpr u64 sealed() const { return seal(bits_); }
  constexpr u32 epoch() const { return static_cast<u32>(bits_ >> 32); }
  constexpr TaskKind kind() const {
    return half_width() ? kSecondProduct.kind
           : awaited()  ? TaskKind::combine
                        : static_cast<TaskKind>(kind_bits());
  }
  constexpr bool half_width() const { return kind_bits() == kHalfWidthProduct1; }
  constexpr bool awaited() const { return kind_bits() == kAwaitedCombine; }
  constexpr u32 part() const { return (bits_ >> kTaskBits) & (kParts - 1); }
  constexpr u32 task() const { return bits_ & (kTasks - 1); }
  /// This word for another part.
  constexpr ReadyWord with_part(u32 part) const {
    return ReadyWord(epoch(), kind_bits(), task(), part);
  }
  /// This word of GEMM1, for a tile that is cut in halves.
  constexpr ReadyWord cut_in_halves() const {
    return ReadyWord(epoch(), kHalfWidthProduct1, task(), part());
  }
  /// This word of a Combine, for a processor that waits for rows.
  constexpr ReadyWord awaiting_rows() const {
    return ReadyWord(epoch(), kAwaitedCombine, task(), part());
  }

 private:
  constexpr ReadyWord(u32 epoch, u32 kind, u32 task, u32 part)
      : bits_(u64{epoch} << 32 | u64{kind} << (kTaskBits + kPartBits) | u64{part} << kTaskBits |
              task) {
    MOEOS_CHECK(task < kTasks && part < kParts);
  }
  constexpr u32 kind_bits() const {
    return static_cast<u32>(bits_ >> (kTaskBits + kPartBits)) & ((1U << kKindBits) - 1);
  }

  u64 bits_ = 0;
};

static_assert(Dimensions::kCombineTokens < ReadyWord::kParts);
/// The word of the Combine of `tokens` complete tokens from index `first_ready` on. It is complete,
/// so there is no descriptor.
constexpr ReadyWord combine_word(u32 epoch, u32 first_ready, u32 tokens) {
  MOEOS_CHECK(tokens != 0);
  return ReadyWord(epoch, TaskKind::combine, first_ready, tokens);
}
/// The word of the Combine of a block's tokens that have sent no row.
constexpr ReadyWord combine_unsent_word(u32 epoch, u32 block) {
  return ReadyWord(epoch, TaskKind::combine, block, 0);
}
/// What a processor makes of either word.
constexpr Task combine_task(ReadyWord word) {
  Task task{};
  task.kind = word.kind();
  task.parts = 1;
  task.epoch = word.epoch();
  task.rows = word.part();
  task.first_ready = word.task();
  task.awaits = word.awaited() ? 1 : 0;
  return task;
}

}  // namespace moeos
