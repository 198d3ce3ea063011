// SPDX-License-Identifier: Apache-2.0
// mbarriers and named barriers of one block, and the shared memory that they lie in, as thin
// instruction wrappers. Source: PTX ISA, "mbarrier" and "barrier".
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::sm90 {

/// The address of a shared variable in the shared window, as instructions take it.
inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// The block's memory that the launch sizes.
inline u8* dynamic_shared_memory() {
  extern __shared__ __align__(1024) u8 memory[];
  return memory;
}

/// Ends the kernel with a driver error.
[[noreturn]] inline void trap() {
  asm volatile("trap;");
  __builtin_unreachable();
}

/// A barrier in shared memory that counts arrivals and bytes; phases alternate.
struct alignas(8) Barrier {
  u64 state;

  void initialise(u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals));
  }
  /// Releases what this thread wrote to the threads that wait for the phase.
  void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// arrive() for `count` arrivals at once.
  void arrive(u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(count)
                 : "memory");
  }
  /// Makes the phase wait for `bytes` more bytes.
  void expect(u32 bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  void arrive_expecting(u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  bool done(u32 parity) {
    u32 complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(complete)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return complete != 0;
  }
  /// Waits for actors of this block and for copies that they have begun. These never wait for other
  /// blocks while others wait for them, so the wait is short, or the code has a bug: then the
  /// block's watched wait ends the kernel (block.cuh).
  void wait(u32 parity) {
    while (!done(parity)) {
    }
  }
};

/// Makes initialised barriers visible to the async proxy.
inline void fence_barrier_initialisation() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Orders this thread's ordinary accesses before its TMA accesses (or, after a barrier, those of
/// other threads), to any memory.
inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// fence_proxy_async for accesses to this block's shared memory. It waits for nothing outside the
/// block.
inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// A barrier among `threads` threads of the block; ids 1 to 15.
inline void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <u32 kRegisters>
inline void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
inline void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moeos::sm90
