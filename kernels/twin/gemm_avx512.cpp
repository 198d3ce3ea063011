// SPDX-License-Identifier: Apache-2.0
// gemm.hpp for x86-64 processors with AVX-512F, BW, VL and DQ. Needs no compiler flags.
#if defined(__x86_64__)

#include "kernels/twin/gemm.hpp"  // first: its includes must stay portable

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define MOEOS_GEMM_TABLE kAvx512Gemm
#define MOEOS_GEMM_INSTRUCTION_SET "avx512"
#define MOEOS_GEMM_LANES 16
#include "kernels/twin/gemm_kernel.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
