// SPDX-License-Identifier: Apache-2.0
// The emulated GPU's matrix products: what one lane computes of them. They are compiled once for
// all kernels, and optimised, as most of a kernel's own work is in them. Must not depend on:
// kernels.
#pragma once

namespace emulator {

enum class Numbers { bfloat16, float16 };

/// An operand in shared memory, in rows of 128 bytes, swizzled. Its row r has 16 numbers: those
/// from `at` on in the r-th row; or of `columns` one of each row, in boxes of 64.
struct Operand {
  const unsigned char* at;
  bool columns = false;
};
inline constexpr unsigned kColumnsBoxBytes = 64 * 128;

/// Adds to the accumulators of a lane, as PTX ISA lays them out, what 64 rows of `a` make of
/// `registers` / 2 rows of `b`. `thread`: of its warpgroup.
void multiply(float* d, unsigned registers, unsigned thread, Numbers numbers, Operand a, Operand b);

/// The same of the two rows of which `rows` has the numbers.
void multiply_rows(float* d, unsigned registers, unsigned thread, Numbers numbers,
                   const float (&rows)[2][16], Operand b);

/// The same of rows of 32 codes; without `adds` in place of what the accumulators have been.
void multiply_codes(float* d, unsigned registers, unsigned thread, bool adds,
                    const unsigned char* a, const unsigned char* b);

}  // namespace emulator
