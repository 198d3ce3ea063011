// SPDX-License-Identifier: Apache-2.0
// The rules by which a layer's calls are cut and planned: each is a question about a call of some
// number of tokens, rows or tiles, and every actor of every rank answers it alike.
//
// A Geometry also is the layer's numbers (dimensions.hpp) and the bounds of its buffers
// (bounds.hpp). Must not depend on: element types, activations, addresses, what has arrived.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/bounds.hpp"

namespace moeos {

struct Geometry : Bounds {
  // --- Route: blocks of tokens, and parts of a block ---

  /// Blocks of a call of `tokens`: half as large ones where each then still has a processor. A call
  /// without tokens has none.
  constexpr u32 route_blocks_of(u32 tokens) const {
    return halves_blocks(tokens) ? ceil_div(tokens, half_block()) : ceil_div(tokens, route_tokens);
  }
  constexpr u32 route_tokens_of(u32 tokens) const {
    return halves_blocks(tokens) ? half_block() : route_tokens;
  }
  /// The block of one of the tokens.
  constexpr u32 route_block(u32 tokens, u32 token) const {
    return halves_blocks(tokens) ? token / half_block() : token / route_tokens;
  }
  /// The most slices that one part of a block multiplies: all of them where every processor has a
  /// block, or where there is no block.
  constexpr u32 route_slices_of_part(u32 tokens) const {
    const u32 shared = ceil_div(route_blocks_of(tokens) * route_slices, processors);
    return tokens == 0 ? route_slices : minimum(route_slices, shared);
  }
  /// Route parts of a block; the last one routes it.
  constexpr u32 route_parts_of_block(u32 tokens) const {
    return ceil_div(route_slices, route_slices_of_part(tokens));
  }

  // --- Dispatch by chunks, and by pieces of chunks ---

  /// Consecutive chunks of one peer in the list of Dispatch.
  static constexpr u32 kChunksPerTurn = 8;
  /// How many of the first rows for a peer go in pieces of chunks, in a call that sends
  /// `chunks_sent` chunks. All couriers share the links, so a large part is long on its way, and
  /// the first rows of a call are waited for. All rows do where rows are long or most couriers
  /// would otherwise have nothing to do; else a rank alone, which has no links, sends none so.
  constexpr u32 rows_in_quarters(u32 chunks_sent) const {
    const bool all = chunks_sent <= 2 * processors || quarter_rows() * sent_bytes >= kLongPart;
    const u32 first = world == 1 ? 0 : kTurnsInQuarters * kChunksPerTurn * chunk_rows;
    return all ? kNone : first;
  }
  /// Parts of Dispatch that the first `rows` rows for a peer then make.
  constexpr u32 dispatch_parts(u32 in_quarters, u32 rows) const {
    const u32 first = minimum(rows, in_quarters);
    return ceil_div(first, quarter_rows()) + ceil_div(rows - first, chunk_rows);
  }

  // --- Tokens that are sent once (landings_subscriber.hpp) ---

  /// Whether a source with `rows` rows for a direct peer sends each token once. Each row must have
  /// a place of its own, since the row that a token came with must still be there.
  constexpr bool deduplicates(u32 rows) const {
    return deduplicates_any() && rows >= dedup_rows && !overflows(rows);
  }
  /// How many chunks of such a source's `rows` rows are completed here.
  constexpr u32 chunks_replicated(u32 rows) const {
    return ceil_div(rows, chunk_rows) - minimum(ceil_div(rows, chunk_rows), dedup_after);
  }

  // --- Dispatch by token (token_dispatch.hpp) ---

  /// Whether the parts of a call's Dispatch are tokens. They are not in a call that could send its
  /// tokens once to a peer, or use places of a cell again, because those parts wait for nothing.
  constexpr bool dispatches_tokens(u32 tokens) const {
    return dispatch_tokens != 0 && tokens <= u64{dispatch_tokens} * processors &&
           !deduplicates(tokens * rows_of_token()) && !overflows(tokens * rows_of_token());
  }
  /// Tokens of such a part: each processor has one part at most.
  constexpr u32 tokens_of_part(u32 tokens) const {
    return maximum(1U, ceil_div(tokens, processors));
  }
  constexpr u32 token_parts(u32 tokens) const { return ceil_div(tokens, tokens_of_part(tokens)); }

  // --- Calls of few rows, whose parts processors find by the counts (counted_rows.hpp) ---

  /// The most counts by which a warp plans few rows, and the most experts of a rank for which it
  /// does (FewRows). Parts of shared experts take registers too, so they leave half as many.
  static constexpr u32 kPlanCounts = 512;
  static constexpr u32 kPlanFewExperts = 256;
  constexpr u32 plan_few_experts() const {
    return shares() ? kPlanFewExperts / 2 : kPlanFewExperts;
  }
  /// The most rows, with each source's padding, with which an expert is one tile that is cut like
  /// the tile of every other expert of so few. If no expert has more, processors find the parts of
  /// a call themselves. 0, for no call: where senders read what is in a tile, and with the capacity
  /// map, for which a fetch warp of eight ranks has a register too few.
  constexpr u32 one_tile_rows() const {
    const bool narrow = narrow_rows != 0;
    const bool alike = narrow || product1_narrow_parts <= product1_parts;  // (tiles_in_halves())
    const u32 most = minimum(up_front_rows, minimum(narrow ? narrow_rows : tile_rows, 0xffU));
    const bool fits = row_map == RowMap::ragged && world <= max_segments_of(narrow) &&
                      local_experts() * world <= kPlanCounts &&
                      local_experts() <= plan_few_experts() && local_experts() * most <= 0xffff;
    return alike && fits && remote == 0 && !plans_itself() ? most : 0;
  }
  /// Whether processors look at counts to find such parts: in a call that probably has no others,
  /// should each rank have as many tokens. An actor that has seen all counts then decides
  /// (FoundBy).
  constexpr bool plans_few_rows() const { return one_tile_rows() != 0; }
  constexpr bool plans_few_rows(u32 tokens) const {
    return plans_few_rows() && mean_rows(tokens) <= one_tile_rows();
  }
  /// The most rows of one source in such a call. Each comes as it is (deduplicates), and has a
  /// place of its own.
  constexpr u32 few_rows_of_source() const {
    const u32 places = rings_cells() ? minimum(cell_rows_used(), ring_places()) : cell_rows_used();
    return deduplicates_any() ? minimum(places, dedup_rows - 1) : places;
  }
  /// Whether no source ever has more.
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

  // --- Calls that are planned up front (arrivals_subscriber.hpp) ---

  /// Whether a call with `tiles` tiles is; `few_rows`: its experts have up to `up_front_rows` rows.
  /// Any call is whose rows all come over direct links, because a source's rows soon follow its
  /// counts. Of large experts it must have few tiles each, or the tiles of an expert are not
  /// computed together. From a network rows come late, so a call must be one in which the order of
  /// tiles does not matter: its experts have few rows, or each part of all first products has a
  /// processor.
  constexpr bool plans_up_front(bool few_rows, u64 tiles) const {
    const bool all = large_experts == 0 || world == 1 || tiles <= kWave * local_experts();
    return up_front_rows != 0 &&
           (few_rows || tiles * product0_parts <= processors || (remote == 0 && all));
  }
  /// The most tiles whose parts are then handed out together, those of a large expert in turn.
  static constexpr u32 kWave = 8;
  /// Whether the rest of a call is planned up front once some of its `tiles` tiles have been made
  /// of the rows of sources that are not late. Second products of the rest then come last: so it
  /// is not where these are long, or where experts have many tiles, which need no plan.
  constexpr bool plans_rest(u64 tiles) const {
    return tiles <= kWave * local_experts() && !second_parts_are_longer();
  }
  /// Whether each expert's rows are counted for that: not if they are too many on average, should
  /// each rank have as many tokens.
  constexpr bool may_plan_up_front(u32 tokens) const {
    const u64 rows = mean_rows(tokens);
    return plans_up_front(rows <= up_front_rows, local_experts() * ceil_div(rows, u64{tile_rows}));
  }
  /// The most words that a processor waits for before a part (inputs.hpp): on the GPU a lane waits
  /// for each. A tile's rows lie in fewer chunks (make_sizes).
  static constexpr u32 kAwaitedMost = 32;
  /// Whether processors then wait for tokens' rows, too: few tokens, so that a part has few pairs.
  constexpr bool may_await(u32 tokens) const {
    return tokens > 0 && may_plan_up_front(tokens) && dispatches_tokens(tokens) &&
           combine_tokens(tokens) * top_k <= kAwaitedMost;
  }

  // --- Tokens that are read in place (counted_rows.hpp) ---

  /// The most pairs of a call whose first products read tokens where the caller left them: on the
  /// GPU a lane looks at two pairs' choices.
  static constexpr u32 kInPlacePairs = 64;
  /// Whether a call's first products do: few tokens of a rank that is alone. Nothing is dispatched
  /// then, and processors plan by the experts that are chosen, before rows are counted.
  constexpr bool reads_in_place(u32 tokens) const {
    // (A list of tokens does not say which pairs they are.)
    return plans_itself() && may_await(tokens) && alters_rows == 0 && !between_by_pairs() &&
           tokens <= in_place_tokens && tokens * top_k <= kInPlacePairs;
  }

  // --- How the last parts of a call are cut ---

  /// How many of the `left` tiles whose second products are left, once all first ones have been
  /// handed out, are cut in halves. When each processor has had as many of these parts as any
  /// other, most processors may have none of the remaining ones. If each half of a remaining part
  /// then has a processor, the part is cut: a half takes more than half as long, since it loads the
  /// same rows, but less than a whole part. A call of few tiles has remaining parts only: 128
  /// tokens of Mixtral-8x7B took 288 us in place of 321.
  constexpr u32 tiles_in_halves(u32 left) const {
    if (product1_narrow_parts <= product1_parts) {
      return 0;
    }
    const u32 rest = left * product1_narrow_parts % (2 * processors);  // in halves
    return rest <= processors ? rest / product1_narrow_parts : 0;
  }
  /// Tokens of a Combine part, in a call of `tokens`: fewer where processors would idle otherwise.
  constexpr u32 combine_tokens(u32 tokens) const {
    const u32 most = minimum(kCombineTokens, kCombinePairs / top_k);
    return maximum(1U, minimum(most, ceil_div(tokens, 4 * processors)));
  }

 private:
  static constexpr u32 kTurnsInQuarters = 4;  // of a peer's chunks, kChunksPerTurn each
  static constexpr u32 kLongPart = 1U << 16;  // bytes

  constexpr bool halves_blocks(u32 tokens) const {
    return ceil_div(tokens, half_block()) <= processors;
  }
  /// Rows that an expert has on average, should each rank have as many tokens.
  constexpr u64 mean_rows(u32 tokens) const {
    return ceil_div(u64{tokens} * top_k * world, u64{experts});
  }
};

}  // namespace moeos
