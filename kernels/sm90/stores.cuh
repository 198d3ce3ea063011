// What the store warp does: staged results and dispatched rows leave for memory, here or at a peer.
//
// Results leave by plain stores of 16 bytes: they are done as soon as they are issued, where a bulk
// store of a part's short rows was waited for until memory had answered. Dispatched rows are long,
// and leave the stages they were loaded to by bulk stores. May not know: what the results are;
// flags.
#pragma once

#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "runtime/packet.hpp"

namespace moeos::sm90 {

/// Where a row of the tile's result goes: to the intermediate buffer, or to its owner's combine
/// cell. 0: nowhere, it is padding.
inline u64 result_row(const RankArguments& arguments, const Rank<Machine>& rank, const Task& task,
                      u32 row) {
  if (task.kind == TaskKind::gemm0) {
    // Padding rows too: the second product reads them, and must not read uninitialised memory.
    return row < task.padded_rows ? reinterpret_cast<u64>(arguments.intermediate_rows) +
                                        (u64{task.first_result} + row) * kGeometry.hidden_bytes
                                  : 0;
  }
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment segment = task.segments[s];
    if (row >= first && row < first + segment.rows) {
      return reinterpret_cast<u64>(
          outgoing_row(rank, segment.source, Round::combine, segment.first_row + row - first));
    }
    first += align_up(u32{segment.rows}, Geometry::kSegmentAlign);
  }
  return 0;
}

/// Copies `columns` columns of 32 staged rows to column `first` of the rows whose addresses the
/// lanes hold (0: nowhere), two rows at a time.
inline void copy_rows(const u8* staged, u64 row, u32 first, u32 columns) {
  constexpr u32 kVectorBytes = kStagingPiece;
  constexpr u32 kVectors = kStagingStride / kVectorBytes;
  constexpr u32 kRowsAtOnce = Machine::kLanes / kVectors;
  const u32 turn = Machine::lane() / kVectors;
  const u32 vector = Machine::lane() % kVectors;
  const bool exists = vector * (kVectorBytes / 2) < columns;
#pragma unroll 8
  for (u32 i = 0; i < Machine::kLanes; i += kRowsAtOnce) {
    const u64 to = Machine::broadcast(row, i + turn);
    if (to != 0 && exists) {
      *reinterpret_cast<uint4*>(to + u64{first} * 2 + vector * kVectorBytes) =
          *reinterpret_cast<const uint4*>(staged + (i + turn) * kStagingStride +
                                          staging_place(i + turn, vector));
    }
  }
}

/// Takes one part's results out of the staging memory as the consumers fill it.
inline void store_tile(const RankArguments& arguments, const Rank<Machine>& rank, const Task& task,
                       u32 part, Shared& shared, StagingPosition (&positions)[kConsumers]) {
  const bool first_product = task.kind == TaskKind::gemm0;
  const u32 columns = first_product ? kShape.intermediate : kShape.hidden;
  const u32 width = columns_of(task);
  constexpr u32 kLaneRows = kConsumerRows / Machine::kLanes;
  u64 rows[kConsumers * kLaneRows];
#pragma unroll
  for (u32 i = 0; i < kConsumers * kLaneRows; ++i) {
    rows[i] = result_row(arguments, rank, task, i * Machine::kLanes + Machine::lane());
  }
  for (u32 first = 0; first < width; first += kStagingColumns) {
    const u32 column = part * width + first;
    const u32 count =
        column < columns ? minimum(minimum(kStagingColumns, width), columns - column) : 0;
#pragma unroll
    for (u32 group = 0; group < kConsumers; ++group) {
      if (group * kConsumerRows < task.padded_rows) {
        shared.staging_full[group].wait(positions[group].parity);
#pragma unroll
        for (u32 i = 0; i < kLaneRows; ++i) {
          copy_rows(shared.staging[group] + i * Machine::kLanes * kStagingStride,
                    rows[group * kLaneRows + i], column, count);
        }
        __syncwarp();
        if (Machine::lane() == 0) {
          shared.staging_empty[group].arrive();
        }
        positions[group].advance();
      }
    }
  }
}

/// How many rows the chunk of a Dispatch part has; by all lanes.
inline u32 rows_of(const Slot& slot) {
  return static_cast<u32>(__popc(Machine::ballot(slot.pairs[Machine::lane()] != kNone)));
}

/// The load warp's side of a Dispatch part: brings the chunk's tokens into the stages.
inline void load_chunk(const RankArguments& arguments, const Slot& slot, Loader& loader) {
  const u32 lane = Machine::lane();
  const u32 rows = rows_of(slot);
  const u8* source =
      arguments.x_rows + u64{slot.pairs[lane] / kGeometry.top_k} * kGeometry.row_bytes;
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

/// The store warp's side: takes them to their cells, or to the staging copies of a remote peer.
inline void store_chunk(const Rank<Machine>& rank, const RoutingMap& map, const Task& task,
                        u32 part, const Slot& slot, Shared& shared, RingPosition<kStages>& stage) {
  const u32 lane = Machine::lane();
  const u32 rows = rows_of(slot);
  u64 destination = 0;
  if (lane < rows) {
    const u32 row = (task.first_chunk + part) * kGeometry.chunk_rows + lane;
    destination = reinterpret_cast<u64>(
        outgoing_row(rank, task.peer, Round::dispatch, row_number(rank, map, task.peer, row)));
  }
  for (u32 first = 0; first < kGeometry.chunk_rows; first += kDispatchRows, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    if (lane >= first && lane < minimum(rows, first + kDispatchRows)) {
      const u8* from = reinterpret_cast<const u8*>(&shared.stages[stage.index]);
      store_bytes(from + (lane - first) * kGeometry.row_bytes, destination, kGeometry.row_bytes);
    }
    commit_stores();
    wait_until_read();
    __syncwarp();
    if (lane == 0) {
      shared.stage_empty[stage.index].arrive(kConsumerWarps);
    }
  }
  wait_until_stored();
}

}  // namespace moeos::sm90
