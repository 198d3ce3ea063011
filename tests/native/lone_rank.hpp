// SPDX-License-Identifier: Apache-2.0
// What programs that step through one actor share: a small geometry, of which each sets what it is
// about, and a rank that is alone with it.
#pragma once

#include <vector>

#include "runtime/memory/rank.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/words/call.hpp"
#include "tests/native/expect.hpp"

constexpr moeos::u32 kTileRows = 128;
constexpr moeos::u32 kNarrowRows = 64;
constexpr moeos::u32 kParts = 4;        // of a wide tile, of either GEMM
constexpr moeos::u32 kNarrowParts = 8;  // of a narrow one, and halves of a wide one's second GEMM

inline moeos::Geometry small_geometry(moeos::u32 world, moeos::u32 experts, moeos::u32 max_tokens) {
  moeos::Geometry g{};
  g.world = world;
  g.experts = experts;
  g.top_k = 2;
  g.max_tokens = max_tokens;
  g.row_bytes = g.sent_bytes = g.returned_bytes = g.hidden_bytes = 16;
  g.row_map = moeos::RowMap::ragged;
  g.capacity = g.max_tokens;
  g.chunk_rows = 32;
  g.tile_rows = kTileRows;
  g.route_tokens = 64;
  g.route_slices = 1;
  g.product0_parts = g.product1_parts = kParts;
  g.narrow_rows = kNarrowRows;
  g.product0_narrow_parts = g.product1_narrow_parts = kNarrowParts;
  g.segment_align = 1;
  g.processors = 1;
  return g;
}

/// The only rank of a world, in a call of as many tokens as it can have.
struct LoneRank {
  static constexpr moeos::u32 kEpoch = 3;

  explicit LoneRank(const moeos::Geometry& of)
      : geometry(of),
        layout(geometry),
        os(geometry, memory.take(moeos::OsMemory::bytes(geometry))),
        heaps(1, memory.take(layout.bytes())),
        rank{moeos::twin::Machine(heaps.data(), 0, 1),
             layout,
             moeos::RankMemory(geometry, memory.take(moeos::RankMemory::bytes(geometry))),
             os,
             heaps[0],
             0,
             1'000'000'000},
        call{kEpoch, 0, geometry.max_tokens, 0} {}
  LoneRank(const LoneRank&) = delete;
  LoneRank& operator=(const LoneRank&) = delete;

  Memory memory;
  moeos::Geometry geometry;
  moeos::Layout layout;
  moeos::OsMemory os;
  std::vector<moeos::u8*> heaps;
  moeos::Rank<moeos::twin::Machine> rank;
  moeos::Call call;
};
