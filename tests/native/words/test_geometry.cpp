// SPDX-License-Identifier: Apache-2.0
// Bounds of Geometry: kMaxExactBoxes against all ways in which segments can fill a tile; what a
// Combine part holds, and blocks and parts of Route, against every call. And words of couriers'
// parts, which must say what they stand for.
//
// Build: g++ -std=c++20 -I. tests/native/words/test_geometry.cpp -o test_geometry
#include <algorithm>
#include <bit>
#include <cstdio>
#include <vector>

#include "runtime/memory/os_memory.hpp"
#include "runtime/words/courier_part.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/task.hpp"

namespace {

using namespace moeos;

constexpr u32 kTileRows = Geometry::kExactTileRows;

/// [rows]: the most powers of two that `segments` segments add up from which have so many rows
/// together; -1: they cannot have. A full tile's rows are one.
std::vector<int> most_boxes(u32 segments) {
  std::vector<int> most(kTileRows + 1, -1);
  most[0] = 0;
  for (u32 s = 0; s < segments; ++s) {
    std::vector<int> next(kTileRows + 1, -1);
    for (u32 before = 0; before < kTileRows; ++before) {
      for (u32 rows = 1; most[before] >= 0 && before + rows <= kTileRows; ++rows) {
        next[before + rows] = std::max(next[before + rows], most[before] + std::popcount(rows));
      }
    }
    most = next;
  }
  return most;
}

/// Whether no part of a call of up to `tokens` tokens has more than the largest call's part, for
/// which a slot has room, nor more than kCombinePairs pairs, but of one token.
bool combine_parts_fit(u32 top_k, u32 processors, u32 tokens) {
  Geometry geometry{};
  geometry.top_k = top_k;
  geometry.processors = processors;
  const u32 room = geometry.combine_tokens(tokens);
  bool fit = room * top_k <= std::max(Geometry::kCombinePairs, top_k);
  for (u32 called = 0; called <= tokens; ++called) {
    const u32 part = geometry.combine_tokens(called);
    fit = fit && part >= 1 && part <= room;
  }
  return fit;
}

/// Whether every call of up to `tokens` tokens has blocks and Route parts within their bounds,
/// every token a block in which it is, and every block parts that share its slices.
bool route_parts_fit(u32 slices, u32 processors, u32 tokens) {
  Geometry geometry{};
  geometry.max_tokens = tokens;
  geometry.route_tokens = 64;
  geometry.route_slices = slices;
  geometry.processors = processors;
  bool fit = true;
  for (u32 called = 0; called <= tokens; ++called) {
    const u32 blocks = geometry.route_blocks_of(called);
    const u32 parts = geometry.route_parts_of_block(called);
    const u32 each = geometry.route_slices_of_part(called);
    fit = fit && (blocks >= 1) == (called >= 1) && blocks <= geometry.route_blocks() &&
          parts >= 1 && each >= 1 && blocks * parts <= geometry.route_parts_max() &&
          parts * each >= slices && (parts - 1) * each < slices;
    const u32 of_block = geometry.route_tokens_of(called);
    for (u32 token = 0; token < called; token += 31) {
      const u32 block = geometry.route_block(called, token);
      fit = fit && block < blocks && block == token / of_block;
    }
  }
  return fit;
}

/// Whether the tokens of every call that spreads them, of up to `tokens`, are divided among parts
/// that have no more than they may, and of which each processor has one at most; and whether there
/// are such calls up to where a processor would have more.
bool spread_parts_fit(u32 each_most, u32 processors, u32 tokens) {
  Geometry geometry{};
  geometry.world = 2;
  geometry.experts = 8;
  geometry.top_k = 2;
  geometry.processors = processors;
  geometry.dispatch_tokens = each_most;
  bool fit = true;
  for (u32 called = 0; called <= tokens; ++called) {
    const u32 each = geometry.tokens_of_part(called);
    const u32 parts = geometry.token_parts(called);
    const bool dispatches_tokens = each_most > 0 && called <= each_most * processors;
    fit = fit && geometry.dispatches_tokens(called) == dispatches_tokens &&
          parts * each >= called && (parts == 0 || (parts - 1) * each < called) &&
          parts <= processors && (!dispatches_tokens || each <= each_most);
  }
  // Rows of calls that may take tokens once leave in the order in which tiles want them.
  geometry.dedup_rows = 10;
  return fit && geometry.dispatches_tokens(4) == (each_most * processors >= 4) &&
         !geometry.dispatches_tokens(5);
}

/// Whether calls are planned up front over direct links, and beside a network where order does not
/// matter, and whether as many tiles are cut in halves as leave each half a processor.
bool whole_plans_fit() {
  Geometry geometry{};
  geometry.world = 2;
  geometry.experts = 8;
  geometry.top_k = 2;
  geometry.tile_rows = 128;
  geometry.processors = 131;
  geometry.product0_parts = geometry.product1_parts = 16;
  geometry.product1_narrow_parts = 32;
  bool fit =
      !geometry.plans_up_front(true, 1) && !geometry.may_plan_up_front(0);  // not without leave
  geometry.up_front_rows = 64;
  geometry.remote = 1;  // beside a network: only where the order of tiles does not matter
  fit = fit && geometry.plans_up_front(true, 1000) && geometry.plans_up_front(false, 8) &&
        !geometry.plans_up_front(false, 9);
  // An expert has half as many rows, of both ranks, as each has tokens.
  fit = fit && geometry.may_plan_up_front(128) && geometry.may_plan_up_front(512) &&
        !geometry.may_plan_up_front(514);
  geometry.remote = 0;
  fit = fit && geometry.plans_up_front(false, 1000) && geometry.may_plan_up_front(8192);
  geometry.large_experts = 1;  // some tiles of each of the four
  fit = fit && geometry.plans_up_front(false, 32) && !geometry.plans_up_front(false, 33) &&
        geometry.may_plan_up_front(2048) && !geometry.may_plan_up_front(2050);
  geometry.world = 1;  // unless nobody else has any
  fit = fit && geometry.plans_up_front(false, 1000) && geometry.may_plan_up_front(8192);
  geometry.world = 2;
  for (u32 left = 0; left < 40; ++left) {
    const u32 cut = geometry.tiles_in_halves(left);
    const u32 whole = (left - cut) * 16;
    fit = fit && cut <= left && cut * 32 <= 131 && (cut == 0 || whole % 131 < 16);
  }
  geometry.product1_narrow_parts = 16;
  return fit && geometry.tiles_in_halves(3) == 0;
}

/// Whether rows of a tile, wherever it begins, lie side by side in a cell that is a ring, and those
/// of chunks that are not `ring_chunks()` apart share no place.
bool rings_hold_tiles(u32 ring_rows, u32 tile_rows) {
  Geometry geometry{};
  geometry.world = 3;
  geometry.experts = 6;
  geometry.top_k = 2;
  geometry.max_tokens = geometry.capacity = 1000;
  geometry.chunk_rows = 32;
  geometry.tile_rows = tile_rows;
  geometry.ring_rows = ring_rows;
  const u32 rows = geometry.cell_rows();
  const u32 places = geometry.ring_places();
  bool right = geometry.rings_cells() && places >= ring_rows && places % 32 == 0 &&
               geometry.cell_places() < rows && geometry.overflows(places + 1) &&
               !geometry.overflows(places) && !geometry.replaces_rows(geometry.ring_chunks() - 1) &&
               geometry.replaces_rows(geometry.ring_chunks());
  std::vector<u32> at(geometry.cell_places(), 0);
  for (u32 row = 0; row < rows; ++row) {
    at[geometry.place_of(row)] = row;
    if (geometry.lies_twice(row / geometry.chunk_rows)) {
      at[places + geometry.place_of(row)] = row;
    }
    for (u32 first = row - std::min(row, tile_rows - 1); right && first <= row; ++first) {
      right = at[geometry.place_of(first) + row - first] == row;
    }
  }
  geometry.world = 1;
  right = right && !geometry.rings_cells();
  geometry.world = 3;
  geometry.row_map = moeos::RowMap::capacity;
  return right && !geometry.rings_cells() && geometry.cell_places() == geometry.cell_rows();
}

/// Whether the words of all parts of a cell of `rows` rows, in chunks or in pieces, say which rows
/// of which peer's they are, in a world that has as many chunks as there may be.
bool words_say_their_rows(u32 rows) {
  Geometry geometry{};
  geometry.chunk_rows = 32;
  geometry.max_tokens = rows;
  geometry.top_k = 1;
  geometry.capacity = rows;
  geometry.world = std::min(SentChunk::kNumbers / ceil_div(rows, geometry.chunk_rows), 65'535U);
  geometry.experts = geometry.world;
  constexpr u32 kEpoch = 7;
  const auto says = [&](ReadyWord word, bool sends, u32 peer, u32 first, u32 part_rows) {
    CourierPart part = courier_part(geometry, ReadyWord(word.sealed()));
    part.end_with(rows);
    return word.epoch() == kEpoch && part.sends() == sends && part.peer == peer &&
           part.first == first && part.rows == std::min(part_rows, rows - first) &&
           part.cell_rows == rows && part.chunk(geometry) == first / geometry.chunk_rows;
  };
  bool right = true;
  for (const u32 peer : {0U, 1U, geometry.world - 1}) {
    for (const u32 part_rows : {geometry.chunk_rows, geometry.quarter_rows()}) {
      for (u32 first = 0; first < rows; first += part_rows) {
        right = right && says(dispatch_word(geometry, kEpoch, peer, first, part_rows), true, peer,
                              first, part_rows);
      }
    }
  }
  constexpr u32 kSource = ReadyWord::kParts - 1;
  for (u32 chunk = 0; chunk * geometry.chunk_rows < rows; ++chunk) {
    right = right && says(replicate_word(kEpoch, kSource, chunk), false, kSource,
                          chunk * geometry.chunk_rows, geometry.chunk_rows);
  }
  return right;
}

}  // namespace

int main() {
  for (const u32 rows : {1U, 7U, 8U, 9U, 31U, 32U, 33U, 100U, 4096U, 99'999U}) {
    if (!words_say_their_rows(rows)) {
      std::printf("a word of a cell of %u rows stands for other rows than it says\n", rows);
      return 1;
    }
  }
  for (const u32 ring_rows : {1U, 200U, 512U}) {
    for (const u32 tile_rows : {16U, 128U}) {
      if (!rings_hold_tiles(ring_rows, tile_rows)) {
        std::printf("a ring of %u rows does not hold tiles of %u\n", ring_rows, tile_rows);
        return 1;
      }
    }
  }
  if (!whole_plans_fit()) {
    std::printf("calls are planned up front, or tiles cut, where they should not be\n");
    return 1;
  }
  for (const u32 processors : {1U, 3U, 131U}) {
    for (u32 each = 0; each <= 16; ++each) {
      if (!spread_parts_fit(each, processors, 3000)) {
        std::printf("%u tokens a part, spread by %u processors, do not fit\n", each, processors);
        return 1;
      }
    }
  }
  for (const u32 processors : {1U, 2U, 16U, 65U, 131U}) {
    for (u32 slices = 1; slices <= 8; ++slices) {
      if (!route_parts_fit(slices, processors, 9000)) {
        std::printf("Route in %u slices on %u processors does not fit\n", slices, processors);
        return 1;
      }
    }
  }
  for (u32 top_k = 1; top_k <= 2 * Geometry::kCombinePairs; ++top_k) {
    for (const u32 processors : {1U, 3U, 131U}) {
      if (!combine_parts_fit(top_k, processors, 9000)) {
        std::printf("Combine parts of top-%u on %u processors do not fit\n", top_k, processors);
        return 1;
      }
    }
  }
  int most = 0;
  for (u32 others = 0; others < Geometry::kMaxExactSegments; ++others) {
    const std::vector<int> boxes = most_boxes(others);
    for (u32 before = 0; before < kTileRows; ++before) {
      for (u32 rows = 1; boxes[before] >= 0 && before + rows <= kTileRows; ++rows) {
        const u32 last = align_up(before + rows, Geometry::kSegmentAlign) - before;
        most = std::max(most, boxes[before] + std::popcount(last));
      }
    }
  }
  if (most != static_cast<int>(Geometry::kMaxExactBoxes)) {
    std::printf("segments of a tile add up from at most %d powers of two\n", most);
    return 1;
  }
  return 0;
}
