// SPDX-License-Identifier: Apache-2.0
// Tensor memory accelerator: boxes of a matrix into shared memory, and runs of bytes in both
// directions. Source: PTX ISA, "cp.async.bulk.tensor" and "cp.async.bulk".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// CUtensorMap, made by the host.
struct alignas(64) TensorMap {
  u8 bytes[128];
};

/// How long L2 keeps lines that a copy has read, encoded as by createpolicy (PTX ISA has the
/// instruction, CUTLASS's TMA::CacheHintSm90 these values of it).
enum class CachePolicy : u64 {
  normal = 0x1000000000000000ULL,
  evict_first = 0x12F0000000000000ULL,
};

inline void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies the box of `map` whose first element is (row, column) to `destination` and counts its
/// bytes on `barrier`. Elements outside the matrix arrive as zeros.
inline void load_box(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                     u32 column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(shared_address(destination)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}

/// Rows of weights that a box holds in an order of its own.
inline constexpr u32 kOrderedRows = 32;

/// load_box for weights: a multiple of kOrderedRows rows from `row`, a multiple of 8, on. Of each
/// kOrderedRows, row 8b + 2a + i lies at 8a + 2b + i: its map has the dimensions columns, i, b
/// (each 8 rows; `row` is a number of these), a (each 2 rows), and kOrderedRows rows.
inline void load_weights(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                         u32 column, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %4, %3, %4, %4}], [%5], %6;" ::"r"(
          shared_address(destination)),
      "l"(&map), "r"(column), "r"(row / 8), "r"(0), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

/// Loads a box of transposed weights: of one matrix, from a row of its depth and a column on.
/// Elements beyond that matrix arrive as zeros.
inline void load_transposed(const TensorMap& map, void* destination, Barrier& barrier, u32 matrix,
                            u32 row, u32 column, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(destination)),
      "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

/// Loads rows of one matrix, from a row on that is a multiple of 8, in the map's order: it has the
/// dimensions columns, two that are eight rows, each eight rows, and matrices.
inline void load_ordered(const TensorMap& map, void* destination, Barrier& barrier, u32 matrix,
                         u32 row, u32 column) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %4, %4, %3, %5}], [%6];" ::"r"(shared_address(destination)),
      "l"(&map), "r"(column), "r"(row / 8), "r"(0), "r"(matrix), "r"(shared_address(&barrier))
      : "memory");
}

/// Copies `bytes` bytes from global memory and counts them on `barrier`. Addresses and bytes are
/// multiples of 16.
inline void load_bytes(const void* source, void* destination, u32 bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

/// Copies `bytes` bytes to global memory, here or at a peer, as part of this thread's next group.
inline void store_bytes(const void* source, u64 destination, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}
/// Copies a box of a matrix of five dimensions to memory, as part of the next group. Elements
/// beyond the matrix are left out.
inline void store_box(const TensorMap& map, const void* source, const u32 (&at)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], "
      "[%6];" ::"l"(&map),
      "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(source))
      : "memory");
}
inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until this thread's stores, except the last `kGroups` groups, have read their shared
/// memory.
template <u32 kGroups>
inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
/// Waits until this thread's stores are visible to it; then it may release them to others.
inline void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace moeos::sm90
