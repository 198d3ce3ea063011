// SPDX-License-Identifier: Apache-2.0
// CUDA's built-ins as the emulated kernel finds them. Must not depend on: moeos.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>

#include "tests/emulator/gpu.hpp"

#define MOEOS_CHECK_FAILED(text) ::emulator::stop(text)
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};

using std::isfinite;

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline void __nanosleep(unsigned) { emulator::yield(); }

inline void __syncthreads() { emulator::block_barrier(0, emulator::block_threads()); }
inline void __syncwarp() { emulator::exchange("__syncwarp", 0); }
inline unsigned __ballot_sync(unsigned, bool predicate) {
  return static_cast<unsigned>(emulator::exchange("a ballot", predicate ? 1 : 0)[emulator::kLanes]);
}
inline int __all_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) == 0xFFFFFFFFU ? 1 : 0;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const auto* values = emulator::exchange("a sum", value);
  unsigned sum = 0;
  for (unsigned i = 0; i < emulator::kLanes; ++i) {
    sum += static_cast<unsigned>(values[i]);
  }
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto* values = emulator::exchange("a maximum", value);
  return static_cast<unsigned>(*std::max_element(values, values + emulator::kLanes));
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  static_assert(sizeof(T) <= 8);
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const auto* values = emulator::exchange("a shuffle", bits);
  const unsigned long long found = values[static_cast<unsigned>(source) % emulator::kLanes];
  std::memcpy(&value, &found, sizeof(T));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned distance) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % emulator::kLanes ^ distance));
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
  const auto* values = emulator::exchange("a match", value);
  unsigned bits = 0;
  for (unsigned i = 0; i < emulator::kLanes; ++i) {
    bits |= (values[i] == value ? 1U : 0U) << i;
  }
  return bits;
}
inline unsigned atomicMin(unsigned* word, unsigned value) {
  const unsigned before = *word;
  *word = std::min(before, value);
  return before;
}
