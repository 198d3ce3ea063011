// SPDX-License-Identifier: Apache-2.0
// The table of products: lines follow each other through the places between them, and a descriptor
// says of each part where its rows lie.
//
// Build: g++ -std=c++20 -I. tests/native/words/test_products.cpp -o test_products
#include <initializer_list>

#include "runtime/plan/known_parts.hpp"
#include "runtime/plan/plan.hpp"
#include "runtime/words/products.hpp"
#include "runtime/words/task.hpp"
#include "tests/native/expect.hpp"

namespace {

using namespace moeos;

/// Where the next product finds what goes to a sink.
RowsIn rows_in(Sink sink) {
  return sink == Sink::tokens_between ? RowsIn::tokens_between : RowsIn::between;
}

void check_lines() {
  for (const bool shared : {false, true}) {
    for (u32 nth = 0; nth < kProductsOfTile; ++nth) {
      const Product line = product_of(product_kind(nth), shared);
      const bool last = nth + 1 == kProductsOfTile;
      expect(line.kind == product_kind(nth) && line.shared == shared,
             "a line is found by its kind");
      expect((line.then == Then::next) == !last, "a tile goes on until its last product");
      if (!last) {
        const Product next = product_of(product_kind(nth + 1), shared);
        expect(next.rows == rows_in(line.sink),
               "a product's rows lie where the one before left them");
        expect(awaits_of(next.rows) == Awaits::product, "and it awaits all parts of that one");
      }
    }
  }
  expect(awaits_of(kFirstProduct.rows) == Awaits::chunks, "rows of other ranks are awaited");
  expect(awaits_of(kSharedFirstProduct.rows) == Awaits::nothing, "a rank's own tokens are not");
  for (u32 kind = 0; kind < kTaskKinds; ++kind) {
    const auto its = static_cast<TaskKind>(kind);
    expect(is_product(its) == (its == kFirstProduct.kind || its == kSecondProduct.kind),
           "no other kind of task is a product");
  }
}

void check_descriptors() {
  Geometry geometry{};
  geometry.product0_parts = 2;
  geometry.product1_parts = 3;
  geometry.product0_narrow_parts = 4;
  geometry.product1_narrow_parts = 6;
  Task task{};
  describe_tile(task, geometry, 1, 0, 0, 1, 8, 8, 0, false);
  expect(task.from == RowsIn::cells && task.parts == 2,
         "a descriptor is its first product's: rows that were sent");
  Task combine = combine_task(combine_word(1, 0, 1).awaiting_rows());
  task.awaits = 1;
  expect(waits_for_inputs(task) && waits_for_inputs(combine), "rows that are sent are awaited");
  task.from = RowsIn::listed_tokens;
  expect(!waits_for_inputs(task), "tokens that are listed are here");
  become_second(task, geometry, true);
  expect(task.from == RowsIn::between && waits_for_inputs(task) && task.parts == 6,
         "the same tile's second product reads what the first one left");
}

}  // namespace

int main() {
  check_lines();
  check_descriptors();
  return failed == 0 ? 0 : 1;
}
