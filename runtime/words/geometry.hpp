// SPDX-License-Identifier: Apache-2.0
// The sizes that are fixed when a layer is built, and the bounds that follow from them.
//
// Every rank of a world has the same Geometry (the host compares them at construction). All buffers
// of the device OS are sized from the bounds here, so an overflow anywhere is a broken invariant,
// never a matter of input. The sizes themselves are in geometry.def. May not know: element types,
// activations, addresses.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/planted.hpp"

namespace moeos {

/// Where a pair's row lies in its cell (docs/memory.md).
enum class RowMap : u32 {
  ragged,    ///< row = start[expert] + slot: rows packed, dropless worst case fits
  capacity,  ///< row = expert * capacity + slot: the thesis' layout, fixed rows for each expert
};

/// Warps of the OS block that count returned rows, at most.
inline constexpr u32 kReturnsSubscribersMax = 4;

struct Geometry {
#define FIELD(type, name) type name;
#include "runtime/words/geometry.def"

  /// X: the most experts of a rank. By torch.chunk's rule the first ranks have X each, then one has
  /// what is left, and those behind it have none. All that is kept or told of a rank's experts has
  /// X places, on every rank. A place without an expert gets no row: each source tells a count of
  /// 0. So nobody who reads counts asks how many experts a rank has.
  constexpr u32 local_experts() const { return ceil_div(experts, world); }
  /// Places of all ranks. An expert's place has its number; places from `experts` on have none.
  constexpr u32 expert_places() const { return world * local_experts(); }
  /// The first of a rank's experts; of one without any, and behind the last rank, all there are.
  constexpr u32 first_expert(u32 rank) const { return minimum(rank * local_experts(), experts); }
  /// Whether a table says where experts are (placement.hpp).
  constexpr bool placed() const { return placed_experts != 0; }
  /// Experts that tokens choose among; all else that is called an expert here is a place then.
  constexpr u32 routed_experts() const { return placed() ? placed_experts : experts; }
  /// The rank of an expert, or of a place.
  constexpr u32 owner_of(u32 expert) const { return expert / local_experts(); }

  /// Pairs of a token with an expert that it chooses: they follow each other, one for each slice.
  constexpr u32 pairs_of_choice() const { return maximum(1U, pair_slices); }
  /// Experts that a token chooses.
  constexpr u32 choices() const { return top_k / pairs_of_choice(); }
  /// Rows that a token has at one rank, at most: a rank has no two slices of an expert.
  constexpr u32 rows_of_token() const { return minimum(choices(), local_experts()); }

  // --- Slices of experts (slices.hpp) ---

  constexpr bool sliced() const { return slices > 1; }
  /// Ranks that exchange anything: `world` of them for each slice.
  constexpr u32 ranks() const { return sliced() ? world * slices : world; }
  /// Of so many tokens, those that one slice owns, at most: by torch.chunk's rule the first ones
  /// have as many each.
  constexpr u32 tokens_owned_most(u32 tokens) const { return ceil_div(tokens, slices); }
  /// Groups of an owner's tokens, at least: with as many tokens, each has a group of its own.
  static constexpr u32 kSumGroups = 64;
  /// Tokens of a group, at most.
  constexpr u32 sum_group_most() const {
    return maximum(1U, minimum(kCombineTokens, kCombinePairs / maximum(1U, slices)));
  }
  /// Groups of one owner, at most: groups grow by a token whenever kSumGroups of them are full.
  constexpr u32 sum_groups_most() const {
    const u32 owned = sliced() ? tokens_owned_most(max_tokens) : 0;
    return maximum(minimum(owned, 2 * kSumGroups), ceil_div(owned, sum_group_most()));
  }
  /// Of all owners.
  constexpr u32 sum_groups_all() const { return sliced() ? slices * sum_groups_most() : 0; }
  /// Rows of partial sums that a rank gets, at most. Where only owners add up, another rank may be
  /// at its next call while they do: so two calls' lie beside each other.
  constexpr u32 partial_rows() const { return sliced() ? partial_rounds() * owned_rows() : 0; }
  constexpr u32 partial_rounds() const { return sums_everywhere != 0 ? 1 : 2; }
  /// Rows of sums that owners send here.
  constexpr u32 total_rows() const { return sliced() && sums_everywhere != 0 ? owned_rows() : 0; }

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

  // --- Cells as rings (docs/memory.md) ---

  /// Whether a cell has places for fewer rows than a source may send. Not of a rank alone, nor of
  /// the thesis' layout.
  constexpr bool rings_cells() const {
    return ring_rows != 0 && world > 1 && row_map == RowMap::ragged &&
           ring_places() + ring_tail() < cell_rows();
  }
  /// Places that a cell's rows use in turn, whole chunks: row n has place n % ring_places(). More
  /// than rows of a tile that is not full and of a chunk, so that these never fill the ring.
  constexpr u32 ring_places() const {
    return align_up(maximum(ring_rows, tile_rows + chunk_rows), chunk_rows);
  }
  /// Places behind them. A tile's rows lie side by side, so one that begins before the ring's end
  /// goes on here: the first rows of each turn but the first one lie here, too.
  constexpr u32 ring_tail() const { return align_up(tile_rows, chunk_rows); }
  constexpr u32 ring_chunks() const { return ring_places() / chunk_rows; }
  /// Rows of one cell, as they have places.
  constexpr u32 cell_places() const {
    return rings_cells() ? ring_places() + ring_tail() : cell_rows();
  }
  constexpr u32 place_of(u32 row) const { return rings_cells() ? row % ring_places() : row; }
  /// Whether a source with so many rows for a rank uses places again.
  constexpr bool overflows(u32 rows) const { return rings_cells() && rows > ring_places(); }
  /// Whether a chunk's rows have places that those of a chunk before it have had; and of which one.
  constexpr bool replaces_rows(u32 chunk) const { return rings_cells() && chunk >= ring_chunks(); }
  constexpr u32 replaced_chunk(u32 chunk) const { return chunk - ring_chunks(); }
  /// Whether they lie behind the ring, too.
  constexpr bool lies_twice(u32 chunk) const {
    return replaces_rows(chunk) && place_of(chunk * chunk_rows) < ring_tail() &&
           !MOEOS_PLANTED(tails_stay_old);
  }

  /// Rows of results that come back to a rank in one call, at most: its pairs', side by side; in
  /// the thesis' layout a cell of each rank that computes them.
  constexpr u32 result_rows() const {
    const u32 of_cells = world * cell_rows();
    return packs_results() ? minimum(pairs(), of_cells) : of_cells;
  }
  /// Whether results lie side by side, from where their owner says on.
  constexpr bool packs_results() const { return row_map == RowMap::ragged; }
  /// Whether owners say so: a rank alone need not.
  constexpr bool tells_bases() const { return packs_results() && world > 1; }
  constexpr u32 chunks() const { return ceil_div(cell_rows_used(), chunk_rows); }
  /// Chunks that a call sends to all ranks, of which each has at most one that is not full.
  constexpr u32 chunks_sent_max() const {
    return minimum(world * chunks(), pairs() / chunk_rows + world);
  }

  // --- Remote peers (sender.hpp) ---

  /// A window that keeps a link of 50 GB/s busy for 20 us, which is how long an echo takes, and of
  /// which a receiver bears one from each peer.
  static constexpr u32 kWindowBytes = 1U << 20;
  /// Bytes of an arrival flag and of a credit: NVSHMEM's signals are 64-bit words. The runtime
  /// reads and clears the lower half.
  constexpr u32 signal_bytes() const { return remote != 0 ? sizeof(u64) : sizeof(u32); }
  /// Rows under way to a remote peer, at most. What is sent at once always fits.
  constexpr u32 window() const {
    const u32 chunk = rings_cells() ? 2 * chunk_rows : chunk_rows;  // which may be put twice
    return maximum(window_rows, maximum(chunk, tile_rows));
  }
  /// Requests to one remote peer in one call: its chunks, and the segments of tiles that it owns,
  /// of which each has a row and each tile at most kMaxSegments.
  constexpr u32 outbox_words() const {
    const u64 segments = minimum(u64{cell_rows_used()}, u64{tiles_max()} * kMaxSegments);
    return remote != 0 ? chunks() + static_cast<u32>(segments) : 0;
  }

  /// Whether a result for a remote peer is too long for the place of its row. It is staged in a
  /// place of its own then.
  constexpr bool stages_apart() const { return remote != 0 && sent_bytes < returned_bytes; }
  constexpr u32 staged_results() const { return stages_apart() ? world * cell_places() : 0; }

  // --- Tokens that are sent once (landings_subscriber.hpp) ---

  constexpr bool deduplicates_any() const { return dedup_rows != 0; }
  /// Whether so many rows for a direct peer are that many; and have a place each, since the row
  /// that a token came with must still be there.
  constexpr bool deduplicates(u32 rows) const {
    return deduplicates_any() && rows >= dedup_rows && !overflows(rows);
  }
  /// Chunks of so many rows, of a source that sends its tokens once, that are completed here.
  constexpr u32 chunks_replicated(u32 rows) const {
    return ceil_div(rows, chunk_rows) - minimum(ceil_div(rows, chunk_rows), dedup_after);
  }
  /// Whether tokens that go once are at most half as many rows as their pairs, by even routing: k
  /// pairs, for P(1 - (1 - 1/P)^k) ranks.
  constexpr bool dedup_halves() const {
    double elsewhere = 1.0;  // the share of tokens that a rank has nothing of
    for (u32 j = 0; j < top_k; ++j) {
      elsewhere *= 1.0 - 1.0 / world;
    }
    return 2.0 * world * (1.0 - elsewhere) <= top_k;
  }
  /// Rows of a source for which it can say where they come from, and chunks that can be made here.
  constexpr u32 origins() const {
    return deduplicates_any() ? minimum(cell_rows_used(), cell_places()) : 0;
  }
  constexpr u32 replications_max() const { return deduplicates_any() ? world * chunks() : 0; }

  // --- Dispatch by token (token_dispatch.hpp) ---

  /// Whether the parts of a call's Dispatch are tokens. Not of one that could take its tokens once
  /// to a peer, or use places of a cell again: those parts wait for none.
  constexpr bool dispatches_tokens(u32 tokens) const {
    return dispatch_tokens != 0 && tokens <= u64{dispatch_tokens} * processors &&
           !deduplicates(tokens * rows_of_token()) && !overflows(tokens * rows_of_token());
  }
  /// Tokens of a part, then: each processor has one at most.
  constexpr u32 tokens_of_part(u32 tokens) const {
    return maximum(1U, ceil_div(tokens, processors));
  }
  constexpr u32 token_parts(u32 tokens) const { return ceil_div(tokens, tokens_of_part(tokens)); }

  constexpr u32 pairs() const { return max_tokens * top_k; }

  // --- Route: blocks of tokens, and parts of a block ---

  /// Blocks of a call of `tokens`: half as large ones where each then still has a processor. A call
  /// without tokens has none.
  constexpr u32 route_blocks_of(u32 tokens) const {
    return halves_blocks(tokens) ? ceil_div(tokens, half_block()) : ceil_div(tokens, route_tokens);
  }
  constexpr u32 route_tokens_of(u32 tokens) const {
    return halves_blocks(tokens) ? half_block() : route_tokens;
  }
  /// The block in which one of them is.
  constexpr u32 route_block(u32 tokens, u32 token) const {
    return halves_blocks(tokens) ? token / half_block() : token / route_tokens;
  }
  /// Slices that one part of a block multiplies, at most: all of them where every processor has a
  /// block, or where there is none.
  constexpr u32 route_slices_of_part(u32 tokens) const {
    const u32 shared = ceil_div(route_blocks_of(tokens) * route_slices, processors);
    return tokens == 0 ? route_slices : minimum(route_slices, shared);
  }
  /// Route parts of a block; the last one routes it.
  constexpr u32 route_parts_of_block(u32 tokens) const {
    return ceil_div(route_slices, route_slices_of_part(tokens));
  }
  /// Blocks, and parts of all of them, that a call may have. Of several parts there are never more
  /// than one a processor and one a block.
  constexpr u32 route_blocks() const {
    const u32 halves = minimum(ceil_div(max_tokens, half_block()), processors);
    return maximum(maximum(1U, ceil_div(max_tokens, route_tokens)), halves);
  }
  constexpr u32 route_parts_max() const {
    return minimum(route_blocks() * route_slices, route_blocks() + processors);
  }

  // --- Shared experts: products of a rank's own tokens (known_parts.hpp) ---

  constexpr bool shares() const { return shared_bytes != 0; }
  /// Tiles of a call's tokens, which follow those of rows in all that has an entry a tile.
  constexpr u32 shared_tiles(u32 tokens) const {
    return shares() ? ceil_div(tokens, tile_rows) : 0;
  }
  constexpr bool narrow_shared(u32 tokens) const {
    return is_narrow(align_up(tokens, kSegmentAlign));
  }
  constexpr u32 shared0_parts_of(bool narrow) const {
    return narrow ? shared0_narrow_parts : shared0_parts;
  }
  /// Parts of both products of all of a call's tokens.
  constexpr u32 shared_parts(u32 tokens) const {
    const bool narrow = narrow_shared(tokens);
    return shared_tiles(tokens) * (shared0_parts_of(narrow) + product1_parts_of(narrow));
  }
  constexpr u32 shared_parts_max() const {
    return maximum(shared_parts(max_tokens), shared_parts(minimum(max_tokens, narrow_rows)));
  }
  /// Their results, one a token, which lie behind all others, as x does.
  constexpr u32 shared_results() const { return shares() ? max_tokens : 0; }
  /// Rows between the two products, a whole number of tiles' halves.
  constexpr u64 shared_between_bytes() const {
    return u64{align_up(max_tokens, maximum(kSegmentAlign, tile_rows / 2))} * shared_bytes;
  }
  /// Bytes between any two products: of rows, then of tokens.
  constexpr u64 between_bytes() const { return shared_between_at() + shared_between_bytes(); }
  constexpr u64 shared_between_at() const {
    return align_up(u64{intermediate_rows_max()} * hidden_bytes, u64{kCacheLine});
  }

  // --- Calls that are planned up front (arrivals_subscriber.hpp) ---

  /// Counts by which a warp plans few rows, and experts of a rank, at most (FewRows,
  /// counted_rows.hpp); and experts of which a rank alone plans any rows: more would take more
  /// registers than the GPU's fetch warp has.
  static constexpr u32 kPlanCounts = 512;
  static constexpr u32 kPlanFewExperts = 256;
  /// Of a layer with shared experts half as many, whose parts take registers, too.
  constexpr u32 plan_few_experts() const {
    return shares() ? kPlanFewExperts / 2 : kPlanFewExperts;
  }
  static constexpr u32 kPlanExperts = 128;
  /// Whether processors find their parts themselves: nobody else has rows for them, which so come
  /// in the order of experts, and nobody is late. A row's place must then say when it comes.
  constexpr bool plans_itself() const {
    return up_front_rows != 0 && world == 1 && row_map == RowMap::ragged && experts <= kPlanExperts;
  }
  /// Rows, each source's padded, up to which an expert's are one tile, which is cut as those of all
  /// others with so few: if none has more, processors find the parts of a call themselves. 0: of no
  /// call: where senders read what is in a tile, and with the capacity map, for which a fetch warp
  /// of eight ranks has a register too few.
  constexpr u32 one_tile_rows() const {
    const bool narrow = narrow_rows != 0;
    const bool alike = narrow || product1_narrow_parts <= product1_parts;  // (tiles_in_halves())
    const u32 most = minimum(up_front_rows, minimum(narrow ? narrow_rows : tile_rows, 0xffU));
    const bool fits = row_map == RowMap::ragged && world <= max_segments_of(narrow) &&
                      local_experts() * world <= kPlanCounts &&
                      local_experts() <= plan_few_experts() && local_experts() * most <= 0xffff;
    return alike && fits && remote == 0 && !plans_itself() ? most : 0;
  }
  /// Parts of both products of such a tile.
  constexpr u32 one_tile_parts() const {
    return product0_parts_of(narrow_rows != 0) + product1_parts_of(narrow_rows != 0);
  }
  /// Whether processors look at counts, to find such parts: in a call that probably has no others,
  /// should each rank have as many tokens. Who has seen all counts then decides (FoundBy).
  constexpr bool plans_few_rows() const { return one_tile_rows() != 0; }
  constexpr bool plans_few_rows(u32 tokens) const {
    return plans_few_rows() && mean_rows(tokens) <= one_tile_rows();
  }
  /// Rows of one source in such a call, at most. Each comes as it is (deduplicates), and has a
  /// place of its own. And whether there are never more.
  constexpr u32 few_rows_of_source() const {
    const u32 places = rings_cells() ? minimum(cell_rows_used(), ring_places()) : cell_rows_used();
    return deduplicates_any() ? minimum(places, dedup_rows - 1) : places;
  }
  constexpr bool few_rows_come_alone() const {
    return local_experts() * one_tile_rows() <= few_rows_of_source();
  }
  /// Whether the rows of such a call always have places between the products.
  constexpr bool few_rows_have_places() const {
    return !reuses_places() || local_experts() * one_tile_rows() <= pool_rows();
  }
  /// Whether processors find the parts of tiles by the counts, or may.
  constexpr bool plans_by_counts(u32 tokens) const {
    return plans_itself() || plans_few_rows(tokens);
  }
  /// Rows that an expert has on average, should each rank have as many tokens.
  constexpr u64 mean_rows(u32 tokens) const {
    return ceil_div(u64{tokens} * top_k * world, u64{experts});
  }
  /// Whether a call with so many tiles is. Any, where all rows come over direct links: who has told
  /// his counts has his rows here soon. But of large experts only one with a few tiles of each, or
  /// those of an expert are not computed beside each other. Beside a network, whose rows come
  /// late, one in which the order of tiles does not matter, because all of them are of experts with
  /// up to `up_front_rows` rows, or because the parts of all first products have a processor each.
  constexpr bool plans_up_front(bool few_rows, u64 tiles) const {
    const bool all = large_experts == 0 || world == 1 || tiles <= kWave * local_experts();
    return up_front_rows != 0 &&
           (few_rows || tiles * product0_parts <= processors || (remote == 0 && all));
  }
  /// Tiles whose parts are then handed out together, at most, those of a large expert by turns.
  static constexpr u32 kWave = 8;
  /// Whether the rest of a call with so many tiles is, when some have been made of the rows of who
  /// is not late. It keeps their second products until the end: not where these are long, or
  /// experts have many tiles, which are as good as others then.
  constexpr bool plans_rest(u64 tiles) const {
    return tiles <= kWave * local_experts() && !second_parts_are_longer();
  }
  /// Whether a part of a second product takes longer than one of a first product: its depth is I,
  /// and the first one's H.
  constexpr bool second_parts_are_longer() const { return hidden_bytes > sent_bytes; }
  /// Whether it is looked at how many rows each expert has: not if on average they are too many,
  /// should each rank have as many tokens.
  constexpr bool may_plan_up_front(u32 tokens) const {
    const u64 rows = mean_rows(tokens);
    return plans_up_front(rows <= up_front_rows, local_experts() * ceil_div(rows, u64{tile_rows}));
  }
  /// Words that a processor waits for before a part, at most (inputs.hpp): on the GPU a lane's
  /// each. A tile's rows lie in fewer chunks (make_sizes).
  static constexpr u32 kAwaitedMost = 32;
  /// Whether processors then wait for tokens' rows, too: few tokens, of which a part has few pairs.
  constexpr bool may_await(u32 tokens) const {
    return tokens > 0 && may_plan_up_front(tokens) && dispatches_tokens(tokens) &&
           combine_tokens(tokens) * top_k <= kAwaitedMost;
  }

  // --- Tokens that are read in place (counted_rows.hpp) ---

  /// Tokens, and pairs, of a call whose first products read tokens where the caller left them, at
  /// most: on the GPU a lane loads a row of a tile, and looks at two pairs' choices.
  static constexpr u32 kInPlaceTokens = 8;
  static constexpr u32 kInPlacePairs = 64;
  /// Whether a call's do: few tokens of a rank that is alone, which go nowhere. Nothing is
  /// dispatched then, and processors plan by the experts that are chosen, before rows are counted.
  constexpr bool reads_in_place(u32 tokens) const {
    // (A list of tokens does not say which pairs they are.)
    return plans_itself() && may_await(tokens) && alters_rows == 0 && !between_by_pairs() &&
           tokens <= in_place_tokens && tokens * top_k <= kInPlacePairs;
  }

  // --- Own rows that are read where they are (row_tasks.hpp) ---

  /// Whether nobody copies a rank's own rows into its cell. Dispatch lists them, as it does all
  /// rows, and a first product finds the token of each in this list (row_pair). So a call goes its
  /// usual way, with the same flags, and its results have the same bits.
  constexpr bool gathers_own_rows() const { return gathers_rows != 0 && alters_rows == 0; }
  /// Whether the rows of a pair lie between the two products at the pair's own place, whatever tile
  /// they are in. The list that says whose token a row is says the pair. It has this rank's own
  /// rows alone, so nobody else may have rows here: then a tile is one segment. Padding has no
  /// place.
  constexpr bool between_by_pairs() const {
    return between_pairs != 0 && gathers_own_rows() && world == 1;
  }

  // --- The tile plan (tile_plan.hpp), and its bounds ---

  /// Few rows are computed at the speed at which their weights arrive, so what counts is that
  /// every processor has the same share of them: an expert of few rows has more, smaller parts.
  /// What is left of one with more rows is cut as its other tiles are, and so can be computed by
  /// turns with them, with the same columns of its weights.
  constexpr bool is_narrow(u32 padded_rows) const { return padded_rows <= narrow_rows; }
  constexpr u32 product0_parts_of(bool narrow) const {
    return narrow ? product0_narrow_parts : product0_parts;
  }
  constexpr u32 product1_parts_of(bool narrow) const {
    return narrow ? product1_narrow_parts : product1_parts;
  }
  /// Parts of both products of a tile, at most: a wide tile's second one may have narrow ones, too.
  constexpr u32 tile_parts_max() const {
    return maximum(product0_parts, product0_narrow_parts) +
           maximum(product1_parts, product1_narrow_parts);
  }

  /// Of so many tiles whose second products are left when all first ones have been handed out, how
  /// many are cut in halves: of what is left when each processor has had as many parts as any
  /// other, most may have none. If that is so few parts that each half has a processor, it is cut:
  /// half a part takes more than half as long, since it loads the same rows, but less than a whole
  /// one. In a call of few tiles that is all of them: 128 tokens of Mixtral-8x7B took 288 us in
  /// place of 321.
  constexpr u32 tiles_in_halves(u32 left) const {
    if (product1_narrow_parts <= product1_parts) {
      return 0;
    }
    const u32 rest = left * product1_narrow_parts % (2 * processors);  // in halves
    return rest <= processors ? rest / product1_narrow_parts : 0;
  }

  /// Rows of a tile, and of a segment of a narrow one, are padded to a multiple of this (one wgmma
  /// core matrix, one twin panel).
  static constexpr u32 kSegmentAlign = 8;
  constexpr u32 segment_align_of(bool narrow) const {
    return narrow ? kSegmentAlign : segment_align;
  }
  static constexpr u32 kMaxSegments = 8;
  /// Where segments are not padded, their rows add up from more powers of two, each of which is a
  /// box to load; so a tile has fewer of them.
  static constexpr u32 kMaxExactSegments = 7;
  /// Powers of two that the rows of a tile's segments then add up from, at most, the last one's
  /// padding included; of a tile of so many rows (tests/native/words/test_geometry.cpp).
  static constexpr u32 kMaxExactBoxes = 28;
  static constexpr u32 kExactTileRows = 128;
  constexpr u32 max_segments_of(bool narrow) const {
    return segment_align_of(narrow) == kSegmentAlign ? kMaxSegments : kMaxExactSegments;
  }

  constexpr u32 rows_received_max() const { return world * cell_rows_used(); }
  /// Tiles that one expert's merged remainders fill at most: each source's is below a tile, so
  /// their padded rows fill `world` tiles; a tile closes early at so many segments; one is left
  /// over.
  constexpr u32 remainder_tiles() const {
    return world + ceil_div(world, max_segments_of(false)) + 1;
  }
  /// Tiles that may be packed early because processors idle; beyond it the plan waits for whole
  /// remainders.
  constexpr u32 early_tiles() const {
    return maximum(64U, 2 * local_experts()) + remainder_tiles();
  }
  /// Full single-source tiles, remainders, early tiles. A tile has a row, so there are never more
  /// than rows.
  constexpr u32 tiles_max() const {
    return minimum(rows_received_max(), rows_received_max() / tile_rows +
                                            local_experts() * remainder_tiles() + early_tiles());
  }
  /// Rows of all tiles of a call: a tile's segments, each padded.
  constexpr u32 tiled_rows_max() const {
    const u64 by_tiles = u64{tiles_max()} * tile_rows;
    const u64 by_rows = u64{rows_received_max()} * kSegmentAlign;
    return static_cast<u32>(minimum(by_tiles, by_rows));
  }
  /// Rows between the products that have a place at a time, where places are used again: at least
  /// what is left of one expert's sources, which is packed at once.
  constexpr u32 pool_rows() const {
    return align_up(maximum(between_rows, world * tile_rows), kSegmentAlign);
  }
  /// Whether places between the products are used again, since a call may have more rows. Not where
  /// processors find tiles themselves.
  constexpr bool reuses_places() const {
    return between_rows != 0 && !plans_itself() && !between_by_pairs() &&
           u64{pool_rows()} + tile_rows < tiled_rows_max();
  }
  /// Rows of the buffer between the products. A tile that begins at the end of the pool ends behind
  /// it.
  constexpr u32 intermediate_rows_max() const {
    if (between_by_pairs()) {
      return pairs();
    }
    return reuses_places() ? pool_rows() + tile_rows : tiled_rows_max();
  }

  /// Chunks of a peer that stand behind each other in the list of Dispatch, and of how many such
  /// turns the parts are pieces of chunks. For all couriers share the links, so a large part is
  /// long on its way, and the first rows of a call are waited for.
  static constexpr u32 kChunksPerTurn = 8;
  static constexpr u32 kTurnsInQuarters = 4;
  static constexpr u32 kQuartersOfChunk = 4;
  static constexpr u32 kLongPart = 1U << 16;  // bytes
  constexpr u32 quarters_of_chunk() const {
    return chunk_rows % kQuartersOfChunk == 0 ? kQuartersOfChunk : 1;
  }
  constexpr u32 quarter_rows() const { return chunk_rows / quarters_of_chunk(); }
  constexpr u32 quarters_of_cell() const { return chunks() * quarters_of_chunk(); }
  /// Rows for a peer, from the first one on, that go in such pieces in a call that sends so many
  /// chunks: all where rows are long or most couriers would have nothing to do; of a rank alone,
  /// which has no links, no others.
  constexpr u32 rows_in_quarters(u32 chunks_sent) const {
    const bool all = chunks_sent <= 2 * processors || quarter_rows() * sent_bytes >= kLongPart;
    const u32 first = world == 1 ? 0 : kTurnsInQuarters * kChunksPerTurn * chunk_rows;
    return all ? kNone : first;
  }
  /// Parts of Dispatch that the first `rows` rows for a peer make, then.
  constexpr u32 dispatch_parts(u32 in_quarters, u32 rows) const {
    const u32 first = minimum(rows, in_quarters);
    return ceil_div(first, quarter_rows()) + ceil_div(rows - first, chunk_rows);
  }
  constexpr u32 dispatch_parts_max() const { return world * quarters_of_cell(); }
  /// Tokens that one Combine part writes at most, and pairs that these have, if it writes several.
  static constexpr u32 kCombineTokens = 8;
  static constexpr u32 kCombinePairs = 64;
  /// In a call of `tokens`: fewer where processors would idle otherwise.
  constexpr u32 combine_tokens(u32 tokens) const {
    const u32 most = minimum(kCombineTokens, kCombinePairs / top_k);
    return maximum(1U, minimum(most, ceil_div(tokens, 4 * processors)));
  }
  /// Actors that tally what they do: the processors, the couriers and the OS block.
  constexpr u32 tallies() const { return processors + couriers + 1; }
  /// Actors that note events: the processors, the couriers, the scheduler and the subscribers.
  static constexpr u32 kTracedOsActors = 4;  // TraceKind names them
  constexpr u32 trace_actors() const { return processors + couriers + kTracedOsActors; }
  /// (descriptor, part) words that the ready ring can hold in one call.
  constexpr u64 parts_max() const {
    return u64{route_parts_max()} + u64{shared_parts_max()} + u64{tiles_max()} * tile_parts_max() +
           u64{max_tokens} + route_blocks() + sum_groups_all();
  }

 private:
  /// As many for each slice as it may own tokens.
  constexpr u32 owned_rows() const { return slices * tokens_owned_most(max_tokens); }
  constexpr u32 half_block() const { return maximum(1U, route_tokens / 2); }
  constexpr bool halves_blocks(u32 tokens) const {
    return ceil_div(tokens, half_block()) <= processors;
  }
};

/// How many of one rank's rows, in a call with this per-expert limit, lie in chunk `chunk` of a
/// cell with `rows` rows.
constexpr u32 rows_in_chunk(const Geometry& geometry, u32 rows, u32 chunk) {
  const u32 first = chunk * geometry.chunk_rows;
  return first >= rows ? 0 : minimum(geometry.chunk_rows, rows - first);
}

}  // namespace moeos
