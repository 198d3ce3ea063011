// SPDX-License-Identifier: Apache-2.0
// Stores that a condition does not turn into branches. Source: PTX ISA, "st".
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// Stores 16 bytes to global memory, here or at a peer, if `wanted`. With a branch, the compiler
/// would gather the stores of a whole tile, and first compute all that is to be stored.
inline void store_vector(bool wanted, u8* to, uint4 value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(wanted ? 1U : 0U),
      "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

/// Stores 8 bytes, and 4, if `wanted`.
inline void store_vector(bool wanted, u8* to, uint2 value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.global.v2.u32 [%1], {%2, %3};\n"
      "}" ::"r"(wanted ? 1U : 0U),
      "l"(to), "r"(value.x), "r"(value.y)
      : "memory");
}
inline void store_number(bool wanted, u8* to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.global.f32 [%1], %2;\n"
      "}" ::"r"(wanted ? 1U : 0U),
      "l"(to), "f"(value)
      : "memory");
}

}  // namespace moeos::sm90
