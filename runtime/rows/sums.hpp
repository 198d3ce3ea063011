// SPDX-License-Identifier: Apache-2.0
// What follows from a Combine's end where experts are sliced: its sums are announced to the rank
// that adds them up, or writes them.
//
// Memory order, from a row to its reader, in another rank's memory:
//  1. The warps of a part have written rows, and this warp has met them at a barrier. Each of its
//     lanes fences (order_rows): so what a lane counts or announces below comes after all rows of
//     the part.
//  2. Parts of other processors count tokens of the same group in one counter, acquire-release on
//     this device. The lane that counts the last token has acquired their rows, and the fences of
//     step 1 that ordered these are of system scope: causality extends over scopes. It fences
//     again, for these rows.
//  3. It raises the group's flag at the owner, whose subscriber polls it, acquires for all lanes
//     and publishes to its processors (SumsSubscriber::hand_out).
// A row is written again in a later call. Its reader has ended its part by then. Where all ranks
// get totals, the group's total says so, and its order is the one above: reads come before that
// fence, too. Where only owners add up, the word of the next call says so
// (SumsSubscriber::tell_all), and the call after that writes the row. The end of a kernel orders
// counts that are relaxed. tests/model/sums.pml has all of this, and what goes wrong without it.
//
// Must not depend on: how sums are made, the actors that wait for them.
#pragma once

#include "runtime/memory/rank.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/team.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// Counts a token whose partial sum is at its owner; the lane that counts the last token of a group
/// announces the group. One lane; others may count other tokens. Returns whether the owner is
/// another rank.
template <Platform P>
bool count_partial(const Rank<P>& rank, const Call& call, u32 token) {
  const Geometry& geometry = rank.geometry();
  const u32 owner = owner_of_token(geometry, call.tokens, token);
  const u32 group = group_of_token(geometry, call.tokens, token);
  const TokenRange tokens = tokens_of_group(geometry, call.tokens, owner, group);
  u32* const done = &rank.memory.partials_done[u64{owner} * geometry.sum_groups_most() + group];
  if (lane_completes<P>(done, 1, tokens.end - tokens.first)) {
    order_rows<P>(true);  // rows of the lanes that have counted before
    send_partials(rank, call, owner, group);
  }
  return owner != rank.slice;
}

/// Announces what a Combine part has sent to other ranks. One warp, after every write of the part's
/// rows. Returns their bytes.
template <Platform P>
u64 announce_sums(const Rank<P>& rank, const Call& call, const Task& task, u32 combined) {
  const Geometry& geometry = rank.geometry();
  const Summands summands = summands_of(geometry, task);
  if (!adds_slices(geometry, call) || summands == Summands::total ||
      (summands == Summands::slices && !geometry.sums_everywhere)) {
    return 0;
  }
  order_rows<P>(true);  // each lane: it counts tokens
  if (summands == Summands::slices) {
    if (P::lane() == 0) {
      send_totals(rank, call, group_of_token(geometry, call.tokens, task.first_ready));
    }
    return u64{combined} * geometry.row_bytes * (geometry.slices - 1);
  }
  u32 sent = 0;  // by this lane, to others
#pragma unroll 1
  for (u32 i = P::lane(); i < task.rows; i += P::kLanes) {
    sent += count_partial(
        rank, call,
        task.awaits != 0 ? task.first_ready + i : rank.memory.ready_tokens[task.first_ready + i]);
  }
  if (task.rows == 0) {  // tokens of a block that have sent no row, as find_unsent has noted
    const TokenRange tokens = tokens_of_block(geometry, call, task.first_ready);
#pragma unroll 1
    for (u32 token = tokens.first + P::lane(); token < tokens.end; token += P::kLanes) {
      if (rank.memory.token_rows[token] == 0) {
        sent += count_partial(rank, call, token);
      }
    }
  }
  return u64{P::broadcast(P::inclusive_scan(sent), P::kLanes - 1)} * geometry.row_bytes;
}

}  // namespace moeos
