// Matrix stores: 8 x 8 fragments of a warp into shared memory. Source: PTX ISA, "stmatrix".
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/base.hpp"

namespace moeos::sm90 {

/// Four fragments: lanes 8m to 8m + 7 name the rows (16 bytes each) of the m-th; its elements lie
/// in the warp's m-th arguments as a wgmma accumulator holds them.
inline void store_matrices(void* row, u32 first, u32 second, u32 third, u32 fourth) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(first), "r"(second), "r"(third), "r"(fourth)
               : "memory");
}

}  // namespace moeos::sm90
