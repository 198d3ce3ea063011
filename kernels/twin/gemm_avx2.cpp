// SPDX-License-Identifier: Apache-2.0
// gemm.hpp for x86-64 processors with AVX2 and FMA. Needs no compiler flags.
#if defined(__x86_64__)

#include "kernels/twin/gemm.hpp"  // first: its includes must stay portable

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define MOEOS_GEMM_TABLE kAvx2Gemm
#define MOEOS_GEMM_INSTRUCTION_SET "avx2"
#define MOEOS_GEMM_LANES 8
#include "kernels/twin/gemm_kernel.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
