// SPDX-License-Identifier: Apache-2.0
// The rows whose values before the activation a forward call saves for its gradient call: for each
// source the first ones in the order of sending.
//
// That order follows from the routing alone, so both calls find a row at the same index, however
// rows are packed into tiles. Kernels without kSaves save nothing. Must not depend on: the values
// stored and loaded.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "runtime/rows/packet.hpp"

namespace moeos::sm90 {

/// A gated row has its gate values, then its up values.
inline constexpr u32 kSavedRowBytes = kShape.w1_rows() * 2;
static_assert(!kSaves || (!kCoded && kShape.intermediate % 8 == 0));

inline const SavingArguments& of_saving(const RankArguments& arguments) {
  return static_cast<const SavingArguments&>(arguments);
}

/// The number of a segment's first row among its source's, in the order of sending.
inline u32 first_sent(const RankArguments& arguments, const Task& task, const Segment& segment) {
  u32 first = segment.first_row;
  if constexpr (kGeometry.row_map != RowMap::ragged) {
    first = first_in_order(rank_of(arguments, nullptr), task.local_expert, segment);
  }
  return first;
}

/// Whether each row of a tile is saved.
inline bool saves_all(const RankArguments& arguments, const Task& task) {
  bool all = kSaves;
  if constexpr (kSaves) {
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      const u32 end = first_sent(arguments, task, segment) + segment.rows;
      all = all && end <= of_saving(arguments).saved_of_source;
    }
  }
  return all;
}

/// Where row `number` of a source is saved; null: it is not.
inline u8* saved_place(const RankArguments& given, u32 source, u32 number) {
  const SavingArguments& arguments = of_saving(given);
  const u64 place = u64{source} * arguments.saved_of_source + number;
  return number < arguments.saved_of_source ? arguments.saved + place * kSavedRowBytes : nullptr;
}
/// Where a row of a tile is saved; null: it is not saved, or is padding.
inline u8* saved_row(const RankArguments& arguments, const Task& task, u32 row) {
  u8* found = nullptr;
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment& segment = task.segments[s];
    if (row >= first && row < first + segment.rows) {
      found = saved_place(arguments, segment.source,
                          first_sent(arguments, task, segment) + row - first);
    }
    first += laid_out_rows(kGeometry, task, s, first);
  }
  return found;
}

}  // namespace moeos::sm90
