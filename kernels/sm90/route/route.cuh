// SPDX-License-Identifier: Apache-2.0
// Route on tensor cores: products of a block's tokens with the router's weights, by the parts of
// the block, each token's choice (routing_rules.cuh), and the permutation of the block's
// assignments by expert.
//
// Must not depend on: slots, flags.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/move/sent_rows.cuh"
#include "kernels/sm90/route/block_sort.cuh"
#include "kernels/sm90/route/fp32_router.cuh"
#include "kernels/sm90/route/given_routing.cuh"
#include "kernels/sm90/route/logits.cuh"
#include "kernels/sm90/route/router_products.cuh"
#include "kernels/sm90/route/routing_rules.cuh"
#include "runtime/actors/processor.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/words/planted.hpp"

namespace moeos::sm90 {

/// sums += a block's tokens times the router's weights, over `steps` steps of the depth: this
/// warpgroup's share.
inline void multiply_steps(float (&sums)[kRouteSums], u32 steps, u32 group, Shared& shared,
                           RingPosition<kStages>& stage) {
  if constexpr (kShape.fp32_router) {
    multiply_exactly(sums, steps, group, shared, stage);
  } else {
    multiply_logits(sums, steps, of_part(group), shared, stage);
  }
}

/// Multiplies the slices of a part. Their sums are in d, or kept, as `logits` was constructed. By
/// all consumers.
inline void multiply_slices(float (&d)[kRouteSums], const RouteShare& share, Logits& logits,
                            Shared& shared, RingPosition<kStages>& stage) {
  if constexpr (kGeometry.route_slices == 1) {
    multiply_steps(d, steps_of_slice(0), logits.group(), shared, stage);
    return;
  }
  [[maybe_unused]] float sums[Logits::kInRegisters ? kRouteSums : 1] = {};
#pragma unroll 1
  for (u32 slice = share.first_slice; slice < share.end_slice; ++slice) {
#pragma unroll
    for (float& value : d) {
      value = 0.0F;
    }
    multiply_steps(d, steps_of_slice(slice), logits.group(), shared, stage);
    if (logits.kept()) {
      logits.keep(d, slice);
    } else if constexpr (Logits::kInRegisters) {
#pragma unroll
      for (u32 i = 0; i < kRouteSums; ++i) {
        sums[i] += d[i];
      }
    }
  }
  if constexpr (Logits::kInRegisters) {
#pragma unroll
    for (u32 i = 0; i < kRouteSums; ++i) {
      d[i] = sums[i];
    }
  }
}

/// Routes the tokens of a block, whose products lie in d or are kept; or weighs the experts that
/// the caller has chosen. Sets bad_token to a token whose gate logits are not finite. `told`: as in
/// Token::choose. By all consumers; sync() is their barrier.
template <class Sync>
inline void choose_experts(const float (&d)[kRouteSums], Logits& logits,
                           const RankArguments& arguments, const RankMemory& memory, u32 told,
                           u32* bad_token, Sync sync) {
#pragma unroll 1
  for (u32 first = 0; logits.tokens_from(first) > 0; first += kRoundTokens) {
    if (first > 0) {
      sync();  // all have read the earlier logits
    }
    logits.bring(d, first, sync);
    const u32 tokens = logits.tokens_from(first);
#pragma unroll 1
    for (u32 place = logits.warp(); place < tokens; place += kConsumerWarps) {
      const auto logit_of = [&](u32 expert) { return logits.at(place, expert); };
      const u32 token = logits.token(first + place);
      const bool finite = kWeighsGiven ? Token::weigh(logit_of, arguments, memory, token)
                                       : Token::choose(logit_of, arguments, memory, token, told);
      if (!finite && Machine::lane() == 0) {
        atomicMin(bad_token, token);
      }
    }
  }
}

/// Whether Route multiplies: not when the caller has routed. Where the gate may weigh a caller's
/// ids, there always are ids. A gradient call has the forward call's routing.
inline bool gate_routes(const RankArguments& arguments) {
  return !kGradients && (kWeighsGiven ? arguments.topk_weights : arguments.topk_ids) == nullptr;
}

/// Route: slices of a block's products, and all the rest by the part that finishes last. By all
/// consumers.
inline void run_route(const RankArguments& arguments, const Call& call, u32 index, Slot& slot,
                      const Task& task, Shared& shared, RingPosition<kStages>& stage) {
  const Rank<Machine> rank = rank_of(arguments, nullptr);
  const u32 warp = threadIdx.x / 32 - kFirstConsumerWarp;
  const auto everyone = [] { named_barrier(kConsumersBarrier, kConsumerThreads); };
  const u32 block = slot.word.part();
  const RouteShare share(call, slot.word);
  const auto [first, end] = share.tokens;
  const u32 pairs = (end - first) * kGeometry.top_k;
  const bool multiplies = gate_routes(arguments);
  const bool shared_block = kGeometry.route_parts_of_block(call.tokens) > 1;
  Processor<Machine> processor(rank, call, index);
  Logits logits(arguments, shared.route, warp, share.tokens, shared_block || !Logits::kInRegisters);
  float d[kRouteSums] = {};
  if (multiplies) {
    multiply_slices(d, share, logits, shared, stage);
  }
  if (shared_block) {
    everyone();
    if (warp == 0 && processor.count_slices(block) && Machine::lane() == 0) {
      slot.last_part = 1;
    }
    everyone();
    if (MOEOS_PLANTED(slices_are_routed_alone) ? share.first_slice != 0 : slot.last_part == 0) {
      return;
    }
  } else if (logits.kept()) {
    everyone();  // all have kept their sums
  }
  const u32 told = kGeometry.reads_in_place(call.tokens) ? call.epoch : 0;
  if (kWeighsGiven || !multiplies) {
    copy_given_routing(arguments, rank.memory, first, end, told, &slot.bad_token);
    everyone();
  }
  if (multiplies && (!kWeighsGiven || slot.bad_token == kNone)) {
    choose_experts(d, logits, arguments, rank.memory, told, &slot.bad_token, everyone);
    everyone();
  }
  if (slot.bad_token != kNone) {
    return;
  }
  if constexpr (kAltersRows) {
    make_sent_rows(arguments, rank.memory, first, end);
  }
  auto& scratch = *reinterpret_cast<RouteScratch*>(shared.route);
  gather_choices(rank.memory, scratch, first * kGeometry.top_k, pairs);
  everyone();
  sort_block_by_warps(rank.memory, scratch, block, first * kGeometry.top_k, pairs, warp, everyone);
  everyone();
  if (warp == 0 && processor.count_block(task) && Machine::lane() == 0) {
    slot.last_block = 1;
  }
  everyone();
  if (slot.last_block != 0) {
    processor.finish_routing(Team{warp, kConsumerWarps}, everyone);
  }
}

}  // namespace moeos::sm90
