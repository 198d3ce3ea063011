// SPDX-License-Identifier: Apache-2.0
// Rows that are sent for tokens and are not their rows of x: times their weight, or quantized, or
// followed by the gradient of the output.
//
// They lie in the tokens' rows of the output, which are not written before the results of these
// rows have come back; those of a gradient call lie in memory of their own. Route makes them, after
// its last look at the sums that it may have kept there. Must not depend on: the courier that sends
// them.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/backward_arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/decode.cuh"
#include "kernels/sm90/ptx/load.cuh"
#include "kernels/sm90/ptx/store.cuh"
#include "runtime/memory/memory.hpp"

namespace moeos::sm90 {

static_assert(!kShape.weight_on_input || kGeometry.choices() == 1, "a token has one weight");
static_assert(kGeometry.sent_bytes <= kGeometry.row_bytes && kGeometry.row_bytes % 16 == 0);

/// The factor of a token's row.
inline float weight_on_input(const RankMemory& memory, u32 token) {
  return kShape.weight_on_input ? memory.pair_weight[token * kGeometry.top_k] : 1.0F;
}

/// Eight elements of x.
inline void read_eight(const u8* from, float (&values)[8]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(from);
  const u32 pairs[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    values[2 * i] = Element::low(pairs[i]);
    values[2 * i + 1] = Element::high(pairs[i]);
  }
}

/// Eight elements of a token, times its weight.
inline uint4 weighed_vector(const RankArguments& arguments, const RankMemory& memory, u32 token,
                            u32 vector) {
  constexpr u32 kVectors = kOutputBytes / sizeof(uint4);
  float values[8];
  read_eight(arguments.x_rows + (u64{token} * kVectors + vector) * sizeof(uint4), values);
  const float weight = weight_on_input(memory, token);
  const auto pair = [&](u32 k) {
    return Element::pack(weight * values[k], weight * values[k + 1]);
  };
  return make_uint4(pair(0), pair(2), pair(4), pair(6));
}

/// Multiplies the tokens of a block by their weights.
inline void weigh_rows(const RankArguments& arguments, const RankMemory& memory, u32 first,
                       u32 end) {
  constexpr u32 kVectors = kGeometry.row_bytes / sizeof(uint4);
#pragma unroll 1
  for (u32 i = threadIdx.x % kConsumerThreads; i < (end - first) * kVectors;
       i += kConsumerThreads) {
    const u32 token = first + i / kVectors;
    reinterpret_cast<uint4*>(arguments.out)[u64{first} * kVectors + i] =
        weighed_vector(arguments, memory, token, i % kVectors);
  }
}

/// Quantizes the tokens of a block: codes and scales of kernels/element_formats.hpp. Neighbouring
/// lanes have a group.
inline void code_rows(const RankArguments& arguments, const RankMemory& memory, u32 first,
                      u32 end) {
  constexpr u32 kOfThread = 8;
  constexpr u32 kLanes = kTokenGroup / kOfThread;  // of a group
  constexpr u32 kPieces = kShape.hidden / kOfThread;
  const u32 pieces = (end - first) * kPieces;
#pragma unroll 1
  for (u32 begin = 0; begin < pieces; begin += kConsumerThreads) {
    const u32 i = begin + threadIdx.x % kConsumerThreads;
    const bool there = i < pieces;  // true for all of a group, or for none
    const u32 token = first + (there ? i / kPieces : 0);
    const u32 piece = there ? i % kPieces : 0;
    float values[kOfThread];
    read_eight(arguments.x_rows + u64{token} * kGeometry.row_bytes + piece * kOfThread * 2, values);
    float largest = 0.0F;
#pragma unroll
    for (const float value : values) {
      largest = fmaxf(largest, fabsf(value));
    }
#pragma unroll
    for (u32 lanes = 1; lanes < kLanes; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, lanes));
    }
    const GroupScale scale = group_scale(largest);
    u8* const to = arguments.out + u64{token} * kGeometry.row_bytes;
    if (there) {
      *reinterpret_cast<uint2*>(to + piece * kOfThread) = eight_codes(values, scale.inverse);
    }
    if (there && piece % kLanes == 0) {
      reinterpret_cast<float*>(to + kShape.hidden)[piece / kLanes] =
          weight_on_input(memory, token) * scale.scale;
    }
  }
}

/// Copies the codes and scales of tokens that come quantized.
inline void copy_codes(const RankArguments& arguments, u32 first, u32 end) {
  constexpr u32 kPieces = kShape.hidden / sizeof(uint4);
  constexpr u32 kOfGroup = kTokenGroup / sizeof(uint4);
#pragma unroll 1
  for (u32 i = threadIdx.x % kConsumerThreads; i < (end - first) * kPieces; i += kConsumerThreads) {
    const u32 token = first + i / kPieces;
    const u32 piece = i % kPieces;
    const auto* from = reinterpret_cast<const uint4*>(arguments.x_rows) + u64{token} * kPieces;
    u8* const to = arguments.out + u64{token} * kGeometry.row_bytes;
    reinterpret_cast<uint4*>(to)[piece] = from[piece];
    if (piece % kOfGroup == 0) {
      const u64 at = (u64{token} * kPieces + piece) / kOfGroup;
      reinterpret_cast<float*>(to + kShape.hidden)[piece / kOfGroup] =
          arguments.x_scale_is_exponent != 0 ? e8m0(static_cast<const u8*>(arguments.x_scale)[at])
                                             : static_cast<const float*>(arguments.x_scale)[at];
    }
  }
}

/// The part of a token's row that describes two of its choices.
inline uint4 two_choices(const RankMemory& memory, u32 token, u32 first) {
  const auto choice = [&](u32 j) {
    const u32 pair = token * kGeometry.top_k + minimum(j, kGeometry.top_k - 1);
    const bool there = j < kGeometry.top_k;
    return SentChoice{there ? memory.pair_expert[pair] : kNone, memory.pair_weight[pair]};
  };
  const SentChoice even = choice(first);
  const SentChoice odd = choice(first + 1);
  return make_uint4(even.expert, __builtin_bit_cast(u32, even.weight), odd.expert,
                    __builtin_bit_cast(u32, odd.weight));
}

/// Joins what a gradient call sends for the tokens of a block. A thread has several loads under
/// way: one after the other, they took a twentieth of a call.
inline void join_rows(const RankArguments& arguments, const RankMemory& memory, u32 first,
                      u32 end) {
  constexpr u32 kTogether = 8;
  constexpr u32 kOfX = kHiddenBytes / sizeof(uint4);
  constexpr u32 kCopied = 2 * kOfX;
  constexpr u32 kOthers = kGeometry.row_bytes / sizeof(uint4) - kCopied;
  const u8* const d_out = of_gradients(arguments).d_out;
  const u32 thread = threadIdx.x % kConsumerThreads;
  const auto place = [&](u32 token, u32 vector) {
    return arguments.out + u64{token} * kGeometry.row_bytes + vector * sizeof(uint4);
  };
  const u32 copied = (end - first) * kCopied;
#pragma unroll 1
  for (u32 begin = thread; begin < copied; begin += kTogether * kConsumerThreads) {
    uint4 values[kTogether];
#pragma unroll
    for (u32 k = 0; k < kTogether; ++k) {
      const u32 i = begin + k * kConsumerThreads;
      const u32 token = first + i / kCopied;
      const u32 vector = i % kCopied;
      const u8* const from = vector < kOfX ? arguments.x_rows : d_out;
      values[k] =
          load_vector(i < copied, from + (u64{token} * kOfX + vector % kOfX) * sizeof(uint4));
    }
#pragma unroll
    for (u32 k = 0; k < kTogether; ++k) {
      const u32 i = begin + k * kConsumerThreads;
      const bool weighed = kShape.weight_on_input && i % kCopied < kOfX;  // written below
      store_vector(i < copied && !weighed, place(first + i / kCopied, i % kCopied), values[k]);
    }
  }
#pragma unroll 1
  for (u32 i = thread; i < (end - first) * kOthers; i += kConsumerThreads) {
    const u32 token = first + i / kOthers;
    *reinterpret_cast<uint4*>(place(token, kCopied + i % kOthers)) =
        two_choices(memory, token, 2 * (i % kOthers));
  }
  if constexpr (kShape.weight_on_input) {
#pragma unroll 1
    for (u32 i = thread; i < (end - first) * kOfX; i += kConsumerThreads) {
      const u32 token = first + i / kOfX;
      *reinterpret_cast<uint4*>(place(token, i % kOfX)) =
          weighed_vector(arguments, memory, token, i % kOfX);
    }
  }
}

/// Makes the rows that are sent for the tokens of a block. By all consumers.
inline void make_sent_rows(const RankArguments& arguments, const RankMemory& memory, u32 first,
                           u32 end) {
  if constexpr (kGradients) {
    join_rows(arguments, memory, first, end);
  } else if (kCoded && arguments.x_scale != nullptr) {
    copy_codes(arguments, first, end);
  } else if constexpr (kCoded) {
    code_rows(arguments, memory, first, end);
  } else {
    weigh_rows(arguments, memory, first, end);
  }
}

}  // namespace moeos::sm90
