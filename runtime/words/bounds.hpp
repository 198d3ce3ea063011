// SPDX-License-Identifier: Apache-2.0
// How large each buffer of the device OS is: rows, the places that they use in turn, words, bytes.
//
// All buffers are sized from these bounds, so an overflow anywhere is a broken invariant, never a
// matter of input. Must not depend on: what a call of some number of tokens does (geometry.hpp),
// element types, addresses.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/dimensions.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

struct Bounds : Dimensions {
  // --- Cells: the rows that one source sends ---

  /// Rows of one cell, as they are numbered.
  constexpr u32 cell_rows() const {
    const u32 all_experts_full = local_experts() * capacity;
    return row_map == RowMap::capacity ? all_experts_full
                                       : minimum(max_tokens * rows_of_token(), all_experts_full);
  }
  /// Rows that can ever arrive in one cell in one call, whatever the row map.
  constexpr u32 cell_rows_used() const {
    return minimum(max_tokens * rows_of_token(), local_experts() * capacity);
  }
  constexpr u32 chunks() const { return ceil_div(cell_rows_used(), chunk_rows); }
  /// The most chunks that a call sends to all ranks: each rank gets at most one that is not full.
  constexpr u32 chunks_sent_max() const {
    return minimum(world * chunks(), pairs() / chunk_rows + world);
  }
  constexpr u32 quarters_of_cell() const { return chunks() * quarters_of_chunk(); }
  constexpr u32 dispatch_parts_max() const { return world * quarters_of_cell(); }
  constexpr u32 rows_received_max() const { return world * cell_rows_used(); }

  // --- Cells as rings (docs/memory.md) ---

  /// Whether a cell has places for fewer rows than a source may send. A rank alone has no such
  /// cell, and neither has the thesis' layout.
  constexpr bool rings_cells() const {
    return ring_rows != 0 && world > 1 && row_map == RowMap::ragged &&
           ring_places() + ring_tail() < cell_rows();
  }
  /// Places that a cell's rows use in turn, in whole chunks: row n has place n % ring_places().
  /// They hold more than the rows of a tile that is not full and of a chunk, so that these never
  /// fill the ring.
  constexpr u32 ring_places() const {
    return align_up(maximum(ring_rows, tile_rows + chunk_rows), chunk_rows);
  }
  /// Places after the ring. A tile's rows lie side by side, so a tile that begins before the ring's
  /// end goes on here: from the second turn on, a turn's first rows lie here as well.
  constexpr u32 ring_tail() const { return align_up(tile_rows, chunk_rows); }
  constexpr u32 ring_chunks() const { return ring_places() / chunk_rows; }
  /// Places of one cell.
  constexpr u32 cell_places() const {
    return rings_cells() ? ring_places() + ring_tail() : cell_rows();
  }
  constexpr u32 place_of(u32 row) const { return rings_cells() ? row % ring_places() : row; }
  /// Whether a source that sends `rows` rows to a rank uses places again.
  constexpr bool overflows(u32 rows) const { return rings_cells() && rows > ring_places(); }
  /// Whether a chunk's rows take the places of an earlier chunk's.
  constexpr bool replaces_rows(u32 chunk) const { return rings_cells() && chunk >= ring_chunks(); }
  /// Whether they also lie after the ring.
  constexpr bool lies_twice(u32 chunk) const {
    return replaces_rows(chunk) && place_of(chunk * chunk_rows) < ring_tail() &&
           !MOEOS_PLANTED(tails_stay_old);
  }

  // --- Results, and sums of slices ---

  /// The most rows of results that come back to a rank in one call: those of its pairs, side by
  /// side; in the thesis' layout a cell from each rank that computes them.
  constexpr u32 result_rows() const {
    const u32 of_cells = world * cell_rows();
    return packs_results() ? minimum(pairs(), of_cells) : of_cells;
  }
  /// Results of shared experts, one a token. They lie after all others, as x does.
  constexpr u32 shared_results() const { return shares() ? max_tokens : 0; }
  constexpr u32 staged_results() const { return stages_apart() ? world * cell_places() : 0; }

  /// The most groups of one owner: groups grow by a token whenever kSumGroups of them are full.
  constexpr u32 sum_groups_most() const {
    const u32 owned = sliced() ? tokens_owned_most(max_tokens) : 0;
    return maximum(minimum(owned, 2 * kSumGroups), ceil_div(owned, sum_group_most()));
  }
  /// Groups of all owners.
  constexpr u32 sum_groups_all() const { return sliced() ? slices * sum_groups_most() : 0; }
  /// The most rows of partial sums that a rank gets. Where only owners add up, another rank may
  /// already make its next call meanwhile, so the rows of two calls have room.
  constexpr u32 partial_rows() const { return sliced() ? partial_rounds() * owned_rows() : 0; }
  constexpr u32 partial_rounds() const { return sums_everywhere != 0 ? 1 : 2; }
  /// Rows of sums that owners send here.
  constexpr u32 total_rows() const { return sliced() && sums_everywhere != 0 ? owned_rows() : 0; }

  // --- Remote peers (sender.hpp) ---

  /// A window that keeps a link of 50 GB/s busy for 20 us, the time of an echo. A receiver has room
  /// for one from each peer.
  static constexpr u32 kWindowBytes = 1U << 20;
  /// The most rows on their way to a remote peer. What is sent at once always fits.
  constexpr u32 window() const {
    const u32 chunk = rings_cells() ? 2 * chunk_rows : chunk_rows;  // which may be put twice
    return maximum(window_rows, maximum(chunk, tile_rows));
  }
  /// Requests to one remote peer in one call: its chunks, and the segments of tiles that it owns.
  /// Each segment has a row, and each tile at most kMaxSegments of them.
  constexpr u32 outbox_words() const {
    const u64 segments = minimum(u64{cell_rows_used()}, u64{tiles_max()} * kMaxSegments);
    return remote != 0 ? chunks() + static_cast<u32>(segments) : 0;
  }

  // --- Tokens that are sent once (landings_subscriber.hpp) ---

  /// Rows of a source for which it can say where they come from, and chunks that can be made here.
  constexpr u32 origins() const {
    return deduplicates_any() ? minimum(cell_rows_used(), cell_places()) : 0;
  }
  constexpr u32 replications_max() const { return deduplicates_any() ? world * chunks() : 0; }

  // --- Tiles (tile_plan.hpp) ---

  /// The most parts of both products of a tile: a wide tile's second product may have narrow ones.
  constexpr u32 tile_parts_max() const {
    return maximum(product0_parts, product0_narrow_parts) +
           maximum(product1_parts, product1_narrow_parts);
  }
  /// The most tiles that one expert's merged remainders fill. Each source's remainder is below a
  /// tile, so padded they fill `world` tiles; a tile closes early when it has
  /// max_segments_of(false) segments; one tile is left over.
  constexpr u32 remainder_tiles() const {
    return world + ceil_div(world, max_segments_of(false)) + 1;
  }
  /// Tiles that may be packed early because processors idle; beyond it the plan waits for whole
  /// remainders.
  constexpr u32 early_tiles() const {
    return maximum(64U, 2 * local_experts()) + remainder_tiles();
  }
  /// Full single-source tiles, remainders, early tiles. A tile has a row, so there are never more
  /// tiles than rows.
  constexpr u32 tiles_max() const {
    return minimum(rows_received_max(), rows_received_max() / tile_rows +
                                            local_experts() * remainder_tiles() + early_tiles());
  }
  /// Rows of all tiles of a call, with the padding of each segment.
  constexpr u32 tiled_rows_max() const {
    const u64 by_tiles = u64{tiles_max()} * tile_rows;
    const u64 by_rows = u64{rows_received_max()} * kSegmentAlign;
    return static_cast<u32>(minimum(by_tiles, by_rows));
  }

  // --- Rows between the products ---

  /// Rows that have a place at a time where places are used again: at least the remainders of one
  /// expert's sources, which are packed at once.
  constexpr u32 pool_rows() const {
    return align_up(maximum(between_rows, world * tile_rows), kSegmentAlign);
  }
  /// Whether places are used again, since a call may have more rows. They are not where processors
  /// find tiles themselves.
  constexpr bool reuses_places() const {
    return between_rows != 0 && !plans_itself() && !between_by_pairs() &&
           u64{pool_rows()} + tile_rows < tiled_rows_max();
  }
  /// Rows of the buffer. A tile that begins at the end of the pool ends after it.
  constexpr u32 intermediate_rows_max() const {
    if (between_by_pairs()) {
      return pairs();
    }
    return reuses_places() ? pool_rows() + tile_rows : tiled_rows_max();
  }
  /// Bytes for tokens between the two products of shared experts, a whole number of half tiles.
  constexpr u64 shared_between_bytes() const {
    return u64{align_up(max_tokens, maximum(kSegmentAlign, tile_rows / 2))} * shared_bytes;
  }
  /// Bytes between any two products: rows first, then tokens.
  constexpr u64 between_bytes() const { return shared_between_at() + shared_between_bytes(); }
  constexpr u64 shared_between_at() const {
    return align_up(u64{intermediate_rows_max()} * hidden_bytes, u64{kCacheLine});
  }

  // --- Blocks of Route, and the ready ring ---

  /// Blocks, and parts of all blocks, that a call may have. Where blocks have several parts there
  /// are never more than one a processor and one a block.
  constexpr u32 route_blocks() const {
    const u32 halves = minimum(ceil_div(max_tokens, half_block()), processors);
    return maximum(maximum(1U, ceil_div(max_tokens, route_tokens)), halves);
  }
  constexpr u32 route_parts_max() const {
    return minimum(route_blocks() * route_slices, route_blocks() + processors);
  }
  constexpr u32 shared_parts_max() const {
    return maximum(shared_parts(max_tokens), shared_parts(minimum(max_tokens, narrow_rows)));
  }
  /// The most (descriptor, part) words that the ready ring holds in one call.
  constexpr u64 parts_max() const {
    return u64{route_parts_max()} + u64{shared_parts_max()} + u64{tiles_max()} * tile_parts_max() +
           u64{max_tokens} + route_blocks() + sum_groups_all();
  }

 private:
  /// As many rows for each slice as it may own tokens.
  constexpr u32 owned_rows() const { return slices * tokens_owned_most(max_tokens); }
};

}  // namespace moeos
