// SPDX-License-Identifier: Apache-2.0
// The numbers that are fixed when a layer is built, and the counts and facts that follow from them
// alone. Every rank of a world has the same ones: the host compares them at construction.
//
// geometry.def lists the fields. How large a buffer is: bounds.hpp. What a call does: geometry.hpp.
// Must not depend on: either of these, a call, element types, activations, addresses.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos {

/// Where a pair's row lies in its cell (docs/memory.md).
enum class RowMap : u32 {
  ragged,    ///< row = start[expert] + slot: rows packed, dropless worst case fits
  capacity,  ///< row = expert * capacity + slot: the thesis' layout, fixed rows for each expert
};

/// The most warps of the OS block that count returned rows.
inline constexpr u32 kReturnsSubscribersMax = 4;

struct Dimensions {
#define FIELD(type, name) type name;
#include "runtime/words/geometry.def"

  // --- Experts, ranks and pairs ---

  /// X, the most experts of a rank. By torch.chunk's rule the first ranks have X each, the next one
  /// has the remainder, and the others have none. Everything that is kept or sent per expert of a
  /// rank has X places on every rank. A place without an expert gets no row, because each source
  /// sends it a count of 0, so a reader of counts need not know how many experts a rank has.
  constexpr u32 local_experts() const { return ceil_div(experts, world); }
  /// Places of all ranks. An expert's place has its number; places from `experts` on are empty.
  constexpr u32 expert_places() const { return world * local_experts(); }
  /// The first expert of a rank. A rank without experts, like the end of the last rank, has the
  /// number of all experts here.
  constexpr u32 first_expert(u32 rank) const { return minimum(rank * local_experts(), experts); }
  /// Whether a table says where experts are (placement.hpp).
  constexpr bool placed() const { return placed_experts != 0; }
  /// Experts that tokens choose among. With a table, every other number "of experts" counts places.
  constexpr u32 routed_experts() const { return placed() ? placed_experts : experts; }
  /// The rank of an expert, or of a place.
  constexpr u32 owner_of(u32 expert) const { return expert / local_experts(); }

  /// Pairs of a token with one expert that it chooses, one for each slice; their numbers follow
  /// each other.
  constexpr u32 pairs_of_choice() const { return maximum(1U, pair_slices); }
  /// Experts that a token chooses.
  constexpr u32 choices() const { return top_k / pairs_of_choice(); }
  /// The most rows that a token has at one rank: a rank has no two slices of an expert.
  constexpr u32 rows_of_token() const { return minimum(choices(), local_experts()); }
  constexpr u32 pairs() const { return max_tokens * top_k; }

  // --- Slices of experts (slices.hpp) ---

  constexpr bool sliced() const { return slices > 1; }
  /// Ranks that exchange anything: `world` ranks for each slice.
  constexpr u32 ranks() const { return sliced() ? world * slices : world; }
  /// The most of `tokens` tokens that one slice owns: by torch.chunk's rule the first slices own
  /// this many each.
  constexpr u32 tokens_owned_most(u32 tokens) const { return ceil_div(tokens, slices); }
  /// The fewest groups into which an owner's tokens are cut. An owner of fewer tokens has a group
  /// for each.
  static constexpr u32 kSumGroups = 64;
  /// The most tokens of a group.
  constexpr u32 sum_group_most() const {
    return maximum(1U, minimum(kCombineTokens, kCombinePairs / maximum(1U, slices)));
  }

  // --- What ranks send each other ---

  /// Whether results lie side by side, from the row on that their owner says.
  constexpr bool packs_results() const { return row_map == RowMap::ragged; }
  /// Whether owners say so: a rank alone need not.
  constexpr bool tells_bases() const { return packs_results() && world > 1; }
  constexpr bool deduplicates_any() const { return dedup_rows != 0; }
  /// Bytes of an arrival flag and of a credit: NVSHMEM's signals are 64-bit words. The runtime
  /// reads and clears the lower half.
  constexpr u32 signal_bytes() const { return remote != 0 ? sizeof(u64) : sizeof(u32); }
  /// Whether a result for a remote peer is too long for the place of its row, so that it is staged
  /// in a place of its own.
  constexpr bool stages_apart() const { return remote != 0 && sent_bytes < returned_bytes; }

  /// Pieces into which Dispatch may cut a chunk.
  static constexpr u32 kQuartersOfChunk = 4;
  constexpr u32 quarters_of_chunk() const {
    return chunk_rows % kQuartersOfChunk == 0 ? kQuartersOfChunk : 1;
  }
  constexpr u32 quarter_rows() const { return chunk_rows / quarters_of_chunk(); }

  // --- Blocks of Route, parts of Combine ---

  constexpr u32 half_block() const { return maximum(1U, route_tokens / 2); }
  /// The most tokens that one Combine part writes, and the most pairs that these have if it writes
  /// several.
  static constexpr u32 kCombineTokens = 8;
  static constexpr u32 kCombinePairs = 64;

  // --- Tiles and their parts ---

  /// The most tokens of a call whose first products read tokens where the caller left them
  /// (Geometry::reads_in_place): on the GPU a lane loads a row of a tile.
  static constexpr u32 kInPlaceTokens = 8;

  /// Rows of a tile, and of a segment of a narrow one, are padded to a multiple of this (one wgmma
  /// core matrix, one twin panel).
  static constexpr u32 kSegmentAlign = 8;
  constexpr u32 segment_align_of(bool narrow) const {
    return narrow ? kSegmentAlign : segment_align;
  }
  static constexpr u32 kMaxSegments = 8;
  /// Where segments are not padded, a tile has fewer of them: each power of two in their numbers of
  /// rows is a box to load.
  static constexpr u32 kMaxExactSegments = 7;
  /// The most boxes that the segments of a tile of kExactTileRows rows then take, with the padding
  /// of the last one (tests/native/words/test_geometry.cpp).
  static constexpr u32 kMaxExactBoxes = 28;
  static constexpr u32 kExactTileRows = 128;
  constexpr u32 max_segments_of(bool narrow) const {
    return segment_align_of(narrow) == kSegmentAlign ? kMaxSegments : kMaxExactSegments;
  }

  /// Few rows are computed at the speed at which their weights arrive, so every processor should
  /// have an equal share of these: an expert of few rows has more, smaller parts. The remainder of
  /// an expert of more rows is cut as its other tiles are, so that it can be computed in turn with
  /// them, with the same columns of its weights.
  constexpr bool is_narrow(u32 padded_rows) const { return padded_rows <= narrow_rows; }
  constexpr u32 product0_parts_of(bool narrow) const {
    return narrow ? product0_narrow_parts : product0_parts;
  }
  constexpr u32 product1_parts_of(bool narrow) const {
    return narrow ? product1_narrow_parts : product1_parts;
  }
  /// Whether a part of a second product takes longer than one of a first product: its depth is I,
  /// and the first one's H.
  constexpr bool second_parts_are_longer() const { return hidden_bytes > sent_bytes; }

  // --- Shared experts: products of a rank's own tokens (known_parts.hpp) ---

  constexpr bool shares() const { return shared_bytes != 0; }
  /// Tiles of a call's tokens. In everything that has an entry per tile they follow those of rows.
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

  // --- How calls of every size are planned and read ---

  /// The most experts for which a rank alone plans any number of rows: more would take more
  /// registers than the GPU's fetch warp has.
  static constexpr u32 kPlanExperts = 128;
  /// Whether processors find their parts themselves: no other rank sends rows, so rows come in the
  /// order of experts and none is late. A row's place must then say when it comes.
  constexpr bool plans_itself() const {
    return up_front_rows != 0 && world == 1 && row_map == RowMap::ragged && experts <= kPlanExperts;
  }
  /// Whether a rank's own rows are not copied into its cell. Dispatch lists them, as it does all
  /// rows, and a first product finds each row's token in this list (row_pair in row_tasks.hpp). A
  /// call otherwise goes its usual way, with the same flags, and its results have the same bits.
  constexpr bool gathers_own_rows() const { return gathers_rows != 0 && alters_rows == 0; }
  /// Whether the row of a pair lies between the two products at the pair's own place, whatever tile
  /// it is in. The list that gives a row's token gives its pair. The list has this rank's own rows
  /// alone, so no other rank may have rows here; a tile then is one segment. Padding has no place.
  constexpr bool between_by_pairs() const {
    return between_pairs != 0 && gathers_own_rows() && world == 1;
  }

  // --- Actors ---

  /// Actors that tally what they do: the processors, the couriers and the OS block.
  constexpr u32 tallies() const { return processors + couriers + 1; }
  /// Actors that note events: the processors, the couriers, the scheduler and the subscribers.
  static constexpr u32 kTracedOsActors = 4;  // TraceKind names them
  constexpr u32 trace_actors() const { return processors + couriers + kTracedOsActors; }
};

/// How many of a cell's `rows` rows lie in its chunk `chunk`.
constexpr u32 rows_in_chunk(const Dimensions& dimensions, u32 rows, u32 chunk) {
  const u32 first = chunk * dimensions.chunk_rows;
  return first >= rows ? 0 : minimum(dimensions.chunk_rows, rows - first);
}

}  // namespace moeos
