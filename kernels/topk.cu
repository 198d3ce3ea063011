// SPDX-License-Identifier: Apache-2.0
// The greatest logits of each row, the first among equals, and their softmax.
//
// A group of lanes has a row. Each lane keeps the best of its own logits in registers, in order,
// and lanes merge what they kept. All of it is compare and exchange at indices that the compiler
// knows. A key has a logit's order in its upper half and its index in its lower half, so no two
// keys of a row are equal: both fit 32 bits for 16-bit logits, and 64 bits for fp32 ones.
//
// MOEOS_TYPE: 0 fp32, 1 bfloat16, 2 float16. MOEOS_KEPT: keys that a lane keeps, a power of two.
// Launched by host/moeos/engines/cuda/topk.py. Must not depend on: layers.
#include "kernels/sm90/ptx/element.cuh"
#include "runtime/words/base.hpp"

namespace moeos::topk {

/// How logits are stored, and read as fp32; magnitudes beyond kInfinity are NaNs.
template <u32 kType>
struct TypeOf;
template <>
struct TypeOf<0> {
  using Bits = u32;
  using Key = u64;
  static constexpr Bits kInfinity = 0x7F800000;
  static float read(Bits bits) { return __uint_as_float(bits); }
};
template <>
struct TypeOf<1> {
  using Bits = u16;
  using Key = u32;
  static constexpr Bits kInfinity = 0x7F80;
  static float read(Bits bits) { return sm90::Bfloat16::low(bits); }
};
template <>
struct TypeOf<2> {
  using Bits = u16;
  using Key = u32;
  static constexpr Bits kInfinity = 0x7C00;
  static float read(Bits bits) { return sm90::Float16::low(bits); }
};

using Type = TypeOf<MOEOS_TYPE>;
using Bits = Type::Bits;
using Key = Type::Key;

inline constexpr u32 kKept = MOEOS_KEPT;
inline constexpr u32 kBits = 8 * sizeof(Bits);
inline constexpr Bits kSign = static_cast<Bits>(1U << (kBits - 1));
inline constexpr Bits kAll = static_cast<Bits>(~0U);
static_assert(sizeof(Key) == 2 * sizeof(Bits) && (kKept & (kKept - 1)) == 0);

/// The total of which weights are shares; numbered as in host/moeos/engines/cuda/topk.py.
enum class Softmax : u32 { none, all, chosen };

/// Greater for what is chosen first: NaN, then the numbers, with -0 as 0, and the first among
/// equals. Never 0, which is the key of no logit.
inline Key key_of(Bits bits, u32 place) {
  const Bits magnitude = static_cast<Bits>(bits & ~kSign);
  Bits order = static_cast<Bits>((bits & kSign) != 0 ? ~bits : bits | kSign);
  order = magnitude > Type::kInfinity ? kAll : order;
  order = magnitude == 0 ? kSign : order;
  return static_cast<Key>(Key{order} << kBits | static_cast<Bits>(kAll - place));
}

inline u32 place_of(Key key) { return kAll - static_cast<Bits>(key); }

/// The logit of a key; -0 becomes 0.
inline float logit_of(Key key) {
  const Bits order = static_cast<Bits>(key >> kBits);
  return Type::read(static_cast<Bits>((order & kSign) != 0 ? order & ~kSign : ~order));
}

inline void exchange(Key& first, Key& second) {
  const Key greater = first > second ? first : second;
  second = first > second ? second : first;
  first = greater;
}

/// Batcher's merge of two consecutive falling runs, of every kStep-th key.
template <u32 kFirst, u32 kCount, u32 kStep>
inline void merge_runs(Key (&keys)[kKept]) {
  if constexpr (2 * kStep < kCount) {
    merge_runs<kFirst, kCount, 2 * kStep>(keys);
    merge_runs<kFirst + kStep, kCount, 2 * kStep>(keys);
#pragma unroll
    for (u32 i = kFirst + kStep; i + kStep < kFirst + kCount; i += 2 * kStep) {
      exchange(keys[i], keys[i + kStep]);
    }
  } else {
    exchange(keys[kFirst], keys[kFirst + kStep]);
  }
}

/// Sorts keys, the greatest first.
template <u32 kFirst = 0, u32 kCount = kKept>
inline void sort(Key (&keys)[kKept]) {
  if constexpr (kCount > 1) {
    sort<kFirst, kCount / 2>(keys);
    sort<kFirst + kCount / 2, kCount / 2>(keys);
    merge_runs<kFirst, kCount, 1>(keys);
  }
}

/// Sorts keys that first fall and then rise, or the reverse.
template <u32 kFirst = 0, u32 kCount = kKept>
inline void sort_bitonic(Key (&keys)[kKept]) {
  if constexpr (kCount > 1) {
#pragma unroll
    for (u32 i = kFirst; i < kFirst + kCount / 2; ++i) {
      exchange(keys[i], keys[i + kCount / 2]);
    }
    sort_bitonic<kFirst, kCount / 2>(keys);
    sort_bitonic<kFirst + kCount / 2, kCount / 2>(keys);
  }
}

/// A row processed by a group of `lanes` lanes, of which this is number `lane`; all lanes of a warp
/// call it.
struct Row {
  const Bits* logits;
  u32 count;
  u32 lane;
  u32 lanes;

  /// The best keys of the row, in order, in all lanes of the group.
  void choose(Key (&best)[kKept]) const {
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      best[i] = 0;
    }
    for (u32 first = 0; first < count; first += kKept * lanes) {
      Key next[kKept];
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        const u32 place = first + i * lanes + lane;
        next[i] = place < count ? key_of(logits[place], place) : 0;
      }
      sort(next);
      merge(best, [&](u32 i) { return next[i]; });
    }
    for (u32 distance = 1; distance < lanes; distance *= 2) {
      Key other[kKept];
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        other[i] = __shfl_xor_sync(~0U, best[i], distance);
      }
      merge(best, [&](u32 i) { return other[i]; });
    }
  }

  /// The sum of all logits' exponentials over that of `top`, in all lanes of the group.
  float sum_all(float top) const {
    float sum = 0;
    for (u32 place = lane; place < count; place += lanes) {
      sum += expf(Type::read(logits[place]) - top);
    }
    for (u32 distance = 1; distance < lanes; distance *= 2) {
      sum += __shfl_xor_sync(~0U, sum, distance);
    }
    return sum;
  }

 private:
  /// The best of two falling runs. The greater of the first of one and the last of the other, and
  /// so on, are the best, and they are bitonic.
  template <class Other>
  static void merge(Key (&best)[kKept], Other other) {
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      best[i] = maximum(best[i], other(kKept - 1 - i));
    }
    sort_bitonic(best);
  }
};

/// For each of `rows` rows of `count` logits: the indices of its `chosen` best, int64, and the
/// logits unchanged, or with a softmax fp32 weights.
extern "C" __global__ void __launch_bounds__(256)
    moeos_topk(const Bits* logits, u64 rows, u32 count, u32 chosen, u32 lanes, Softmax softmax,
               void* values, i64* places) {
  const u32 group = threadIdx.x / lanes;
  const u64 number = u64{blockIdx.x} * (256 / lanes) + group;
  const bool there = number < rows;
  // A group without a row takes the last one, since all lanes of a warp exchange keys.
  const u64 at = there ? number : rows - 1;
  const Row row{logits + at * count, count, threadIdx.x % lanes, lanes};
  Key best[kKept];
  row.choose(best);
  float scale = 0;
  const float top = logit_of(best[0]);
  if (softmax == Softmax::all) {
    scale = 1 / row.sum_all(top);
  } else if (softmax == Softmax::chosen) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      sum += i < chosen ? expf(logit_of(best[i]) - top) : 0;
    }
    scale = 1 / sum;
  }
#pragma unroll
  for (u32 i = 0; i < kKept; ++i) {
    if (there && i < chosen && i % lanes == row.lane) {
      const u32 place = place_of(best[i]);
      const u64 to = at * chosen + i;
      places[to] = place;
      if (softmax == Softmax::none) {
        static_cast<Bits*>(values)[to] = row.logits[place];
      } else {
        static_cast<float*>(values)[to] = expf(logit_of(best[i]) - top) * scale;
      }
    }
  }
}

}  // namespace moeos::topk
