// SPDX-License-Identifier: Apache-2.0
// Routing that the caller gives: the only place where ids come in from outside. Errors in them are
// found here, and no address is computed from them before.
//
// Must not depend on: slots, flags.
#pragma once

#include "kernels/sm90/block/arguments.cuh"
#include "kernels/sm90/block/block.cuh"
#include "kernels/sm90/route/routing_rules.cuh"
#include "runtime/actors/processor.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/plan/counted_rows.hpp"
#include "runtime/rows/packet.hpp"

namespace moeos::sm90 {

/// The id that the caller gave a choice; -1 means an unused slot, as do other ids that are no
/// expert's if the call says so.
inline i64 given_id(const RankArguments& arguments, u32 choice) {
  const i64 id = arguments.ids_wide != 0 ? static_cast<const i64*>(arguments.topk_ids)[choice]
                                         : static_cast<const i32*>(arguments.topk_ids)[choice];
  const bool expert = id >= 0 && id < i64{kRouterRows};
  return arguments.any_ids != 0 && !expert ? -1 : id;
}

inline float given_weight(const RankArguments& arguments, u32 choice) {
  if (arguments.weight_type == WeightType::float32) {
    return static_cast<const float*>(arguments.topk_weights)[choice];
  }
  const u32 bits = static_cast<const u16*>(arguments.topk_weights)[choice];
  return arguments.weight_type == WeightType::bfloat16 ? Bfloat16::low(bits) : Float16::low(bits);
}

/// The error in a choice's id: it is no expert's, or the token has it in an earlier slot.
inline FailureKind given_fault(const RankArguments& arguments, u32 choice, i64 id) {
  if (id < -1 || id >= i64{kRouterRows}) {
    return FailureKind::id_no_expert;
  }
  bool repeated = false;
  constexpr u32 kChoices = kGeometry.choices();
  for (u32 before = choice / kChoices * kChoices; id >= 0 && before < choice; ++before) {
    repeated = repeated || given_id(arguments, before) == id;
  }
  return repeated ? FailureKind::id_repeated : FailureKind::none;
}

/// Copies the caller's routing of a block of tokens. Called by all consumer threads. Ids come in
/// only here: a wrong one becomes an unused slot, and sets bad_token to its token. `told`: as in
/// Token::choose. Ids that the gate will weigh stay as they are until then.
inline void copy_given_routing(const RankArguments& arguments, const RankMemory& memory, u32 first,
                               u32 end, u32 told, u32* bad_token) {
  for (u32 pair = first * kGeometry.top_k + threadIdx.x % kConsumerThreads;
       pair < end * kGeometry.top_k; pair += kConsumerThreads) {
    const u32 choice = pair / kPairsOfChoice;
    const i64 id = given_id(arguments, choice);
    const bool wrong = given_fault(arguments, choice, id) != FailureKind::none;
    const u32 expert = wrong || id < 0 ? kNone : static_cast<u32>(id);
    const bool weighed = !kWeighsGiven || arguments.topk_weights != nullptr;
    memory.pair_expert[pair] = weighed ? place_of(arguments, memory, pair, expert) : expert;
    if constexpr (kShape.zero_experts > 0) {
      note_placeless(memory, pair, place_of(arguments, memory, pair, expert), expert);
    }
    if (kGeometry.plans_itself() && told != 0) {
      tell_choice<Machine>(memory, told, pair, place_of(arguments, memory, pair, expert));
    }
    if (weighed) {
      const bool is_slot = kShape.zero_experts > 0 && expert == kNone;
      memory.pair_weight[pair] = is_slot ? 0.0F : given_weight(arguments, choice);
    }
    if (wrong) {
      atomicMin(bad_token, pair / kGeometry.top_k);
    }
  }
}

/// Ends the call because of a token's ids, and names the first wrong slot. One warp. False: no slot
/// is wrong.
inline bool reject_given_routing(const RankArguments& arguments, Processor<Machine>& processor,
                                 u32 token) {
  const u32 lane = Machine::lane();
  const u32 choice = token * kGeometry.choices() + lane;
  i64 id = 0;
  FailureKind fault = FailureKind::none;
  if (lane < kGeometry.choices()) {
    id = given_id(arguments, choice);
    fault = given_fault(arguments, choice, id);
  }
  const u32 wrong = Machine::ballot(fault != FailureKind::none);
  if (wrong != 0 && lane == Machine::first_lane(wrong)) {
    processor.reject_id(fault, token, lane, static_cast<u64>(id));
  }
  Machine::sync_lanes();
  return wrong != 0;
}

}  // namespace moeos::sm90
