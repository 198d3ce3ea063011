// SPDX-License-Identifier: Apache-2.0
// gemm.hpp for any processor that the compiler's own flags allow.
#define MOEOS_GEMM_TABLE kPortableGemm
#define MOEOS_GEMM_INSTRUCTION_SET "portable"
#define MOEOS_GEMM_LANES 4
#include "kernels/twin/gemm_kernel.hpp"
