// SPDX-License-Identifier: Apache-2.0
// Loads that a condition does not turn into branches. Source: PTX ISA, "ld".
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// Loads 16 bytes of global memory if `wanted`, else zeros.
inline uint4 load_vector(bool wanted, const u8* from) {
  uint4 found;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "=&r"(found.x), "=&r"(found.y), "=&r"(found.z), "=&r"(found.w)
      : "r"(wanted ? 1U : 0U), "l"(from)
      : "memory");
  return found;
}

/// Loads 4 bytes of global memory if `wanted`, else zero.
inline u32 load_number(bool wanted, const u8* from) {
  u32 found;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "mov.u32 %0, 0;\n"
      "@p ld.global.u32 %0, [%2];\n"
      "}"
      : "=&r"(found)
      : "r"(wanted ? 1U : 0U), "l"(from)
      : "memory");
  return found;
}

}  // namespace moeos::sm90
