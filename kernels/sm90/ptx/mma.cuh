// SPDX-License-Identifier: Apache-2.0
// Products of one warp, with both operands in registers: 16 x 8 += (16 x 16) * (8 x 16)^T.
// Source: PTX ISA, "mma.sync" and "ldmatrix".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// Four matrices of 8 rows and 16 bytes, as columns of products. Lane i brings the address of row
/// i % 8 of matrix i / 8, and gets bytes 4 (lane % 4) on of row lane / 4 of each.
inline void load_matrices(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

/// d += a * b^T. a: of each 16 columns, a lane has columns 2l, 2l + 1 (l = lane % 4) of row lane /
/// 4, of the row eight below, and columns 2l + 8, 2l + 9 of both. b: the same two column pairs of
/// row lane / 4. d: columns 2l, 2l + 1 of a's first row, then of its second one.
template <bool kFloat16>
inline void multiply_in_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#define MOEOS_MMA(type)                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kFloat16) {
    MOEOS_MMA("f16");
  } else {
    MOEOS_MMA("bf16");
  }
#undef MOEOS_MMA
}

}  // namespace moeos::sm90
