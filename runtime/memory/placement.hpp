// SPDX-License-Identifier: Apache-2.0
// Where experts are, when a table says so: which of an expert's places an assignment goes to.
//
// After Route the runtime knows experts by their places: place n is place n % X of rank n / X.
// Without a table an expert's place has the expert's number. With a table an expert has a place
// anywhere, or several, and an assignment goes to one of them, by a rule that depends only on the
// numbers of its rank and its token. So the choice is the same in every run, and no rank waits to
// know it. Where an expert's places have slices of it (Dimensions::pair_slices), each of its pairs
// goes to another place. Must not depend on: why an expert was chosen; flags, queues.
#pragma once

#include "runtime/memory/memory.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/dimensions.hpp"

namespace moeos {

/// Which of an expert's `places` takes a token's assignment. The fractions of multiples of the
/// golden ratio are spread evenly, those of tokens at even distances too; so are those of ranks, by
/// the multiples of another number (the inverse of the plastic ratio), so that ranks with a token
/// each do not choose alike.
constexpr u32 nth_place(u32 rank, u32 token, u32 places) {
  const u32 fraction = token * 0x9E3779B9U + rank * 0xC13FA9A9U;
  return static_cast<u32>(u64{fraction} * places >> 32);
}

/// The place that a pair with `expert` goes to. kNone for a number that is no expert's: an unused
/// slot, or a zero expert.
inline u32 place_of_pair(const Dimensions& dimensions, const RankMemory& memory, u32 rank, u32 pair,
                         u32 expert) {
  if (expert >= dimensions.routed_experts()) {
    return kNone;
  }
  if (!dimensions.placed()) {
    return expert;
  }
  const u32 first = memory.places_from[expert];
  if (dimensions.pair_slices != 0) {
    return memory.places[first + pair % dimensions.pair_slices];
  }
  const u32 places = memory.places_from[expert + 1] - first;
  return memory.places[first + nth_place(rank, pair / dimensions.top_k, places)];
}

}  // namespace moeos
