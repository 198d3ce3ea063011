// One row moved by one warp: a token's row to a cell, or its weighted results to the output.
//
// Satisfies runtime/row_tasks.hpp's RowKernels. May not know: flags, queues.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "runtime/routing_map.hpp"

namespace moeos::sm90 {

class Rows {
 public:
  Rows(const Rank<Machine>& rank, const Call& call, const RankArguments& arguments)
      : rank_(rank), arguments_(arguments), map_(rank.geometry(), rank.memory, call) {}

  void copy_row(u32 token, u8* destination) {
    const auto* from =
        reinterpret_cast<const uint4*>(arguments_.x_rows + u64{token} * kGeometry.row_bytes);
    auto* to = reinterpret_cast<uint4*>(destination);
    constexpr u32 kVectors = kGeometry.row_bytes / 16;
#pragma unroll 8
    for (u32 i = Machine::lane(); i < kVectors; i += Machine::kLanes) {
      to[i] = from[i];
    }
  }

  /// The token's rows, weighted and summed in the order j = 0 ... k-1 in fp32 (thesis eq. 5.2),
  /// rounded once.
  void combine(u32 token) {
    const u32 lane = Machine::lane();
    u64 row = 0;
    float weight = 0.0F;
    static_assert(kGeometry.top_k <= Machine::kLanes, "a lane looks up one pair");
    if (lane < kGeometry.top_k) {
      const u32 pair = token * kGeometry.top_k + lane;
      if (map_.sent(pair)) {
        const RoutingMap::Place place = map_.place_of(pair);
        const u32 number = rank_.layout.row(place.local_expert, place.slot, place.row - place.slot);
        row = reinterpret_cast<u64>(rank_.heap + rank_.layout.cell_row(place.peer, Round::combine,
                                                                       Buffer::arrival, number));
        weight = rank_.memory.pair_weight[pair];
      }
    }
    constexpr u32 kVectors = kGeometry.row_bytes / 16;
    u8* out = arguments_.out + u64{token} * kGeometry.row_bytes;
#pragma unroll 2
    for (u32 first = 0; first < kVectors; first += Machine::kLanes) {
      const u32 vector = first + lane;
      float sum[8] = {};
      uint4 values[kGeometry.top_k];  // loaded together: one round trip for all rows
#pragma unroll
      for (u32 j = 0; j < kGeometry.top_k; ++j) {
        const u64 from = Machine::broadcast(row, j);
        values[j] = from != 0 && vector < kVectors ? reinterpret_cast<const uint4*>(from)[vector]
                                                   : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (u32 j = 0; j < kGeometry.top_k; ++j) {
        const float scale = Machine::broadcast(weight, j);
        if (Machine::broadcast(row, j) != 0) {
          const u32 pairs[4] = {values[j].x, values[j].y, values[j].z, values[j].w};
#pragma unroll
          for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] += scale * Element::low(pairs[i]);
            sum[2 * i + 1] += scale * Element::high(pairs[i]);
          }
        }
      }
      if (vector < kVectors) {
        reinterpret_cast<uint4*>(out)[vector] =
            make_uint4(Element::pack(sum[0], sum[1]), Element::pack(sum[2], sum[3]),
                       Element::pack(sum[4], sum[5]), Element::pack(sum[6], sum[7]));
      }
    }
  }

 private:
  const Rank<Machine>& rank_;
  const RankArguments& arguments_;
  RoutingMap map_;
};

}  // namespace moeos::sm90
