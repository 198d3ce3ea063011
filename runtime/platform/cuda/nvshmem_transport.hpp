// SPDX-License-Identifier: Apache-2.0
// Puts by NVSHMEM: over RDMA where there is no NVLink, through mapped memory where there is.
//
// NVSHMEM is compiled into the kernel from its headers, and not linked from its device library: a
// call to another compilation unit anywhere in a kernel makes ptxas serialise WGMMA and ignore
// setmaxnreg (C7509 and C7504), which costs every layer more than puts can gain. Inlined, there is
// no IBGDA; requests go to NVSHMEM's proxy thread on the host. NVSHMEM's version and state are
// constants of this module that the host has NVSHMEM fill in (culibrary_init). Must not depend on:
// the contents of puts.
#pragma once

#include "runtime/platform/concept.hpp"
#include "runtime/words/base.hpp"

// What NVSHMEM's headers take for granted under NVRTC.
#include <cuda/std/type_traits>
namespace std {
using cuda::std::is_integral;
using cuda::std::is_same;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std

#pragma nv_diagnostic push
#pragma nv_diag_suppress 3012
#pragma nv_diag_suppress 3013
#include <non_abi/nvshmem_build_options.h>
#undef NVSHMEM_IBGDA_SUPPORT
#define NVSHMEM_ENABLE_ALL_DEVICE_INLINING
#include <device_host/nvshmem_common.cuh>
// Declares the state with external linkage, which is how the host finds it.
#define __CUDACC_RDC__
#include <non_abi/device/threadgroup/nvshmemi_common_device_defines.cuh>
#undef __CUDACC_RDC__
__constant__ nvshmemi_device_host_state_t nvshmemi_device_state_d;
__constant__ nvshmemi_version_t nvshmemi_device_lib_version_d = {
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
#include <device/nvshmem_defines.h>
#pragma nv_diagnostic pop

namespace moeos::cuda {

/// By a warp, the functions are those that nvshmemx_putmem_nbi_warp,
/// nvshmemx_putmem_signal_nbi_warp and nvshmemx_signal_op call; their header includes all of
/// NVSHMEM's collectives.
class NvshmemTransport {
 public:
  static constexpr bool kExists = true;

  /// heaps[p]: the symmetric address of rank p's heap, which is this rank's own for every p.
  explicit NvshmemTransport(u8* const* heaps) : heaps_(heaps) {}

  /// What NVSHMEM's own waits do when they end: some network cards' writes are in order for a
  /// reader only after this.
  static void acquire_arrivals() {
    if (threadIdx.x % 32 == 0) {
      nvshmemi_transfer_syncapi_update_mem();
    }
    __syncwarp();
  }

  void put(u32 rank, u64 offset, const void* source, u64 bytes) const {
    nvshmemi_put_nbi_threadgroup<char, NVSHMEMI_THREADGROUP_WARP>(
        reinterpret_cast<char*>(heaps_[rank] + offset), static_cast<const char*>(source), bytes,
        static_cast<int>(rank));
  }

  void put_signal(u32 rank, u64 offset, const void* source, u64 bytes, u64 signal, SignalOp op,
                  u32 value) const {
    constexpr bool kNonBlocking = true;
    nvshmemi_put_signal_threadgroup<char, NVSHMEMI_THREADGROUP_WARP>(
        reinterpret_cast<char*>(heaps_[rank] + offset), static_cast<const char*>(source), bytes,
        word(rank, signal), value, op == SignalOp::set ? NVSHMEM_SIGNAL_SET : NVSHMEM_SIGNAL_ADD,
        static_cast<int>(rank), kNonBlocking);
  }

  void put_word(u32 rank, u64 offset, u64 value) const {
    nvshmem_uint64_p(word(rank, offset), value, static_cast<int>(rank));
  }

  void add_word(u32 rank, u64 offset, u32 value) const {
    nvshmemi_signal_op(word(rank, offset), value, NVSHMEM_SIGNAL_ADD, static_cast<int>(rank));
  }

  void order_puts() const { nvshmem_fence(); }

 private:
  uint64_t* word(u32 rank, u64 offset) const {
    return reinterpret_cast<uint64_t*>(heaps_[rank] + offset);
  }

  u8* const* heaps_;
};

}  // namespace moeos::cuda
