// What a launch is told: addresses and tensor maps of each rank. host/engines/cuda.py packs the
// same bytes.
#pragma once

#include "kernels/sm90/config.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/base.hpp"

namespace moeos::sm90 {

/// Heights of the boxes that rows are loaded in: a segment is cut into as few as possible.
inline constexpr u32 kBoxRows[] = {128, 32, 8};
inline constexpr u32 kBoxes = 3;

struct RankArguments {
  TensorMap x;                     // [S, H], box 64 x 64
  TensorMap gate;                  // [E, H], box kRouteColumns x 64
  TensorMap cells[kBoxes];         // [rows of all cells, H]
  TensorMap w1;                    // [X * 2I or I, H], box 128 x 64
  TensorMap w2;                    // [X * H, I], box 128 x 64
  TensorMap intermediate[kBoxes];  // [rows, I]
  u8* heap;
  u8* memory;
  u8* const* peers;
  const u8* x_rows;
  const float* selection_bias;  // [E] or null
  const i32* topk_ids;          // routing given by the caller, or null
  const float* topk_weights;
  const u8* b1;
  const u8* b2;
  u8* intermediate_rows;
  u8* out;
  u64 deadline_ns;
  u32 rank;
  u32 tokens;      // S
  u32 pair_limit;  // rows that one expert takes from this rank in this call
  u32 reserved;
};

struct Arguments {
  RankArguments ranks[kVirtualRanks];
};

}  // namespace moeos::sm90
