// Dispatch: tokens' rows pass through the stages, to their experts' ranks.
//
// The fetch warp has looked up which, the load warp brings them in, and the store warp takes them
// to memory, here or at a peer. May not know: flags.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/packet.hpp"

namespace moeos::sm90 {

/// A chunk of a Dispatch part: which pairs its rows carry, one a lane.
using ChunkPairs = u32[Machine::kLanes];

/// How many rows it has; by all lanes.
inline u32 rows_of(const ChunkPairs& pairs) {
  return Machine::count(Machine::ballot(pairs[Machine::lane()] != kNone));
}

/// The load warp's side of a Dispatch part: brings a chunk's tokens into the stages.
inline void load_chunk(const RankArguments& arguments, const ChunkPairs& pairs, Loader& loader) {
  const u32 lane = Machine::lane();
  const u32 rows = rows_of(pairs);
  const u8* source = arguments.x_rows + u64{pairs[lane] / kGeometry.top_k} * kGeometry.row_bytes;
  for (u32 first = 0; first < kGeometry.chunk_rows; first += kDispatchRows, loader.advance()) {
    const u32 end = minimum(rows, first + kDispatchRows);
    Barrier& full = loader.full();
    if (lane == 0) {
      loader.wait();
      full.arrive_expecting(first < end ? (end - first) * kGeometry.row_bytes : 0);
    }
    __syncwarp();
    if (lane >= first && lane < end) {
      u8* to = reinterpret_cast<u8*>(&loader.stage());
      load_bytes(source, to + (lane - first) * kGeometry.row_bytes, kGeometry.row_bytes, full);
    }
  }
}

/// The store warp's place in the stages of a Dispatch part: what it stores next, and the stages
/// that its stores may still read. A peer's memory takes them slowly, so some are under way
/// together.
class StoredStages {
 public:
  explicit StoredStages(RingPosition<kStages> first) : next_(first), oldest_(first) {}

  const RingPosition<kStages>& next() const { return next_; }
  /// The stores out of the next stage have been issued.
  void advance(Shared& shared) {
    commit_stores();
    next_.advance();
    if (++unread_ > kUnread) {
      wait_until_read<kUnread>();
      release(shared);
    }
  }
  void finish(Shared& shared) {
    wait_until_read<0>();
    while (unread_ > 0) {
      release(shared);
    }
  }

 private:
  // The other stages are what the loads have meanwhile.
  static constexpr u32 kUnread = kStages / 2;

  void release(Shared& shared) {
    __syncwarp();
    if (Machine::lane() == 0) {
      shared.stage_empty[oldest_.index].arrive(kConsumerWarps);
    }
    oldest_.advance();
    --unread_;
  }

  RingPosition<kStages> next_;
  RingPosition<kStages> oldest_;
  u32 unread_ = 0;
};

/// The store warp's side: takes them to their cells, or to the staging copies of a remote peer.
/// They are on their way when it returns; wait_until_stored() waits for them.
inline void store_chunk(const Rank<Machine>& rank, const RoutingMap& map, u32 peer, u32 chunk,
                        const ChunkPairs& pairs, Shared& shared, StoredStages& stages) {
  const u32 lane = Machine::lane();
  const u32 rows = rows_of(pairs);
  u64 destination = 0;
  if (lane < rows) {
    const u32 number = row_number(rank, map, peer, chunk * kGeometry.chunk_rows + lane);
    destination = reinterpret_cast<u64>(outgoing_row(rank, peer, Round::dispatch, number));
  }
  for (u32 first = 0; first < kGeometry.chunk_rows; first += kDispatchRows) {
    const RingPosition<kStages>& stage = stages.next();
    shared.stage_full[stage.index].wait(stage.parity);
    if (lane >= first && lane < minimum(rows, first + kDispatchRows)) {
      const u8* from = reinterpret_cast<const u8*>(&shared.stages[stage.index]);
      store_bytes(from + (lane - first) * kGeometry.row_bytes, destination, kGeometry.row_bytes);
    }
    stages.advance(shared);
  }
}

}  // namespace moeos::sm90
