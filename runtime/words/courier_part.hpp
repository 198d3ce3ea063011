// SPDX-License-Identifier: Apache-2.0
// A part of Dispatch or of Replicate, as couriers take it (courier.hpp), and the words of their
// lists.
//
// A word is complete, so there is no descriptor. Must not depend on: which rows go; the courier
// that takes a part.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/bounds.hpp"
#include "runtime/words/dimensions.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// The word of a part of Dispatch, `rows` rows for `peer` from row `first` on in the order of
/// sending: a chunk, a quarter of one, or the end of either. It says which of all peers' quarters
/// comes first in it, and whether it is a whole chunk.
constexpr ReadyWord dispatch_word(const Bounds& bounds, u32 epoch, u32 peer, u32 first, u32 rows) {
  const u32 quarter = peer * bounds.quarters_of_cell() + first / bounds.quarter_rows();
  const u32 full = rows == bounds.chunk_rows ? 1 : 0;
  return ReadyWord::of_number(epoch, TaskKind::dispatch, quarter * 2 + full);
}

/// The word of a chunk of which `source` has not sent all rows.
constexpr ReadyWord replicate_word(u32 epoch, u32 source, u32 chunk) {
  return ReadyWord(epoch, TaskKind::replicate, chunk, source);
}

/// What a courier does at a time: rows of one chunk, in the order of sending from one rank to
/// another.
struct CourierPart {
  TaskKind kind;  // dispatch: the rows go to the peer; replicate: they have come from it, except
                  // those whose tokens had come before
  u32 peer;
  u32 first;
  u32 rows;
  u32 cell_rows;  // rows that this rank sends there, or gets from there, in all

  /// Ends the part at the last row of a cell of `all` rows.
  constexpr void end_with(u32 all) {
    cell_rows = all;
    rows = minimum(rows, all - first);
  }
  constexpr bool sends() const { return kind == TaskKind::dispatch; }
  constexpr u32 chunk(const Dimensions& dimensions) const { return first / dimensions.chunk_rows; }
};
/// The part that a word stands for, as if the cell had rows without end.
constexpr CourierPart courier_part(const Bounds& bounds, ReadyWord word) {
  if (word.kind() == TaskKind::replicate) {
    return {word.kind(), word.part(), word.task() * bounds.chunk_rows, bounds.chunk_rows, 0};
  }
  const u32 quarter = word.number() / 2;
  const bool full = word.number() % 2 != 0 || MOEOS_PLANTED(quarters_count_as_chunks);
  return {word.kind(), quarter / bounds.quarters_of_cell(),
          quarter % bounds.quarters_of_cell() * bounds.quarter_rows(),
          full ? bounds.chunk_rows : bounds.quarter_rows(), 0};
}

}  // namespace moeos
