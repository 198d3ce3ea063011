// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix multiply-accumulate: 64 x N += (64 x 16) * (N x 16)^T for N of 64, 128 and 256,
// both operands in shared memory, or the rows in registers, fp32 accumulators in registers; and for
// e4m3 codes 64 x N += (64 x 32) * (N x 32)^T for N of 128, or of 16 and 64 with the rows in
// registers. Source: PTX ISA, "wgmma.mma_async" and its matrix descriptors.
#pragma once

#include "kernels/sm90/ptx/barrier.cuh"
#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// Describes rows of 64 two-byte elements or 128 codes (128 bytes, the swizzle's width), K-major,
/// 128-byte swizzle, to wgmma. The address must be a multiple of 1024 plus a multiple of 32 below
/// 128 (a step along K).
inline u64 matrix_descriptor(const void* shared) {
  constexpr u64 kSwizzle128 = u64{1} << 62;
  constexpr u64 kEightRows = u64{1024 >> 4} << 32;  // stride between groups of eight rows
  constexpr u64 kUnused = u64{1} << 16;  // leading offset: ignored for swizzled K-major operands
  return kSwizzle128 | kEightRows | kUnused | ((shared_address(shared) & 0x3FFFF) >> 4);
}

/// The major order of an operand in shared memory: each of its rows or columns along the depth, or
/// rows of the depth, each with 64 of its columns.
enum class Major : u32 { depth = 0, columns = 1 };

/// Describes an operand whose rows are the depth: boxes of 64 rows and 64 columns, in the order of
/// their columns, 128-byte swizzle. The address is a multiple of 1024; a step of 16 along the depth
/// is kDepthStepBytes.
inline constexpr u32 kColumnsBoxBytes = 64 * 128;
inline constexpr u32 kDepthStepBytes = 16 * 128;
inline u64 columns_descriptor(const void* shared) {
  constexpr u64 kSwizzle128 = u64{1} << 62;
  constexpr u64 kEightRows = u64{1024 >> 4} << 32;  // stride between groups of eight rows
  constexpr u64 kBox = u64{kColumnsBoxBytes >> 4} << 16;
  return kSwizzle128 | kEightRows | kBox | ((shared_address(shared) & 0x3FFFF) >> 4);
}

/// Orders register and shared accesses of the warpgroup before the products that follow.
inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 kPending>
inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accumulators across the asynchronous products.
template <u32 kRegisters>
inline void hold(float (&d)[kRegisters]) {
  for (u32 i = 0; i < kRegisters; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

/// Keeps the compiler from moving an operand in registers across the asynchronous products.
inline void hold(u32 (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

/// d += a * b^T for 64 rows and 64 columns.
template <bool kFloat16>
inline void multiply_accumulate(float (&d)[32], u64 a, u64 b) {
#define MOEOS_WGMMA(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                     \
               " {"                                                                            \
               "%0, %1, %2, %3, %4, %5, %6, %7, "                                              \
               "%8, %9, %10, %11, %12, %13, %14, %15, "                                        \
               "%16, %17, %18, %19, %20, %21, %22, %23, "                                      \
               "%24, %25, %26, %27, %28, %29, %30, %31}, "                                     \
               "%32, %33, 1, 1, 1, 0, 0;\n"                                                    \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),       \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),     \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
                 "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
                 "+f"(d[30]), "+f"(d[31])                                                      \
               : "l"(a), "l"(b))
  if constexpr (kFloat16) {
    MOEOS_WGMMA("f16");
  } else {
    MOEOS_WGMMA("bf16");
  }
#undef MOEOS_WGMMA
}

/// d += a * b^T for 64 rows and 64 columns, with the rows in registers: of each 16 columns, a lane
/// has columns 2l, 2l + 1 (l = lane % 4) of row lane / 4 of its warp's 16, of the row eight below,
/// and columns 2l + 8, 2l + 9 of both.
template <bool kFloat16>
inline void multiply_accumulate(float (&d)[32], const u32 (&a)[4], u64 b) {
#define MOEOS_WGMMA(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                     \
               " {"                                                                            \
               "%0, %1, %2, %3, %4, %5, %6, %7, "                                              \
               "%8, %9, %10, %11, %12, %13, %14, %15, "                                        \
               "%16, %17, %18, %19, %20, %21, %22, %23, "                                      \
               "%24, %25, %26, %27, %28, %29, %30, %31}, "                                     \
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n"                                      \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),       \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),     \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
                 "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
                 "+f"(d[30]), "+f"(d[31])                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kFloat16) {
    MOEOS_WGMMA("f16");
  } else {
    MOEOS_WGMMA("bf16");
  }
#undef MOEOS_WGMMA
}

/// d += a * b^T for 64 rows and 128 columns.
template <bool kFloat16, Major kOfA = Major::depth, Major kOfB = Major::depth>
inline void multiply_accumulate(float (&d)[64], u64 a, u64 b) {
#define MOEOS_WGMMA(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                    \
               " {"                                                                            \
               "%0, %1, %2, %3, %4, %5, %6, %7, "                                              \
               "%8, %9, %10, %11, %12, %13, %14, %15, "                                        \
               "%16, %17, %18, %19, %20, %21, %22, %23, "                                      \
               "%24, %25, %26, %27, %28, %29, %30, %31, "                                      \
               "%32, %33, %34, %35, %36, %37, %38, %39, "                                      \
               "%40, %41, %42, %43, %44, %45, %46, %47, "                                      \
               "%48, %49, %50, %51, %52, %53, %54, %55, "                                      \
               "%56, %57, %58, %59, %60, %61, %62, %63}, "                                     \
               "%64, %65, 1, 1, 1, %66, %67;\n"                                                \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),       \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),     \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
                 "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
                 "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
                 "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
                 "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
                 "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                            \
               : "l"(a), "l"(b), "n"(static_cast<u32>(kOfA)), "n"(static_cast<u32>(kOfB)))
  if constexpr (kFloat16) {
    MOEOS_WGMMA("f16");
  } else {
    MOEOS_WGMMA("bf16");
  }
#undef MOEOS_WGMMA
}

/// d = a * b^T, or d += a * b^T, for 64 rows and 128 columns of 32 e4m3 codes each.
template <bool kAdds>
inline void multiply_codes(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
      " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, %66, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "n"(kAdds ? 1 : 0));
}

/// multiply_codes for 16 or 64 columns, with the rows in registers: of each 16 codes, a lane has
/// four from 4 (lane % 4) on, of row lane / 4 of its warp's 16, of the row eight below, and then of
/// the second 16 codes of both.
template <bool kAdds>
inline void multiply_codes(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
      " {"
      "%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, %13, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
}
template <bool kAdds>
inline void multiply_codes(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
      " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %37, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
}

/// d += a * b^T for 64 rows and 256 columns.
template <bool kFloat16, Major kOfA = Major::depth, Major kOfB = Major::depth>
inline void multiply_accumulate(float (&d)[128], u64 a, u64 b) {
#define MOEOS_WGMMA(type)                                                                          \
  asm volatile(                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                 \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31, "                                                   \
      "%32, %33, %34, %35, %36, %37, %38, %39, "                                                   \
      "%40, %41, %42, %43, %44, %45, %46, %47, "                                                   \
      "%48, %49, %50, %51, %52, %53, %54, %55, "                                                   \
      "%56, %57, %58, %59, %60, %61, %62, %63, "                                                   \
      "%64, %65, %66, %67, %68, %69, %70, %71, "                                                   \
      "%72, %73, %74, %75, %76, %77, %78, %79, "                                                   \
      "%80, %81, %82, %83, %84, %85, %86, %87, "                                                   \
      "%88, %89, %90, %91, %92, %93, %94, %95, "                                                   \
      "%96, %97, %98, %99, %100, %101, %102, %103, "                                               \
      "%104, %105, %106, %107, %108, %109, %110, %111, "                                           \
      "%112, %113, %114, %115, %116, %117, %118, %119, "                                           \
      "%120, %121, %122, %123, %124, %125, %126, %127}, "                                          \
      "%128, %129, 1, 1, 1, %130, %131;\n"                                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), \
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),        \
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),        \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),        \
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])         \
      : "l"(a), "l"(b), "n"(static_cast<u32>(kOfA)), "n"(static_cast<u32>(kOfB)))
  if constexpr (kFloat16) {
    MOEOS_WGMMA("f16");
  } else {
    MOEOS_WGMMA("bf16");
  }
#undef MOEOS_WGMMA
}

}  // namespace moeos::sm90
