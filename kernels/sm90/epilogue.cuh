// From accumulators to memory: bias, activation, conversion, and rows written 256 bytes at a time.
//
// A wgmma accumulator d of a thread holds, for j in [0, 32): columns 8j + 2(lane % 4) + {0, 1} of
// row lane / 4 (d[4j], d[4j+1]) and of row lane / 4 + 8 (d[4j+2], d[4j+3]) of its warp's 16 rows.
// Results go through shared memory, so that a row leaves as whole sectors. May not know: whose row
// it is.
#pragma once

#include "kernels/sm90/activation.cuh"
#include "kernels/sm90/arguments.cuh"
#include "kernels/sm90/block.cuh"

namespace moeos::sm90 {

inline constexpr u32 kVectorBytes = 16;
inline constexpr u32 kVectorsPerRow = kStagingColumns * 2 / kVectorBytes;

/// Where 16 bytes of a staged row lie; rows of a group of eight use different banks.
inline u32 staging_offset(u32 row, u32 vector) {
  return (row * kVectorsPerRow + (vector ^ (row % 8))) * kVectorBytes;
}

/// Two neighbouring columns of a staged row.
inline void stage(u8* staging, u32 row, u32 column, float low, float high) {
  const u32 offset = staging_offset(row, column / 8) + column % 8 * 2;
  *reinterpret_cast<u32*>(staging + offset) = Element::pack(low, high);
}

/// Writes a warpgroup's staged columns [first, first + 128) of its rows to shared.destinations;
/// columns from `columns` on do not exist. Called by the 128 threads of the group.
inline void write_staged(const u8* staging, const u64* destinations, u32 rows, u32 first,
                         u32 columns) {
  const u32 thread = threadIdx.x % 128;
  const u32 vector = thread % kVectorsPerRow;
  const u32 column = first + vector * (kVectorBytes / 2);
  for (u32 row = thread / kVectorsPerRow; row < rows; row += 128 / kVectorsPerRow) {
    const u64 destination = destinations[row];
    if (destination != 0 && column < columns) {
      *reinterpret_cast<uint4*>(destination + u64{column} * 2) =
          *reinterpret_cast<const uint4*>(staging + staging_offset(row, vector));
    }
  }
}

inline float bias_at(const u8* bias, u64 index, bool exists) {
  if constexpr (kBias) {
    return exists ? element_at<Element>(bias, index) : 0.0F;
  } else {
    return 0.0F;
  }
}

/// First product: activation(d + b1), 128 (gated) or 256 columns.
inline void finish_gemm0(float (&d)[128], const RankArguments& arguments, const Task& task,
                         u32 part, u32 group, u32 rows, Shared& shared) {
  u8* staging = shared.staging[group];
  const u64* destinations = shared.destinations + group * kConsumerRows;
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  const u32 first = part * kGemm0Columns;
  const u64 bias_row = u64{task.local_expert} * kShape.w1_rows();
  constexpr u32 kHalves = kGemm0Columns / kStagingColumns;
  for (u32 half = 0; half < kHalves; ++half) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
      const u32 column = 8 * j + 2 * (lane % 4);
#pragma unroll
      for (u32 lower = 0; lower < 2; ++lower) {
        float results[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const u32 unit = first + half * kStagingColumns + column + i;
          const bool exists = unit < kShape.intermediate;
          // `half` only selects registers when there are two halves; both cases are unrolled.
          const float value =
              (half == 0 ? d[4 * j + 2 * lower + i] : d[64 + 4 * j + 2 * lower + i]) +
              bias_at(arguments.b1, bias_row + unit, exists);
          if constexpr (kShape.gated()) {
            const float up = d[64 + 4 * j + 2 * lower + i] +
                             bias_at(arguments.b1, bias_row + kShape.intermediate + unit, exists);
            results[i] = swiglu < kShape.swiglu_limit<kInfinity>(value, up, kShape.swiglu_limit);
          } else {
            results[i] = activate<kShape.activation>(value);
          }
        }
        stage(staging, warp * 16 + lane / 4 + 8 * lower, column, results[0], results[1]);
      }
    }
    named_barrier(kFirstGroupBarrier + group, 128);
    write_staged(staging, destinations, rows, first + half * kStagingColumns, kShape.intermediate);
    named_barrier(kFirstGroupBarrier + group, 128);
  }
}

/// Second product: d + b2, 256 columns in two halves.
inline void finish_gemm1(float (&d)[128], const RankArguments& arguments, const Task& task,
                         u32 part, u32 group, u32 rows, Shared& shared) {
  u8* staging = shared.staging[group];
  const u64* destinations = shared.destinations + group * kConsumerRows;
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  const u32 first = part * kTileColumns;
  const u64 bias_row = u64{task.local_expert} * kShape.hidden;
#pragma unroll
  for (u32 half = 0; half < kTileColumns / kStagingColumns; ++half) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
      const u32 column = 8 * j + 2 * (lane % 4);
      const u64 unit = first + half * kStagingColumns + column;
      const float low = bias_at(arguments.b2, bias_row + unit, unit < kShape.hidden);
      const float high = bias_at(arguments.b2, bias_row + unit + 1, unit + 1 < kShape.hidden);
#pragma unroll
      for (u32 lower = 0; lower < 2; ++lower) {
        const float* pair = &d[64 * half + 4 * j + 2 * lower];
        stage(staging, warp * 16 + lane / 4 + 8 * lower, column, pair[0] + low, pair[1] + high);
      }
    }
    named_barrier(kFirstGroupBarrier + group, 128);
    write_staged(staging, destinations, rows, first + half * kStagingColumns, kShape.hidden);
    named_barrier(kFirstGroupBarrier + group, 128);
  }
}

}  // namespace moeos::sm90
