// SPDX-License-Identifier: Apache-2.0
// Words that every runtime header uses: fixed-width integers, alignment arithmetic, scopes, checks.
//
// Must not depend on: threads, memory orders, the heap, what a task does. Includes nothing, because
// the same text is compiled by NVRTC (which has no C++ standard library) and by the host compiler.
#pragma once

namespace moeos {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

/// "No such rank, expert, pair or chunk" wherever an index may be absent.
inline constexpr u32 kNone = 0xFFFFFFFFU;

/// Bytes of one cache line on every machine we run on; a task descriptor is exactly one.
inline constexpr u32 kCacheLine = 128;

/// The actors that must agree on the order of a memory access. Each wider scope costs more on a
/// GPU.
enum class Scope : u8 {
  block,   ///< actors of one block (shared memory on the GPU)
  device,  ///< actors of one rank
  system,  ///< actors of different ranks
};

template <class T>
constexpr T minimum(T a, T b) {
  return b < a ? b : a;
}

template <class T>
constexpr T maximum(T a, T b) {
  return a < b ? b : a;
}

template <class T>
constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

template <class T>
constexpr T align_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

/// The smallest i in [0, n] with !before(i), for a predicate that is true, then false.
///
/// Looks at seven indices at once, because a look is often a load from memory and seven loads
/// together take as long as one: three rounds for 512 indices, where halving takes nine. Looks at
/// some index even where there is none to look at: a condition around each load would make the
/// compiler wait for one before it asks for the next.
template <class Predicate>
constexpr u32 partition_point(u32 n, Predicate before) {
  constexpr u32 kWays = 8;
  u32 low = 0;   // before(i) for all i < low
  u32 high = n;  // !before(high), or high == n
  while (low < high) {
    const u32 stride = ceil_div(high - low, kWays);
    u32 passed = 0;
    for (u32 way = 1; way < kWays; ++way) {
      const u32 place = low + way * stride - 1;
      const bool passes = before(minimum(place, high - 1));
      passed += place < high && passes ? 1 : 0;
    }
    low += passed * stride;
    if (passed + 1 < kWays) {  // the next look answered no, or lay beyond
      high = minimum(high, low + stride - 1);
    }
  }
  return low;
}

/// A value alone in its cache line, so that actors polling neighbours do not slow each other down.
template <class T>
struct alignas(kCacheLine) Line {
  T value;
};

}  // namespace moeos

// MOEOS_CHECK(condition): an invariant that the surrounding code relies on. Debug builds
// (MOEOS_DEBUG_CHECKS) stop at the first broken one, or hand its text to MOEOS_CHECK_FAILED if that
// is defined; release builds compile it to nothing.
#if defined(MOEOS_CHECK_FAILED)
#define MOEOS_CHECK(condition) ((condition) ? static_cast<void>(0) : MOEOS_CHECK_FAILED(#condition))
#elif defined(MOEOS_DEBUG_CHECKS) && defined(__CUDACC_RTC__)
#define MOEOS_CHECK(condition) ((condition) ? static_cast<void>(0) : __trap())
#elif defined(MOEOS_DEBUG_CHECKS)
#define MOEOS_CHECK(condition) ((condition) ? static_cast<void>(0) : __builtin_trap())
#else
#define MOEOS_CHECK(condition) static_cast<void>(0)
#endif
