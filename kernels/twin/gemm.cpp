// SPDX-License-Identifier: Apache-2.0
// Chooses among the builds of gemm.hpp's functions, once, by the processor's instruction sets.
#include "kernels/twin/gemm.hpp"

#include <array>
#include <cassert>

namespace moeos::twin {

extern const GemmKernels kPortableGemm;
#if defined(__x86_64__)
extern const GemmKernels kAvx2Gemm;
extern const GemmKernels kAvx512Gemm;
#endif

namespace {

struct Supported {
  std::array<const GemmKernels*, 3> builds{};
  std::size_t count = 0;

  Supported() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      builds[count++] = &kAvx512Gemm;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      builds[count++] = &kAvx2Gemm;
    }
#endif
    builds[count++] = &kPortableGemm;
  }
};

const Supported& supported() {
  static const Supported once;
  return once;
}

}  // namespace

std::span<const GemmKernels* const> supported_gemm_kernels() {
  return std::span(supported().builds).first(supported().count);
}

void pack_rows(Element element, const void* first_row, std::size_t row_stride_bytes, unsigned rows,
               unsigned depth, float* panel) {
  assert(rows >= 1 && rows <= kPanelRows && depth % kGemmGranule == 0);
  supported().builds[0]->pack_rows(element, first_row, row_stride_bytes, rows, depth, panel);
}

void multiply(const float* panels, unsigned panel_count, unsigned depth, const Weights& weights,
              unsigned first_row, unsigned columns, float* out, std::size_t out_stride) {
  assert(depth >= kGemmGranule && depth % kGemmGranule == 0 && columns % kGemmGranule == 0);
  supported().builds[0]->multiply(panels, panel_count, depth, weights, first_row, columns, out,
                                  out_stride);
}

}  // namespace moeos::twin
