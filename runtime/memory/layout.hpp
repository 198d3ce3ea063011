// SPDX-License-Identifier: Apache-2.0
// The symmetric heap: where each word and row of the protocol lies, as byte offsets that are equal
// on all ranks.
//
// L in R^{P x R x B x E x C x H} of the thesis (section 5.3): source rank, round, staging or
// arrival buffer, local expert, capacity slot, hidden. Here `row()` turns (E, C) into one row
// index, by one of two maps. For the round in which results come back, the arrival cells are one
// array of results: a rank's own rows never have more results than its assignments, whatever ranks
// compute them, so they are packed (result()). What is staged in one round (B = 0) takes the space
// of what arrives in the other (B = 1): a row for a remote peer lies where its own result will
// come, and that result, at the peer, lies where the row was. What is overwritten has been read by
// then. Where rows are sent in fewer bytes than results have, results are staged after the others.
// The results of shared experts come last.
//
// Layers of several shapes share one heap: [header][words of shape 1][words of shape
// 2]...[cells][results]. The header depends only on the world. Words of a shape lie where no other
// shape writes; rows of all shapes lie in the same cells, each of which begins at nearly the same
// byte for all shapes, and results after all cells (docs/memory.md, "One workspace for all
// layers"). Must not depend on: the readers and writers of a word; element types; which shapes
// there are.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/geometry_of.hpp"
#include "runtime/words/planted.hpp"
#include "runtime/words/sealed.hpp"

namespace moeos {

/// A count, or another number of a call, as its word lies in the heap.
constexpr u64 count_word(u32 epoch, u32 rows) { return seal(u64{epoch} << 32 | rows); }

/// Where a shape's words and rows lie in a heap. Every launch of a kernel passes it, so that a heap
/// may grow without recompiling.
struct HeapPlace {
  u64 words_at;
  u64 rows_at;  // first row of the first cell
  u64 results_at;
  u32 stride_rows;  // from one cell to the next, at least Geometry::cell_places()
};

class Layout {
 public:
  /// The layout of a heap that no other shape shares. `geometry` must outlive this object.
  explicit constexpr Layout(const Geometry& geometry) : Layout(geometry, alone(geometry)) {}
  /// `geometry` must outlive this object.
  constexpr Layout(const Geometry& geometry, const HeapPlace& place)
      : geometry_(geometry), place_(place) {
    u64 offset = 0;
    const auto reserve = [&offset](u64 bytes) {
      const u64 begin = offset;
      offset = align_up(offset + bytes, u64{kCacheLine});
      return begin;
    };
    abort_ = reserve(sizeof(u64));
    failures_ = reserve(u64{geometry.ranks()} * (kCacheLine + kPutWords * sizeof(u64)));
    calls_ = reserve(u64{2} * geometry.ranks() * sizeof(u64));
    awaits_ = reserve(geometry.sliced() ? sizeof(u64) : 0);
    header_ = offset;
    offset = 0;  // from words_at on
    counts_ = reserve(u64{2} * geometry.world * geometry.local_experts() * sizeof(u64));
    bases_ = reserve(geometry.tells_bases() ? u64{2} * geometry.world * sizeof(u64) : 0);
    arrived_ = reserve(u64{geometry.world} * geometry.chunks() * geometry.signal_bytes());
    returned_ = reserve(u64{geometry.world} * geometry.chunks() * geometry.signal_bytes());
    origins_ = reserve(u64{geometry.world} * geometry.origins() * sizeof(u32));
    if (geometry.sliced()) {
      inputs_ = reserve(u64{2} * geometry.slices * sizeof(u64));
      partial_flags_ = reserve(u64{2} * geometry.sum_groups_all() * sizeof(u32));
      total_flags_ = reserve(u64{2} * geometry.sum_groups_all() * sizeof(u32));
      sums_ = reserve(sums_bytes());
    }
    words_ = offset;
  }

  /// The place of a shape in a heap that it has for itself.
  static constexpr HeapPlace alone(const Geometry& geometry) {
    HeapPlace place{0, 0, 0, geometry.cell_places()};
    const Layout nowhere(geometry, place);
    place.words_at = nowhere.header_;
    place.rows_at = nowhere.header_ + nowhere.words_;
    place.results_at = align_up(place.rows_at + nowhere.row_bytes(), u64{kCacheLine});
    return place;
  }

  constexpr u64 bytes() const {
    return align_up(place_.results_at + results_bytes(), u64{kCacheLine});
  }
  /// Bytes of the words that all shapes of a world share.
  constexpr u64 header_bytes() const { return header_; }
  /// Bytes of this shape's own words, including its sums of slices.
  constexpr u64 words_bytes() const { return words_; }
  /// Bytes of the sums of slices. They are rows, but each shape has its own, so that a peer that
  /// has gone on to a call of another shape overwrites none that is still read.
  constexpr u64 sums_bytes() const {
    return (u64{geometry().partial_rows()} + geometry().total_rows()) * geometry().row_bytes;
  }
  /// Bytes of all cells. A tile may read past the last segment of the last cell: rows whose results
  /// are discarded.
  constexpr u64 row_bytes() const {
    return (u64{rows()} + geometry().tile_rows) * geometry().sent_bytes;
  }
  /// Where the cells start, which follow each other.
  constexpr u64 first_cell() const { return place_.rows_at; }
  constexpr u32 cells() const { return geometry().world; }
  /// Rows of all cells, from first_cell() on.
  constexpr u32 rows() const { return cells() * place_.stride_rows; }

  /// The word that makes every actor of this rank leave (watchdog.hpp), or 0.
  constexpr u64 abort_word() const { return abort_; }
  /// Where rank p describes its failure to this rank (one cache line, written by p alone).
  constexpr u64 failure(u32 p) const { return failures_ + u64{p} * kCacheLine; }
  /// The word to which remote rank p would have raised the abort word, put after its record
  /// (watchdog.hpp).
  constexpr u64 put_failure(u32 p) const { return put_words(0) + u64{p} * sizeof(u64); }
  /// Rows of both rounds that remote rank p has put here since the last reset, modulo 2^32; p adds.
  constexpr u64 landed(u32 p) const { return put_words(1) + u64{p} * sizeof(u64); }
  /// The number of rows that remote rank p has last seen of those that we put there: its landed()
  /// of this rank.
  constexpr u64 echoed(u32 p) const { return put_words(2) + u64{p} * sizeof(u64); }

  /// `epoch << 32 | identity`, sealed, of the call that p makes (Call::identity). Two parities,
  /// because p may be one call ahead.
  constexpr u64 call_of(u32 epoch, u32 p) const {
    return calls_ + (u64{epoch & 1} * geometry().ranks() + p) * sizeof(u64);
  }

  // Words of ranks that hold slices of the same experts (slices.hpp). Flags are the epoch, sealed.

  /// `epoch << 32 | 1`, sealed, of the last call in which this rank missed something from another
  /// slice when it was asked. This rank writes it; others read it here before they blame this rank.
  constexpr u64 awaits() const { return awaits_; }

  /// `epoch << 32 | inputs_of`, sealed, of the call that slice s makes.
  constexpr u64 inputs(u32 epoch, u32 s) const {
    return words(inputs_) + (u64{epoch & 1} * geometry().slices + s) * sizeof(u64);
  }
  /// Slice s has sent its partial sums of a group of this rank's tokens.
  constexpr u64 partial_flag(u32 epoch, u32 s, u32 group) const {
    return words(partial_flags_) + flag_index(epoch, s, group) * sizeof(u32);
  }
  /// Slice s has sent the sums of a group of its tokens.
  constexpr u64 total_flag(u32 epoch, u32 s, u32 group) const {
    return words(total_flags_) + flag_index(epoch, s, group) * sizeof(u32);
  }
  /// A row of sums, by its number: slice s's partial sum of the nth of this rank's tokens ...
  constexpr u32 partial_row(u32 epoch, u32 s, u32 nth) const {
    const u32 each = geometry().tokens_owned_most(geometry().max_tokens);
    MOEOS_CHECK(s < geometry().slices && nth < each);
    return (epoch % geometry().partial_rounds() * geometry().slices + s) * each + nth;
  }
  /// ... or the sum of a token that another slice owns.
  constexpr u32 total_row(u32 token) const {
    MOEOS_CHECK(token < geometry().total_rows());
    return geometry().partial_rows() + token;
  }
  constexpr u64 sum_at(u32 row) const { return words(sums_) + u64{row} * geometry().row_bytes; }

  /// `epoch << 32 | rows`, sealed, that p sends to local expert e. Two parities, because p may be
  /// one call ahead.
  constexpr u64 count(u32 epoch, u32 p, u32 local_expert) const {
    const u64 index =
        (u64{epoch & 1} * geometry().world + p) * geometry().local_experts() + local_expert;
    return words(counts_) + index * sizeof(u64);
  }
  /// `epoch << 32 | row`, sealed: the first of p's result rows that this rank computes. Two
  /// parities, as for counts.
  constexpr u64 base(u32 epoch, u32 p) const {
    return words(bases_) + (u64{epoch & 1} * geometry().world + p) * sizeof(u64);
  }
  /// The epoch, sealed, in which rows of this chunk of p's dispatch cell last arrived.
  constexpr u64 arrived(u32 p, u32 chunk) const {
    return words(arrived_) + (u64{p} * geometry().chunks() + chunk) * geometry().signal_bytes();
  }
  /// Results, sealed, of this chunk of the rows for p that p has written back in this epoch.
  constexpr u64 returned(u32 p, u32 chunk) const {
    return words(returned_) + (u64{p} * geometry().chunks() + chunk) * geometry().signal_bytes();
  }

  /// For a row of p's dispatch cell, counted in the order of sending, where p sends each token
  /// once: the number, sealed, of the row in the cell that holds its token: this row, or one that
  /// was sent before.
  constexpr u64 origin(u32 p, u32 row) const {
    MOEOS_CHECK(row < geometry().origins());
    return words(origins_) + (u64{p} * geometry().origins() + row) * sizeof(u32);
  }

  /// A row's number in its cell: expert e's slot c, where `expert_start` is the number of rows that
  /// the source sends to this owner's experts before e.
  constexpr u32 row(u32 local_expert, u32 slot, u32 expert_start) const {
    MOEOS_CHECK(slot < geometry().capacity);
    const u32 number =
        geometry().row_map == RowMap::ragged
            ? expert_start + slot
            : local_expert * (MOEOS_PLANTED(experts_share_rows) ? 1 : geometry().capacity) + slot;
    MOEOS_CHECK(number < geometry().cell_rows());
    return number;
  }

  /// The index among rows(), the rows of all cells, of a row that rank p sends. The tile's next
  /// rows from p follow this one, even where their own indices wrap around the ring.
  constexpr u32 row_index(u32 p, u32 row_number) const {
    MOEOS_CHECK(p < geometry().world && row_number < geometry().cell_rows());
    return p * place_.stride_rows + geometry().place_of(row_number);
  }
  /// The distance from a row of a cell to its copy after the ring, if it has one
  /// (Geometry::lies_twice).
  constexpr u64 ring_bytes() const { return u64{geometry().ring_places()} * geometry().sent_bytes; }
  constexpr u64 row_at(u32 index) const {
    return place_.rows_at + u64{index} * geometry().sent_bytes;
  }

  /// The first byte of a row in the heap of the rank that it is sent to.
  constexpr u64 cell_row(u32 p, u32 row_number) const { return row_at(row_index(p, row_number)); }

  /// The first byte of one of a rank's results. The results that rank p computes are in the order
  /// of the rows of its cell (row()), from first_result(p) on.
  constexpr u64 result(u32 index) const {
    return place_.results_at + u64{index} * geometry().returned_bytes;
  }
  /// All of a rank's results, including results for other ranks that are staged apart.
  constexpr u32 results() const { return geometry().result_rows() + geometry().staged_results(); }
  /// The first byte of the shared experts' result for a rank's own token.
  constexpr u64 shared_result(u32 token) const {
    MOEOS_CHECK(token < geometry().shared_results());
    const bool alike = geometry().returned_bytes == geometry().row_bytes;
    return alike ? result(results() + token)
                 : result(results()) + u64{token} * geometry().row_bytes;
  }
  /// Bytes of all results, including those of shared experts.
  constexpr u64 results_bytes() const {
    return u64{results()} * geometry().returned_bytes +
           u64{geometry().shared_results()} * geometry().row_bytes;
  }
  /// The first byte of a row for a remote peer until it is put: where its own result will come, the
  /// peer's results beginning at `first`. Rows that are shorter than results are packed from the
  /// beginning of their chunk, so that one put takes all of them: none of its results comes before.
  /// But a chunk of the capacity map has no such space.
  constexpr u64 staged_row(u32 first, u32 row_number) const {
    const bool close = geometry().stages_apart() && geometry().row_map == RowMap::ragged;
    const u32 behind = close ? row_number % geometry().chunk_rows : 0;
    return result(first + row_number - behind) + u64{behind} * geometry().sent_bytes;
  }
  /// The first byte of the result of a row that p has sent, until it is put; the results of the
  /// tile's next rows follow it.
  constexpr u64 staged_result(u32 p, u32 row_number) const {
    return geometry().stages_apart() ? result(results() - (cells() - p) * geometry().cell_places() +
                                              geometry().place_of(row_number))
                                     : cell_row(p, row_number);
  }
  /// `packed`: where the results begin if results are packed; the owner knows, and sends it to p
  /// (base()).
  constexpr u32 first_result(u32 p, u32 packed) const {
    return geometry().packs_results() ? packed : p * geometry().cell_rows();
  }

  /// cell_row for a write by `writer` into `holder`'s heap; debug builds check that it is valid in
  /// the sense of thesis Definition 5.3.2, so that Theorem 5.3.1 (no write-write conflict) holds:
  /// rank p writes its cell, and the holder writes there what it computes of p's rows. The owner of
  /// results gives each writer result rows of its own, as many as the rows that it sends to that
  /// writer.
  constexpr u64 write_row(u32 writer, u32 holder, u32 p, u32 row_number) const {
    MOEOS_CHECK(p == writer || holder == writer);
    static_cast<void>(writer);
    static_cast<void>(holder);
    return cell_row(p, row_number);
  }

  constexpr const Geometry& geometry() const { return geometry_.get(); }

 private:
  static constexpr u32 kPutWords = 3;  // of each remote rank, after the failures

  constexpr u64 put_words(u32 kind) const {
    return failures_ + u64{geometry().ranks()} * (kCacheLine + kind * sizeof(u64));
  }
  constexpr u64 flag_index(u32 epoch, u32 s, u32 group) const {
    MOEOS_CHECK(s < geometry().slices && group < geometry().sum_groups_most());
    return u64{epoch & 1} * geometry().sum_groups_all() + u64{s} * geometry().sum_groups_most() +
           group;
  }
  constexpr u64 words(u64 offset) const { return place_.words_at + offset; }

  GeometryOf geometry_;
  HeapPlace place_;
  u64 abort_ = 0;
  u64 failures_ = 0;
  u64 calls_ = 0;
  u64 awaits_ = 0;
  u64 header_ = 0;
  // Offsets from words_at.
  u64 counts_ = 0;
  u64 bases_ = 0;
  u64 arrived_ = 0;
  u64 returned_ = 0;
  u64 origins_ = 0;
  u64 inputs_ = 0;
  u64 partial_flags_ = 0;
  u64 total_flags_ = 0;
  u64 sums_ = 0;
  u64 words_ = 0;
};

}  // namespace moeos
