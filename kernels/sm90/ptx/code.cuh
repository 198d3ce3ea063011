// SPDX-License-Identifier: Apache-2.0
// Where the kernel's instructions lie, and how L2 is asked for bytes.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// A kernel of one thread, which says where the instructions of `moeos_forward` begin, or 0. As
/// written and compiled, it asks for its own handle, since PTX has no address of instructions; the
/// host replaces that with what is wanted (host/moeos/compile/machine_code.py).
extern "C" __global__ void moeos_code_address(u64* address) {
  asm volatile("mov.u64 %0, moeos_code_address;" : "=l"(*address));
}

/// Prefetches a multiple of 16 bytes to L2; no thread waits for them, and where there is no memory
/// nothing happens.
inline void prefetch_bytes(u64 address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

}  // namespace moeos::sm90
