// SPDX-License-Identifier: Apache-2.0
// A rank's own memory: queues, counters and maps that no peer ever accesses, in three parts.
//
// The symmetric heap (layout.hpp) is what peers write; everything else that the device OS needs is
// here, sized from Geometry. `control` depends only on the world and the processors: all layers of
// a workspace share it, and with it the epoch. `tables` are shared by the layers of one shape.
// `records` are one layer's own: what it noted of its last call. Must not depend on: the actors
// that wait; element types.
#pragma once

#include "runtime/memory/layout.hpp"
#include "runtime/memory/records.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/geometry_of.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// Counters of one call. Two CallStates alternate by the parity of the epoch: while a call runs,
/// the OS block clears the other one, so a call starts with zeros and no actor waits for a reset.
struct CallState {
  Line<u32> ring_claimed;     // tickets that processors have taken
  Line<u32> found_by;         // FoundBy: the actors that find the parts of tiles
  Line<u32> product1_posted;  // tickets of slots in the mailbox of Product1
  Line<u32> route_blocks_done;
  Line<u32> dispatch_parts_taken;  // tickets that couriers have taken
  Line<u32> dispatch_parts_done;
  // Chunks that couriers complete (landings_subscriber.hpp): how many are listed and not taken, or
  // for a moment fewer; how many are taken; and, once it is known, 1 + how many there will be.
  Line<u32> replications_ready;
  Line<u32> replications_taken;
  Line<u32> replications_all;
  Line<u32> routed;  // 1 + the number of parts of Dispatch: our counts, the routing map and the
                     // list of Dispatch are complete (released by the last Route part, or in a call
                     // without tokens by the OS block)
  Line<u32> token_rows_known;  // blocks of tokens whose token_rows are written
  Line<u32> rows_returned;     // received rows whose results have left for their owners
  Line<u32> tokens_combined;   // own tokens whose output is written
  Line<u32> interrupt;         // 1: the call is over, all actors leave
  Line<u32> heartbeat;  // sweeps of the scheduler, by which a processor can tell a wait from a dead
                        // OS block
};

/// The actors that find the parts of a call's tiles, where that is open when the call begins
/// (Geometry::plans_few_rows). The first actor that exchanges the word decides, and it stays so.
enum class FoundBy : u32 {
  nobody,      ///< not decided, as in every new call
  processors,  ///< by the counts, which are all here
  subscriber,  ///< by the subscriber of arrivals, which hands them out in the ready ring
};

/// Where a mailbox's words start and how many there are (mailbox.hpp).
struct MailboxView {
  u64* words;
  u32 capacity;
};

/// The parts of a rank's memory: where each begins, or how many bytes it has.
template <class T>
struct MemoryParts {
  T control;
  T tables;
  T records;
};

/// Byte offsets of one rank's own memory; the same arithmetic sizes the allocations and finds the
/// arrays.
class RankMemory {
 public:
  static MemoryParts<u64> bytes_of_parts(const Geometry& geometry) {
    return RankMemory(geometry, MemoryParts<u8*>{}).bytes_;
  }
  /// Bytes of all three parts together.
  static u64 bytes(const Geometry& geometry) {
    const MemoryParts<u64> bytes = bytes_of_parts(geometry);
    return bytes.control + bytes.tables + bytes.records;
  }

  /// `geometry` must outlive this object.
  RankMemory(const Geometry& geometry, const MemoryParts<u8*>& bases) : geometry_(geometry) {
    lay_out(bases);
  }
  /// The memory of a layer that shares nothing: all three parts from `base` on.
  RankMemory(const Geometry& geometry, u8* base) : RankMemory(geometry, behind(geometry, base)) {}

  static MemoryParts<u8*> behind(const Geometry& geometry, u8* base) {
    const MemoryParts<u64> bytes = bytes_of_parts(geometry);
    return {base, base + bytes.control, base + bytes.control + bytes.tables};
  }

  /// 1: an actor of this rank has written its failure.
  u32* failure_claimed() const { return epoch + 1; }
  /// 1: an actor puts it to the remote peers.
  u32* failure_put() const { return epoch + 2; }
  CallState& call(u32 call_epoch) const { return call_states[call_epoch & 1]; }
  MailboxView mailbox(TaskKind kind) const {
    const u32 index = static_cast<u32>(kind);
    return MailboxView{mailbox_words_[index], mailbox_capacities_[index]};
  }

  /// Every part has its own slot, and every processor may wait for one slot beyond them.
  u64 ring_slots() const { return geometry_.get().parts_max() + geometry_.get().processors; }

  u32* send_starts(u32 peer) const {
    return send_start + u64{peer} * (geometry_.get().local_experts() + 1);
  }
  u32* receive_starts(u32 source) const {
    return receive_start + u64{source} * (geometry_.get().local_experts() + 1);
  }
  /// Slots taken in a remote peer's outbox in this call. Alternates by parity, as the call states
  /// do.
  u32* outbox_tickets(u32 call_epoch, u32 peer) const { return &outbox_line(peer, call_epoch & 1); }
  /// Requests to a remote peer, in the order in which they were posted (packet.hpp).
  u64* outbox_of(u32 peer) const { return outboxes + u64{peer} * outbox_slots(); }
  /// Requests that an outbox has room for: at least Geometry::outbox_words(), and whole lines.
  u32 outbox_slots() const {
    return align_up(geometry_.get().outbox_words(), u32{kCacheLine / sizeof(u64)});
  }
  /// Rows of both rounds that we have put to a remote peer since the last reset, modulo 2^32.
  u32* rows_put(u32 peer) const { return &outbox_line(peer, 2); }
  /// Rows from a remote peer that we have echoed to it, counted in the same way. Written by the
  /// first sender.
  u32* rows_told(u32 peer) const { return rows_put(peer) + 1; }
  /// Rows that couriers have sent to a peer in this call. Alternates by parity, as the call states
  /// do.
  u32* rows_carried(u32 call_epoch, u32 peer) const {
    return carried + u64{call_epoch & 1} * geometry_.get().world + peer;
  }
  /// Rows that we send to `peer` in this call; valid once `routed` has been acquired.
  u32 rows_sent(u32 peer) const { return send_starts(peer)[geometry_.get().local_experts()]; }
  /// Where the results begin that `peer` computes of our rows, as Layout::result counts; valid as
  /// rows_sent is.
  u32 first_result(const Layout& layout, u32 peer) const {
    return layout.first_result(peer, geometry_.get().tells_bases() ? result_first[peer] : 0);
  }
  /// The flag of a chunk that couriers have completed.
  u32* replicated_flag(u32 source, u32 chunk) const {
    return replicated + u64{source} * geometry_.get().chunks() + chunk;
  }
  /// The flag of a chunk for a peer whose results are back; for calls that reuse slots of a cell.
  u32* chunk_back(u32 peer, u32 chunk) const {
    return chunks_back + u64{peer} * geometry_.get().chunks() + chunk;
  }
  /// Rows that `source` sends us in this call; valid once its counts are known.
  u32 rows_received(u32 source) const {
    return receive_starts(source)[geometry_.get().local_experts()];
  }

  Tally& os_tally() const { return tallies[geometry_.get().tallies() - 1]; }

  // --- Control ---

  u32* epoch = nullptr;         // the call that is running or will run next, from 1; followed by
                                // failure_claimed() and failure_put()
  u64* blocks_ended = nullptr;  // blocks of all launches since the last reset (attendance.hpp)
  u32* blocks_begun = nullptr;  // [processor, then the OS block]: launches in which the block has
                                // begun
  CallState* call_states = nullptr;
  u32* carried = nullptr;             // rows_carried()
  Line<u32>* outbox_heads = nullptr;  // [remote peer]: tickets by parity, rows put and echoed

  // --- Records ---

  u32* calls = nullptr;      // calls of this layer that have ended well; counted where there are
                             // faults
  Tally* tallies = nullptr;  // [processor, then courier, then the OS block]
  CallRecord* record = nullptr;
  PeerRecord* peer_records = nullptr;  // [peer]
  u32* send_start = nullptr;     // [peer][X + 1]: first row of each expert in the order of sending
  u32* receive_start = nullptr;  // [source][X + 1]: first row of each expert in the order of
                                 // arrival
  u32* trace_counts = nullptr;   // [actor, as Trace numbers them]: events, noted or not
  TraceEvent* trace_events = nullptr;  // [actor][event]
  FaultPlan* faults = nullptr;         // all zeros in a world without faults
  // Where experts are (placement.hpp), as the host wrote it; empty without a placement table.
  u32* places_from = nullptr;  // [expert, then the end]: index in `places` of its first place
  u32* places = nullptr;       // of all experts: rank * X + local

  // --- Tables ---
  //
  // Words in them carry the epoch. Where layers of other shapes make calls between, a shape's
  // epochs rise but are not consecutive: nothing here may pass from one call to the next.

  Task* tasks = nullptr;  // [tile]
  u64* ring = nullptr;
  u64* dispatch_list = nullptr;     // ReadyWords: what couriers take, in this order
  u64* replication_list = nullptr;  // ReadyWords: chunks that couriers complete
  u32* replicated = nullptr;        // [source][chunk]: the epoch, sealed, in which a chunk of a
                                    // source that sends each token once was last complete
  u32* chunks_back = nullptr;       // [peer][chunk]: the epoch, sealed, in which the chunk's
                                    // results were last here; where cells are rings

  // Completion counters; the actor that completes a chunk, a block or a tile sets its counter back
  // to zero. The counter of a GEMM0 that processors wait for is cleared by the actor that completes
  // GEMM1.
  u32* chunk_rows_done = nullptr;      // [peer][chunk]: rows of Dispatch
  u32* route_parts_done = nullptr;     // [block]
  u32* product0_parts_done = nullptr;  // [tile, then tile of tokens]
  u32* product1_parts_done = nullptr;  // [tile, then tile of tokens]
  u32* tiles_multiplied = nullptr;     // [tile]: the epoch, sealed, in which its GEMM1 was last
                                       // done; where slots between the products are reused
  u32* shared_tiles_done = nullptr;    // tiles of tokens
  u32* shared_results_here = nullptr;  // the epoch, sealed, in which all their results last were
                                       // here
  float* shared_weight = nullptr;      // [token]: weight of the shared experts' result, where it
                                       // has one
  u32* partials_done = nullptr;        // [owner][group]: tokens whose partial sums have been sent

  // Routing (routing_map.hpp): what Route wrote for each assignment (pair) and each block of
  // tokens.
  u8* kept_sums = nullptr;     // [token][kept_bytes]: partial sums of gate logits
  u32* pair_expert = nullptr;  // the expert's place; kNone: unused slot
  u64* choices = nullptr;      // pair_expert where tokens are read in place, as count_word; for
                               // processors that wait for it before routing is over
  float* pair_weight = nullptr;
  u32* pair_rank = nullptr;    // how many earlier pairs of the same block chose the same expert
  u32* block_pairs = nullptr;  // pairs of a block, sorted by expert
  u32* block_first = nullptr;  // [block][expert]: where the expert's pairs start in block_pairs
  u32* block_base = nullptr;   // [block][expert]: pairs of the expert in this block; after the last
                               // Route part, those in the blocks before
  u32* row_pair = nullptr;     // [peer][row in the order of sending]: the pair that it carries
  u32* pair_row = nullptr;     // [pair]: where its result comes back, as Layout::result counts; on
                               // the GPU, for a pair without a row, its zero expert or kNone
  u32* result_first = nullptr;  // [peer]: where the results that it computes begin, if other ranks
                                // compute some too
  u32* token_rows = nullptr;    // [token]: rows that it has sent, where they are not top_k for all
  u32* ready_tokens = nullptr;  // [subscriber][index]: tokens whose rows are all back, in the order
                                // in which they came

  u64* outboxes = nullptr;  // outbox_of() each remote peer

 private:
  static constexpr u32 kOutboxHead = 3;  // lines of a peer

  u32& outbox_line(u32 peer, u32 line) const {
    return outbox_heads[u64{peer} * kOutboxHead + line].value;
  }

  /// Lays out the arrays of each part one after the other.
  void lay_out(const MemoryParts<u8*>& bases) {
    const Geometry& geometry = geometry_.get();
    u8* base = bases.control;
    u64 offset = 0;
    const auto take = [&offset, &base]<class T>(T*& array, u64 count) {
      array = reinterpret_cast<T*>(base + offset);
      offset = align_up(offset + count * sizeof(T), u64{kCacheLine});
    };
    const u64 world = geometry.world;
    const u64 local = geometry.local_experts();
    const u64 blocks = geometry.route_blocks();
    take(epoch, 3);
    take(blocks_ended, 1);
    take(blocks_begun, geometry.processors + 1);
    take(call_states, 2);
    take(carried, 2 * world);
    if (geometry.remote != 0) {
      take(outbox_heads, world * kOutboxHead);
    }
    bytes_.control = offset;

    base = bases.records;
    offset = 0;
    take(calls, 1);
    take(tallies, geometry.tallies());
    take(record, 1);
    take(peer_records, world);
    take(send_start, world * (local + 1));
    take(receive_start, world * (local + 1));
    if (geometry.trace_events != 0) {
      take(trace_counts, geometry.trace_actors());
      take(trace_events, u64{geometry.trace_actors()} * geometry.trace_events);
    }
    take(faults, 1);
    take(places_from, geometry.placed() ? geometry.placed_experts + 1 : 0);
    take(places, geometry.placed() ? geometry.experts : 0);
    bytes_.records = offset;

    base = bases.tables;
    offset = 0;
    take(tasks, geometry.tiles_max());
    take(ring, ring_slots());
    for (u32 kind = 0; kind < kTaskKinds; ++kind) {
      // Only tiles wait for the scheduler; other parts are handed out by the actors that know them.
      const bool of_tiles = is_product(static_cast<TaskKind>(kind));
      mailbox_capacities_[kind] = of_tiles ? geometry.tiles_max() : 0;
      take(mailbox_words_[kind], mailbox_capacities_[kind]);
    }
    take(dispatch_list, geometry.dispatch_parts_max());
    take(replication_list, geometry.replications_max());
    take(replicated, geometry.replications_max());
    take(chunks_back, geometry.rings_cells() ? world * geometry.chunks() : 0);
    take(chunk_rows_done, world * geometry.chunks());
    take(route_parts_done, blocks);
    const u64 tiles = geometry.tiles_max() + geometry.shared_tiles(geometry.max_tokens);
    take(product0_parts_done, tiles);
    take(product1_parts_done, tiles);
    take(tiles_multiplied, geometry.reuses_places() ? geometry.tiles_max() : 0);
    take(shared_tiles_done, geometry.shares() ? 1 : 0);
    take(shared_results_here, geometry.shares() ? 1 : 0);
    take(shared_weight, geometry.shared_results());
    take(partials_done, geometry.sum_groups_all());
    take(kept_sums, u64{geometry.max_tokens} * geometry.kept_bytes);
    take(pair_expert, geometry.pairs());
    take(choices, geometry.plans_itself() ? Geometry::kInPlacePairs : 0);
    take(pair_weight, geometry.pairs());
    take(pair_rank, geometry.pairs());
    take(block_pairs, geometry.pairs());
    take(block_first, blocks * geometry.experts);
    take(block_base, blocks * geometry.experts);
    take(row_pair, world * geometry.chunks() * geometry.chunk_rows);
    take(pair_row, geometry.pairs());
    take(result_first, geometry.tells_bases() ? world : 0);
    take(token_rows, geometry.max_tokens);
    take(ready_tokens, u64{kReturnsSubscribersMax} * geometry.max_tokens);
    take(outboxes, world * outbox_slots());
    bytes_.tables = offset;
  }

  GeometryOf geometry_;
  MemoryParts<u64> bytes_ = {};
  u64* mailbox_words_[kTaskKinds];
  u32 mailbox_capacities_[kTaskKinds];
};

}  // namespace moeos
