// SPDX-License-Identifier: Apache-2.0
// Boxes of matrices, which the load warp brings into the stages: one lane for each box.
//
// Must not depend on: which matrices a part has; what is made of them.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

/// A box that one lane loads in each step of a part; without a map: none.
///
/// Each lane has its own box and keeps it for the whole part. What is left to do in a step takes
/// some ten instructions a box; finding the boxes again in each step would take longer than the
/// step's loads where a tile has many small segments: one lane needed 150 cycles a box, and 1.7 us
/// a step of a dozen boxes.
struct Box {
  const TensorMap* map = nullptr;
  bool of_weights = false;
  u32 matrix = 0;        // of transposed weights
  bool ordered = false;  // whether its rows have an order of their own (load_ordered)
  u32 row = 0;
  u32 column = 0;  // in the first step
  u32 place = 0;   // of its destination, in bytes from the stage's beginning
  CachePolicy policy = CachePolicy::normal;  // of weights
};
/// Where a box begins in its matrix, in one of the steps.
struct BoxPlace {
  u32 row;
  u32 column;
};

// Each of a step's boxes has a lane, and a narrow tile's steps are two in one. A segment of 8n rows
// is cut into one box for each bit of n, at most (n + 1) / 2.
constexpr u32 padded_boxes(u32 rows) {
  return (rows / Geometry::kSegmentAlign + Geometry::kMaxSegments) / 2;
}
/// Box `index` of `rows` rows, the first of which is row `first` of the matrix and lies at `place`.
/// There is one box for each bit of rows, the smallest first. (Where a box begins within eight
/// rows, TMA still swizzles by the address in shared memory, as wgmma reads.)
template <u32 kSizes>
inline void cut_rows(const TensorMap (&maps)[kSizes], u32 first, u32 rows, u32 place, u32 index,
                     Box& box) {
  u32 bits = rows / box_height(kSizes, 0);
  for (; index > 0; --index) {
    bits &= bits - 1;
  }
  const u32 size = Machine::first_lane(bits);
  const u32 before = rows & (box_height(kSizes, size) - 1);
  box.map = &maps[size];
  box.row = first + before;
  box.place = place + (MOEOS_PLANTED(boxes_share_a_place) ? 0 : before * kSwizzleBytes);
}

/// Steps `first` to `end` - 1 of a part's `all` steps.
struct Steps {
  u32 first;
  u32 end;
  u32 all;
};

/// The copies into a stage in addition to boxes: none.
struct NoCopies {
  static constexpr bool any() { return false; }
  void copy(u32, Stage&, Barrier&) const {}
};

/// The load warp: fills the stages of some steps with a part's operands, `bytes` bytes in each. One
/// lane waits; each loads its box, from row and column place_at(step) on. Copies, if there are any,
/// begin after the boxes, by all lanes. The next part is claimed on the way.
template <class PlaceAt, class Copies = NoCopies>
inline void fill_stages(const Steps& steps, u32 bytes, const Box& box, Loader& loader,
                        PlaceAt place_at, const Copies& copies = {}) {
  for (u32 step = steps.first; step < steps.end; ++step, loader.advance()) {
    if (Machine::lane() == 0) {
      if (steps.all - step == minimum(steps.all, kClaimSteps)) {
        loader.let_claim();
      }
      loader.wait();
      if (copies.any()) {
        loader.full().expect(bytes);
      } else {
        loader.full().arrive_expecting(bytes);
      }
    }
    __syncwarp();
    // Beyond the matrix: zeros.
    u8* to = reinterpret_cast<u8*>(&loader.stage()) + box.place;
    const auto [row, column] = place_at(step);
    if (box.of_weights) {
      if constexpr (kTransposed) {
        if (kGradients && box.ordered) {
          load_ordered(*box.map, to, loader.full(), box.matrix, row, column);
        } else {
          load_transposed(*box.map, to, loader.full(), box.matrix, row, column, box.policy);
        }
      } else {
        load_weights(*box.map, to, loader.full(), row, column, box.policy);
      }
    } else if (box.map != nullptr) {
      load_box(*box.map, to, loader.full(), row, column);
    }
    if (copies.any()) {
      copies.copy(step, loader.stage(), loader.full());
      __syncwarp();
      if (Machine::lane() == 0) {  // after all lanes' arrivals, which this one keeps pending
        loader.full().arrive();
      }
    }
  }
}
/// Fills the stages of all steps of a part.
template <class PlaceAt, class Copies = NoCopies>
inline void fill_stages(u32 steps, u32 bytes, const Box& box, Loader& loader, PlaceAt place_at,
                        const Copies& copies = {}) {
  fill_stages(Steps{0, steps, steps}, bytes, box, loader, place_at, copies);
}

}  // namespace moeos::sm90
