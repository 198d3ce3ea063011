// SPDX-License-Identifier: Apache-2.0
// The parts that all processors know when a call begins: Route's, then those of the shared experts.
//
// A ticket below known_parts() stands for one of them. Their words and descriptors are never
// written: the processor that has the ticket makes both. The shared experts' rows are this rank's
// tokens, where the caller left them. So their parts fill the time in which processors would wait
// for counts and rows. All of GEMM0 comes before all of GEMM1: a GEMM1 part waits only for parts of
// smaller tickets, which processors have taken. A Combine, whose ticket is larger, waits for all of
// them. Must not depend on: how a part is computed.
#pragma once

#include "runtime/plan/plan.hpp"
#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/geometry.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

constexpr u32 known_parts(const Geometry& geometry, const Call& call) {
  return route_parts(geometry, call) + geometry.shared_parts(call.tokens);
}

/// Parts of a Combine of tokens that sent no row, one for each block, which processors find
/// themselves, after the known parts, where the parts after them have numbers. Otherwise they are
/// handed out; where processors wait for all tokens' rows there are none.
constexpr u32 own_unsent_parts(const Geometry& geometry, const Call& call) {
  const bool own = geometry.plans_by_counts(call.tokens) && !geometry.may_await(call.tokens);
  return own && combines_unsent(call) ? route_blocks(geometry, call) : 0;
}

/// The word of part `number` of the shared experts.
constexpr ReadyWord shared_word(const Geometry& geometry, const Call& call, u32 number) {
  const bool narrow = geometry.narrow_shared(call.tokens);
  const u32 firsts =
      geometry.shared_tiles(call.tokens) * parts_of(geometry, kSharedFirstProduct, narrow);
  const auto part = [&](TaskKind kind, u32 nth, u32 of_tile) {
    return ReadyWord(call.epoch, kind, geometry.tiles_max() + nth / of_tile, nth % of_tile);
  };
  // Each kind apart, so that a compiler that knows the geometry divides by a constant.
  if (number < firsts) {
    return narrow ? part(kSharedFirstProduct.kind, number, geometry.shared0_narrow_parts)
                  : part(kSharedFirstProduct.kind, number, geometry.shared0_parts);
  }
  return narrow ? part(kSharedSecondProduct.kind, number - firsts, geometry.product1_narrow_parts)
                : part(kSharedSecondProduct.kind, number - firsts, geometry.product1_parts);
}

/// The descriptor of the part of `word`, on rank `rank`: a tile of consecutive tokens.
constexpr Task shared_task(const Geometry& geometry, const Call& call, u32 rank, ReadyWord word) {
  const bool narrow = geometry.narrow_shared(call.tokens);
  const Product product = product_of(word.kind(), true);
  const u32 token = (word.task() - geometry.tiles_max()) * geometry.tile_rows;
  const u32 rows = minimum(geometry.tile_rows, call.tokens - token);
  Task task{};
  describe_tile(task, geometry, call.epoch, shared_expert(geometry), word.task(), 1, rows,
                align_up(rows, Geometry::kSegmentAlign), token, narrow);
  task.kind = product.kind;
  task.parts = static_cast<u16>(parts_of(geometry, product, narrow));
  task.awaits = 1;
  task.from = product.rows;
  task.segments[0] = {token, static_cast<u16>(rank), static_cast<u16>(rows)};
  return task;
}

}  // namespace moeos
