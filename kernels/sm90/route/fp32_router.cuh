// SPDX-License-Identifier: Apache-2.0
// Products of a block's tokens with a router whose weights are fp32.
//
// Each weight is split into three terms of 16 bits whose sum it is, so products on tensor cores are
// exact. It is split in registers: experts are the rows of the product, whose operand may come from
// registers, and tokens its columns. So there is no second copy of the router that could be out of
// date. Tensor cores truncate when they add. So a sum on tensor cores covers only one box of the
// depth, beginning with the smallest terms, and joins the others in fp32, rounded to nearest.
//
// Must not depend on: what is chosen by gate logits.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/route/router_products.cuh"

namespace moeos::sm90 {

inline constexpr u32 kTerms = 3;
inline constexpr bool kTermsReachAll = Element::kDigits == 8;  // bfloat16 has fp32's exponents
/// The factor of a weight's remainder before its next term is taken: exponents of float16 do not
/// reach that far down.
inline constexpr float kTermScale = kTermsReachAll ? 1.0F : 2048.0F;

/// Two weights' terms of 16 bits, the largest first, each pair in a register.
inline void cut(float low, float high, u32 (&terms)[kTerms]) {
#pragma unroll
  for (u32 term = 0; term < kTerms; ++term) {
    if constexpr (kTermsReachAll) {
      // The first digits, not rounded: three times eight are all, and none becomes infinite.
      terms[term] =
          (__builtin_bit_cast(u32, high) & 0xFFFF0000U) | __builtin_bit_cast(u32, low) >> 16;
    } else {
      terms[term] = Element::pack(low, high);
    }
    low = (low - Element::low(terms[term])) * kTermScale;
    high = (high - Element::high(terms[term])) * kTermScale;
  }
}

/// Products along the depth of a box: 16 columns each.
inline constexpr u32 kBoxProducts = kGateBoxColumns / 16;
inline constexpr u32 kExpertsOfTile = 64;

/// A lane's terms of 64 experts' weights, for a box of the depth.
struct TileTerms {
  u32 of[kTerms][kBoxProducts][4];

  /// Keeps the compiler from using their registers before.
  void hold_all() {
#pragma unroll
    for (auto& term : of) {
#pragma unroll
      for (auto& registers : term) {
        hold(registers);
      }
    }
  }

  /// `weights`: the box's rows of these experts, 128 bytes each, swizzled.
  explicit TileTerms(const u8* weights) {
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (u32 k = 0; k < kBoxProducts; ++k) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 r = row + i % 2 * 8;
        const u32 byte = (16 * k + lane % 4 * 2 + i / 2 * 8) * static_cast<u32>(sizeof(float));
        const float2 pair =
            *reinterpret_cast<const float2*>(weights + r * kSwizzleBytes + (byte ^ r % 8 * 16));
        u32 terms[kTerms];
        cut(pair.x, pair.y, terms);
#pragma unroll
        for (u32 term = 0; term < kTerms; ++term) {
          of[term][k][i] = terms[term];
        }
      }
    }
  }
};

inline void finish_products(float (&d)[kTileSums]) {
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
}

/// d = the weights of 64 experts times the block's tokens, over the columns of a box, which begin
/// at `tokens` in a stage. By a warpgroup.
inline void multiply_box(float (&d)[kTileSums], TileTerms& weights, const u8* tokens) {
  constexpr u32 kProductBytes = 32;  // 16 elements
#pragma unroll
  for (float& sum : d) {
    sum = 0.0F;
  }
  hold(d);
  wgmma_fence();
#pragma unroll
  for (u32 nth = 0; nth < kTerms; ++nth) {
    const u32 term = kTerms - 1 - nth;
    if (nth > 0 && kTermScale != 1.0F) {
      finish_products(d);
#pragma unroll
      for (float& sum : d) {
        sum *= 1.0F / kTermScale;
      }
      hold(d);
      wgmma_fence();
    }
#pragma unroll
    for (u32 k = 0; k < kBoxProducts; ++k) {
      multiply_accumulate<!kTermsReachAll>(d, weights.of[term][k],
                                           matrix_descriptor(tokens + k * kProductBytes));
    }
  }
  finish_products(d);
  weights.hold_all();  // until here
}

/// sums += a block's tokens times the weights of this warpgroup's experts, over `steps` steps of
/// the depth.
inline void multiply_exactly(float (&sums)[kRouteSums], u32 steps, u32 group, Shared& shared,
                             RingPosition<kStages>& stage) {
  if (group >= kRouteGroups) {
    skip_tile(steps, shared, stage, kAsLanded);
    return;
  }
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step, stage.advance()) {
    shared.stage_full[stage.index].wait(stage.parity);
    const Stage& from = shared.stages[stage.index];
#pragma unroll
    for (u32 box = 0; box < kRouteDepth; ++box) {
#pragma unroll
      for (u32 tile = 0; tile < kGroupTiles; ++tile) {
        const u32 row = box * kRouteColumns + (group * kGroupTiles + tile) * kExpertsOfTile;
        TileTerms weights(from.weights + row * kSwizzleBytes);
        float d[kTileSums];
        multiply_box(d, weights, from.rows + box * kGateBoxColumns * 2);
#pragma unroll
        for (u32 i = 0; i < kTileSums; ++i) {
          sums[tile * kTileSums + i] += d[i];
        }
      }
    }
    release_read_stage(shared, stage.index);
  }
}

}  // namespace moeos::sm90
