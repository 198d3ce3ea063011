// Tensor memory accelerator: boxes of a matrix into shared memory. Source: PTX ISA,
// "cp.async.bulk.tensor".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/base.hpp"

namespace moeos::sm90 {

/// CUtensorMap, made by the host.
struct alignas(64) TensorMap {
  u8 bytes[128];
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

}  // namespace moeos::sm90
