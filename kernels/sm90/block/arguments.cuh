// SPDX-License-Identifier: Apache-2.0
// The arguments of a launch: addresses and tensor maps of each rank, which
// host/moeos/engines/cuda/arguments.py packs in the same bytes; and the Rank that a block's roles
// make of them.
#pragma once

#include "kernels/sm90/block/config.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/watchdog.hpp"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// Rows are loaded in boxes whose heights are powers of two, up to that of a tile: a segment's rows
/// in one box for each bit of their number.
constexpr u32 boxes_from(u32 height) {
  return height == kTileRows ? 1 : 1 + boxes_from(2 * height);
}
constexpr u32 box_height(u32 boxes, u32 index) { return kTileRows >> (boxes - 1 - index); }
inline constexpr u32 kCellBoxes = boxes_from(1);
inline constexpr u32 kIntermediateBoxes = boxes_from(Geometry::kSegmentAlign);
/// Rows of a box of weights. Their order there puts a thread's accumulators next to each other in
/// its rows of the result (load_weights in tma.cuh, ordered_column in accumulators.cuh). A box of
/// more than one group of rows reads whole groups, so only one group at a time may reach beyond a
/// matrix; layers none of whose parts do have larger boxes. Where weights are transposed, a box has
/// as many columns, of kTileDepth rows that are the depth.
inline constexpr u32 kWeightBoxRows = kTransposed   ? kSwizzleBytes / 2
                                      : kWholeParts ? minimum(128U, product0_columns(kTileColumns))
                                                    : kOrderedRows;
inline constexpr u32 kNarrowBoxRows = minimum(kWeightBoxRows, product0_columns(kNarrowColumns));
static_assert(product0_columns(kTileColumns) % kWeightBoxRows == 0 &&
              kNarrowColumns % kWeightBoxRows == 0 &&
              product0_columns(kNarrowColumns) % kNarrowBoxRows == 0);

/// Element types of the weights that a caller may give with its routing.
enum class WeightType : u32 { float32 = 0, bfloat16 = 1, float16 = 2 };

// Quantized elements are bytes. A box has 128 bytes of each row, but kCodeBytes of weights that are
// dequantized.

/// The weights of MLPs with the same number of values between their products. With kUpMaps w1 is
/// [MLPs * values, H]. With kTransposed: [MLPs, depth, columns], box 1 x kTileDepth x
/// kWeightBoxRows.
struct WeightMaps {
  TensorMap w1;         // [MLPs * 2 values, or values, H], box of kWeightBoxRows
  TensorMap w1_narrow;  // w1, box of kNarrowBoxRows
  TensorMap w2;         // [MLPs * H, values], box of kWeightBoxRows
  TensorMap w1_deep;    // w1_narrow and w2 where weights are dequantized in registers: boxes of
                        // kDeepDepth times as many columns
  TensorMap w2_deep;
};

struct ForwardMaps {
  TensorMap x;                                 // [rows, H], box 64 x 64
  TensorMap x_row;                             // x, box 1 x 64
  TensorMap gate;                              // [E, H], box kRouteColumns x kGateBoxColumns
  TensorMap cells[kCellBoxes];                 // [rows of all cells, H], codes without scales
  WeightMaps experts;                          // X of them, with I values each
  TensorMap intermediate[kIntermediateBoxes];  // [rows, I]
};
/// Maps of shared experts, or of up rows: no layer has both.
struct SharedMaps {
  union {
    WeightMaps shared;  // n of them, with Is values each
    WeightMaps ups;     // as `experts`, with up rows instead of gate rows
  };
  TensorMap shared_gate;     // [1, H], box kSharedGateRows x 64
  TensorMap shared_between;  // [tokens, n * Is], box kTokenBoxRows x 64
};
struct TensorMaps : ForwardMaps, SharedMaps {};

struct RankArguments : TensorMaps {
  // Of the workspace, for layers of this shape:
  u8* heap;
  MemoryParts<u8*> memory;
  u8* const* peers;  // [2][P]: heaps that this GPU addresses, or null; then the targets of puts. In
                     // this rank's numbering of peers
  u8* intermediate_rows;
  HeapPlace place;
  // Of the layer:
  u32 rank;               // in the whole world (Rank::everywhere)
  Failure* host_failure;  // in the host's memory: see host_failure.cuh
  u64 deadline_ns;
  u64 code;  // address and size of the kernel's instructions, or 0 and 0
  u64 code_bytes;
  // Of its parameters:
  const float* selection_bias;  // [R] or null, as router_bias and expert_scale
  const float* router_bias;
  const float* expert_scale;
  const u8* b1;
  const u8* b2;
  const u8* w1_scale;  // scales of stored weights: kernels/element_formats.hpp
  const u8* w2_scale;
  const float* w1_scale_2;
  const float* w2_scale_2;
  const u8* shared_w1_scale;  // of the shared experts' weights
  const u8* shared_w2_scale;
  const float* shared_w1_scale_2;
  const float* shared_w2_scale_2;
  // Of the call:
  const u8* x_rows;
  u8* out;
  const void* topk_ids;  // routing given by the caller, [rows, k], or null
  const void* topk_weights;
  const i32* token_count;  // S, or null: all rows are tokens
  const void* x_scale;     // scales of quantized x, [rows, H / kTokenGroup], or null
  u32 rows;                // of x and out
  u32 ids_wide;            // 1: topk_ids are 64 bits wide, 0: 32
  WeightType weight_type;
  u32 any_ids;              // 1: an id that is no expert's is an unused slot, 0: only -1 is
  u32 identity;             // Call::identity
  u32 x_scale_is_exponent;  // 1: scales are bytes (e8m0), 0: fp32
  u32 leaves_partials;      // Call::leaves_partials
};

/// The additional arguments of a forward call that saves, and of every gradient call.
struct SavingArguments : RankArguments {
  alignas(TensorMap) u8* saved;  // [P * saved_of_source, w1 rows]
  u32 saved_of_source;           // rows of each source; 0: none
};

/// A rank's number among the ranks with which it shares out experts.
inline u32 holder_of(const RankArguments& mine) {
  return kSliced ? mine.rank / kGeometry.slices % kGeometry.world : mine.rank;  // of one, 0
}

/// The rank that a block works for. Each thread and each role has its own: so every address in it
/// is a constant or in a register, and no register is kept from one role to the next. `os`: an OS
/// block's memory. `memory`: the rank's.
inline Rank<Machine> rank_of(const RankArguments& mine, u8* os, const MemoryParts<u8*>& memory) {
  return {Machine(mine.peers),
          Layout(kGeometry, mine.place),
          RankMemory(kGeometry, memory),
          OsMemory(kGeometry, os),
          mine.heap,
          holder_of(mine),
          mine.deadline_ns,
          kSliced ? mine.rank % kGeometry.slices : 0};
}
inline RankMemory rank_memory(const RankArguments& mine) {
  return RankMemory(kGeometry, mine.memory);
}
inline Rank<Machine> rank_of(const RankArguments& mine, u8* os) {
  return rank_of(mine, os, mine.memory);
}

/// Prefetches the descriptors of kMaps consecutive maps; otherwise a block's first load of each
/// would wait. One warp.
template <u32 kMaps>
inline void prefetch_maps(const TensorMap* maps) {
  static_assert(kMaps <= Machine::kLanes);
  if (Machine::lane() < kMaps) {
    prefetch(maps[Machine::lane()]);
  }
}

template <bool kSaving>
struct ForwardArguments {
  using Of = RankArguments;
};
template <>
struct ForwardArguments<true> {
  using Of = SavingArguments;
};
struct Arguments {
  ForwardArguments<kSaves>::Of ranks[kVirtualRanks];
};

/// The rank, for one look for work: its tables lie at an address that is opaque to the compiler.
/// Otherwise the compiler would compute in advance all that depends on it, and has too few
/// registers to keep that.
inline Rank<Machine> rank_of_look(const RankArguments& arguments) {
  MemoryParts<u8*> memory = arguments.memory;
  asm volatile("" : "+l"(memory.tables));
  return rank_of(arguments, nullptr, memory);
}

/// The rank, for one look at where results go. In a gradient call, where several ranks share a
/// launch, and in a large world, the address of its shape's words is opaque to the compiler:
/// otherwise the compiler computes it before the loop over parts, and kernels of eight ranks spill
/// registers.
inline Rank<Machine> rank_of_results(const RankArguments& arguments, const Rank<Machine>& rank) {
  Rank<Machine> found = rank;
  if constexpr (kGradients || kVirtualRanks > 1 || kGeometry.world > 4) {
    HeapPlace place = arguments.place;
    asm volatile("" : "+l"(place.words_at));
    found.layout = Layout(kGeometry, place);
  }
  return found;
}

/// A block's arguments, for the loads of one part: opaque likewise, where several ranks have
/// arguments.
inline const RankArguments& arguments_of_look(const RankArguments& arguments) {
  return kVirtualRanks == 1 ? arguments : (&arguments)[Machine::opaque(0)];
}

}  // namespace moeos::sm90
