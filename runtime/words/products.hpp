// SPDX-License-Identifier: Apache-2.0
// What there is to do in a call, and the products that a tile's rows go through, as data.
//
//   line           its rows              its weights       then                its results
//   first          rows that were sent   of one expert     the second product  rows between
//   second         rows between          of one expert     credits             their owners' slots
//   shared first   this rank's tokens    of all the shared the second product  tokens' rows between
//   shared second  tokens' rows between  of all the shared shared results      this rank's results
//
// The first product is GEMM0, the second GEMM1. A new product is a line here, and a line of the
// kernels' table, which says what is multiplied (kernels/sm90/block/products.cuh). What a part
// awaits follows from where its rows lie, and that is a field of its descriptor (Task::from), which
// the plan fills in. So a plan that finds a product's rows elsewhere says so there, as the plan of
// few tokens of a rank alone does (counted_rows.hpp). A gradient call has the first two lines. Must
// not depend on: addresses, flags; what a product computes.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/dimensions.hpp"

namespace moeos {

/// What there is to do in a call. The scheduler orders only parts of products.
///
/// A tile's descriptor stands for all of its products, and lies in memory as GEMM0's; the word that
/// hands out a part says which product it belongs to (become_second).
enum class TaskKind : u8 {
#define KIND(name) name,
#include "runtime/words/task_kinds.def"
};
inline constexpr u32 kTaskKinds = 0
#define KIND(name) +1
#include "runtime/words/task_kinds.def"
    ;

/// Where the rows lie that a part multiplies.
enum class RowsIn : u32 {
  cells,           ///< in the cells of the ranks that sent them, as the tile's segments say; this
                   ///< rank's own rows may be where the caller left their tokens
                   ///< (Dimensions::gathers_own_rows)
  between,         ///< between the products, from Task::first_result on; or each at its pair's
                   ///< index (Dimensions::between_by_pairs)
  tokens_between,  ///< between the shared experts' products
  tokens,          ///< where the caller left them, from token Task::first_result on
  listed_tokens,   ///< where the caller left them: the tokens that Task::tokens lists
};

/// What must be seen before a part that awaits its rows may read them (inputs.hpp).
enum class Awaits : u32 {
  nothing,
  chunks,   ///< the flags of the rows' chunks
  product,  ///< the counter of the parts of the tile's previous product
};
constexpr Awaits awaits_of(RowsIn rows) {
  return rows == RowsIn::cells                                       ? Awaits::chunks
         : rows == RowsIn::between || rows == RowsIn::tokens_between ? Awaits::product
                                                                     : Awaits::nothing;
}

/// What follows when all parts of a tile are done (Processor::complete).
enum class Then : u32 {
  next,            ///< the tile's next product
  credits,         ///< owners get credits for their results
  shared_results,  ///< after the last tile, the processors that combine are notified
};

/// Where results go.
enum class Sink : u32 { between, owners, tokens_between, here };

struct Product {
  TaskKind kind;
  bool shared;  // whose weights: the shared experts', or one expert's
  RowsIn rows;  // where they lie, unless a plan says otherwise for a part
  Then then;
  Sink sink;
};
inline constexpr Product kFirstProduct{.kind = TaskKind::product0,
                                       .shared = false,
                                       .rows = RowsIn::cells,
                                       .then = Then::next,
                                       .sink = Sink::between};
inline constexpr Product kSecondProduct{.kind = TaskKind::product1,
                                        .shared = false,
                                        .rows = RowsIn::between,
                                        .then = Then::credits,
                                        .sink = Sink::owners};
inline constexpr Product kSharedFirstProduct{.kind = TaskKind::product0,
                                             .shared = true,
                                             .rows = RowsIn::tokens,
                                             .then = Then::next,
                                             .sink = Sink::tokens_between};
inline constexpr Product kSharedSecondProduct{.kind = TaskKind::product1,
                                              .shared = true,
                                              .rows = RowsIn::tokens_between,
                                              .then = Then::shared_results,
                                              .sink = Sink::here};

/// Products that a tile goes through, one after the other; their kinds' numbers fall by one.
inline constexpr u32 kProductsOfTile = 2;
constexpr TaskKind product_kind(u32 nth) {
  return static_cast<TaskKind>(static_cast<u32>(kFirstProduct.kind) - nth);
}
static_assert(product_kind(kProductsOfTile - 1) == kSecondProduct.kind);
constexpr bool is_product(TaskKind kind) {
  return static_cast<u32>(kFirstProduct.kind) - static_cast<u32>(kind) < kProductsOfTile;
}

/// The line of a product. Choices between constants, which a compiler sees through where a table
/// would lie in memory.
constexpr Product product_of(TaskKind kind, bool shared) {
  if (kind == kFirstProduct.kind) {
    return shared ? kSharedFirstProduct : kFirstProduct;
  }
  return shared ? kSharedSecondProduct : kSecondProduct;
}

/// Parts of a tile's product.
constexpr u32 parts_of(const Dimensions& dimensions, const Product& product, bool narrow) {
  if (product.kind == kSecondProduct.kind) {
    return dimensions.product1_parts_of(narrow);
  }
  return product.shared ? dimensions.shared0_parts_of(narrow)
                        : dimensions.product0_parts_of(narrow);
}
/// Parts of an expert's tile's product.
constexpr u32 parts_of(const Dimensions& dimensions, TaskKind kind, bool narrow) {
  return parts_of(dimensions, product_of(kind, false), narrow);
}

}  // namespace moeos
