// SPDX-License-Identifier: Apache-2.0
// Rows of a tile that are read by index: this rank's own tokens where the caller left them, where
// they are not copied (Geometry::gathers_own_rows), and rows between the products where they lie in
// the order of pairs (Geometry::between_by_pairs).
//
// TMA gathers no rows on Hopper, and one box for each row takes 35 ns, for 128 rows 4.5 us a step
// that lasts 0.7. So the load warp copies the rows in pieces of 16 bytes, to where TMA's swizzle
// would put them. A step has 1024 pieces, 32 instructions of a warp. How long these take depends on
// the instructions between them. So each lane keeps the beginnings of its rows for the whole part,
// and between two copies there is one addition, into registers that no pending copy still reads.
// Must not depend on: boxes; products.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/gather.cuh"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

inline constexpr bool kGathers = kGeometry.gathers_own_rows();
inline constexpr bool kPairsBetween = kGeometry.between_by_pairs();

/// Whether a segment's rows are gathered.
inline bool is_gathered(const Rank<Machine>& rank, const Segment& segment) {
  return kGathers && (kGeometry.world == 1 || !copies_rows(rank, segment.source));
}

inline bool is_gathered(const RankArguments& arguments, const Segment& segment) {
  return kGathers && is_gathered(rank_of(arguments, nullptr), segment);
}

/// The rows of one part that the load warp gathers. Every function is called by the whole warp.
class GatheredRows {
 public:
  GatheredRows(const RankArguments& arguments, const Task& task) : from_(arguments.x_rows) {
    if constexpr (kGathers) {
      between_ = kPairsBetween && task.from == RowsIn::between;
      if (is_product(task.kind) && !is_shared(kGeometry, task) &&
          (task.from == RowsIn::cells || between_)) {
        from_ = between_ ? arguments.intermediate_rows : from_;
        find(arguments, task);
      }
    }
  }

  /// Whether the part has any gathered rows.
  bool any() const { return kGathers && some_ != 0; }
  /// The number of the tile's rows, as laid out, that the load warp gathers.
  u32 laid_out() const { return kGathers ? laid_out_ : 0; }

  /// Begins to copy the columns of one step, and makes the stage's barrier wait for them.
  void copy(u32 step, Stage& stage, Barrier& full) const {
    if constexpr (kGathers) {
      const u32 column = step * (kSwizzleBytes + half_);  // in bytes
      const PieceSource from(from_ + column);
      PieceTarget even(stage.rows + place_);
      PieceTarget odd(stage.rows + (place_ ^ kOddPiece));
      // Zeros beyond a row's end, as in a box.
      const u32 left = row_bytes() - minimum(column, row_bytes());
      const u32 bytes = piece_byte() < left ? kCopyBytes : 0;
      const u32 bytes_of_half = piece_byte() + half_ < left ? kCopyBytes : 0;
#pragma unroll
      for (u32 group = 0; group < kGroups; ++group) {
        if ((all_ >> group & 1) != 0) {
          copy_group<false>(group, from, even, odd, bytes, bytes_of_half);
        } else if ((some_ >> group & 1) != 0) {
          copy_group<true>(group, from, even, odd, bytes, bytes_of_half);
        }
      }
      arrive_when_copied(full);
    }
  }

 private:
  static constexpr u32 kPieces = kSwizzleBytes / kCopyBytes;     // of a row in a stage
  static constexpr u32 kRowsAtOnce = Machine::kLanes / kPieces;  // rows of an instruction
  static constexpr u32 kCopies = kTileRows / kRowsAtOnce;        // of a lane, in a step
  static constexpr u32 kGroups = kTileRows / Machine::kLanes;    // of a row for each lane
  static constexpr u32 kOfGroup = kCopies / kGroups;
  static constexpr u32 kAtOnce = 4;  // addresses: there are no registers for more
  /// The swizzle moves a row's pieces by the row's number among eight, and every other row of a
  /// lane is four rows further.
  static constexpr u32 kOddPiece = kRowsAtOnce * kCopyBytes;
  static_assert(2 * kRowsAtOnce == 8);

  /// Whether no step goes beyond a row's end.
  static constexpr u32 kStepBytes = kNarrowDepth * kSwizzleBytes;
  static constexpr bool kWholeSteps = kGeometry.row_bytes % kStepBytes == 0 &&
                                      (!kPairsBetween || kGeometry.hidden_bytes % kStepBytes == 0);

  /// Bytes of a row, wherever it lies.
  u32 row_bytes() const { return between_ ? kGeometry.hidden_bytes : kGeometry.row_bytes; }

  /// Where this lane's pieces lie in a row of a stage.
  static u32 piece_byte() { return Machine::lane() % kPieces * kCopyBytes; }

  /// Copies the pieces of a group of rows; `kSome`: only of those that are gathered.
  template <bool kSome>
  void copy_group(u32 group, const PieceSource& from, const PieceTarget& even,
                  const PieceTarget& odd, u32 bytes, u32 bytes_of_half) const {
#pragma unroll
    for (u32 first = group * kOfGroup; first < (group + 1) * kOfGroup; first += kAtOnce) {
      PieceSource pieces[kAtOnce];
#pragma unroll
      for (u32 n = 0; n < kAtOnce; ++n) {
        pieces[n] = from.piece(piece_[first + n]);
      }
#pragma unroll
      for (u32 n = 0; n < kAtOnce; ++n) {
        const u32 i = first + n;
        copy_piece<kSome, !kWholeSteps>(pieces[n], piece_[i], i % 2 == 0 ? even : odd,
                                        i * kRowsAtOnce * kSwizzleBytes,
                                        i < kCopies / 2 ? bytes : bytes_of_half);
      }
    }
  }

  /// Each lane looks up one row of each group, and passes it to the lanes that copy it.
  void find(const RankArguments& arguments, const Task& task) {
    const Rank<Machine> rank = rank_of_look(arguments);  // otherwise its addresses take registers
                                                         // for all parts
    const bool narrow = task.narrow != 0;
    half_ = narrow ? kSwizzleBytes : 0;
    const u32 first = Machine::lane() / kPieces;
    const u32 piece = Machine::lane() % kPieces;
    place_ = first * kSwizzleBytes + (piece ^ first) * kCopyBytes;
    u32 places[kGroups];
    u32 rows[kGroups];  // all asked for before the first is looked at
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      // The second half of a narrow tile's stage has the next columns of the same rows.
      const u32 row = group * Machine::kLanes + Machine::lane();
      places[group] = find_place(rank, task, narrow ? row % kNarrowRows : row);
    }
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const u32 place = places[group] == kNone ? 0 : places[group];
      rows[group] = between_ ? place_between(own_pair(rank, place)) : own_token(rank, place);
    }
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const bool there = places[group] != kNone;
      const bool of_half = narrow && group * Machine::kLanes >= kNarrowRows;
      const u32 those = Machine::ballot(there);
      some_ |= (those != 0 ? 1U : 0U) << group;
      all_ |= (those == ~0U ? 1U : 0U) << group;
      u32 begin = rows[group] * (row_bytes() / kCopyBytes) + (of_half ? kPieces : 0);
      begin = there ? begin : kNone;
#pragma unroll
      for (u32 n = 0; n < kOfGroup; ++n) {
        const u32 its = Machine::broadcast(begin, n * kRowsAtOnce + first);
        piece_[group * kOfGroup + n] = its == kNone ? kNone : its + piece;
      }
    }
    u32 laid_out = 0;
    for (u32 s = 0; s < task.segment_count; ++s) {
      const u32 rows = laid_out_rows(kGeometry, task, s, laid_out);
      laid_out_ += is_gathered(rank, task.segments[s]) ? rows : 0;
      laid_out += rows;
    }
  }

  /// The index of row `row` of the tile among this rank's own rows; kNone: it is not gathered.
  static u32 find_place(const Rank<Machine>& rank, const Task& task, u32 row) {
    u32 place = kNone;
    u32 laid_out = 0;
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment segment = task.segments[s];
      if (is_gathered(rank, segment) && row - laid_out < segment.rows) {
        place = own_place(rank, task.local_expert, segment, row - laid_out);
      }
      laid_out += laid_out_rows(kGeometry, task, s, laid_out);
    }
    return place;
  }

  u32 piece_[kCopies];  // the pieces that this lane copies, counted through all rows; kNone: none
  const u8* from_;
  bool between_ = false;  // whether the rows lie between the products
  u32 place_;             // of this lane's first piece in a stage
  u32 half_ = 0;          // columns between the two halves of a narrow tile's stage, in bytes
  u32 some_ = 0;          // a bit for each group: whether some of its rows are gathered
  u32 all_ = 0;           // a bit for each group: whether all of its rows are gathered
  u32 laid_out_ = 0;
};

}  // namespace moeos::sm90
