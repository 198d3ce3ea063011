// SPDX-License-Identifier: Apache-2.0
// The rows whose values before the activation a forward call keeps for its gradient call: each
// source's first rows in the order of sending.
//
// That order follows from the routing alone, so both calls find a row at the same index, however
// rows come or are packed into tiles. Must not depend on: the values written and read.
#pragma once

#include "kernels/shape.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/task.hpp"

namespace moeos::twin {

class SavedRows {
 public:
  SavedRows(const Rank<Machine>& rank, const LayerShape& shape, const Operands& operands)
      : rank_(rank),
        rows_(static_cast<u8*>(operands.saved)),
        of_source_(operands.saved_of_source),
        row_bytes_(shape.w1_rows() * size_of(operands.element)) {}

  /// Whether each row of a tile is saved.
  bool has_all(const Task& task) const {
    bool all = true;
    for (u32 s = 0; s < task.segment_count; ++s) {
      all = all && saved_of(task, task.segments[s]) == task.segments[s].rows;
    }
    return all;
  }

  /// Calls found(saved row, row of the tile) for each row of a tile that is saved.
  template <typename Found>
  void for_each(const Task& task, Found found) const {
    u32 first = 0;
    for (u32 s = 0; of_source_ != 0 && s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      const u32 rows = saved_of(task, segment);
      for (u32 i = 0; i < rows; ++i) {
        const u64 number = u64{segment.source} * of_source_ +
                           first_in_order(rank_, task.local_expert, segment) + i;
        found(rows_ + number * row_bytes_, first + i);
      }
      first += laid_out_rows(rank_.geometry(), task, s, first);
    }
  }

 private:
  /// How many of a segment's rows, its first ones, are saved.
  u32 saved_of(const Task& task, const Segment& segment) const {
    if (of_source_ == 0) {
      return 0;
    }
    const u32 first = first_in_order(rank_, task.local_expert, segment);
    return minimum(u32{segment.rows}, maximum(of_source_, first) - first);
  }

  const Rank<Machine>& rank_;
  u8* rows_;
  u32 of_source_;
  std::size_t row_bytes_;
};

}  // namespace moeos::twin
