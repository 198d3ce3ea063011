// SPDX-License-Identifier: Apache-2.0
// The tensors of one call, and one processor's scratch memory.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "kernels/shape.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/gemm.hpp"
#include "runtime/words/dimensions.hpp"

namespace moeos::twin {

/// What a call of gradients reads and writes beside its Operands: contiguous row-major tensors.
struct GradientOperands {
  const void* d_out;      // [S, H]: the gradient of the output, in the storage type
  float* d_topk_weights;  // [S, k]: is written
  float* d_w1;            // as w1: is added to, as the next ones; null: nobody asks
  float* d_b1;            // as b1
  float* d_w2;
  float* d_b2;
  float* d_w3 = nullptr;
  const float* d_x_added = nullptr;  // [S, H]: what else is added to the gradient of x; or null
  float* d_shared = nullptr;  // [S]: this slice's gradients of what weighs the shared experts, of
                              // which it becomes the sum over slices; or null
};

/// Addresses of contiguous row-major tensors; null where the call has none.
struct Operands {
  Element element;              // of x, gate (unless it is fp32), plain weights, b1, b2 and out
  const void* x;                // [S, H]
  const float* x_scale;         // [S, H / kTokenGroup], where x is e4m3 codes; else null
  const void* gate;             // [R, H]: of all experts and zero experts
  const float* selection_bias;  // [R], as all of the router's
  const float* router_bias;     // [R], fp32
  const float* expert_scale;    // [R], fp32
  const i32* topk_ids;          // [S, k]: experts that the caller chose, -1 unused; else null
  const float* topk_weights;    // [S, k], with topk_ids; null: the gate weighs these experts
  const void* w1;               // as w1_layout, plain or codes, as w2
  const void* b1;               // as b1_layout
  const void* w2;               // as w2_layout
  const void* b2;               // [X, H]
  const void* w3;               // as w1, up rows, where they are apart; else null
  const void* w1_scale;         // of codes: [X, 1 or 2, scale_rows, scales_of_row], of gate and up
  const void* w2_scale;         // [X, scale_rows, scales_of_row]
  const float* w1_scale_2;      // [X, 1 or 2], where the format has it
  const float* w2_scale_2;      // [X]
  const void* shared_w1;    // [n, 2Is or Is, H], of the shared experts; or null, as the next two
  const void* shared_w2;    // [n, H, Is]
  const void* shared_gate;  // [H]
  const void* shared_w1_scale;  // of their codes, as w1_scale; or null, as the next three
  const void* shared_w2_scale;
  const float* shared_w1_scale_2;
  const float* shared_w2_scale_2;
  void* out;                        // [S, H]; of a call of gradients that of x
  i32* chosen_ids = nullptr;        // [S, k]: what the gate chose, is written; or null
  float* chosen_weights = nullptr;  // [S, k], with chosen_ids
  void* saved = nullptr;    // [sources, saved_of_source, 2I or I]: written, or read by gradients
  u32 saved_of_source = 0;  // rows of each source, its first ones
  bool leaves_partials = false;                 // Call::leaves_partials
  const GradientOperands* gradients = nullptr;  // of a call of gradients
};

/// N-tiles: columns of the first GEMM's result, and of the second's, that one part computes.
inline constexpr u32 kGatedColumns = 128;  // of gate and of up each
inline constexpr u32 kPlainColumns = 256;
/// The same for narrow tiles: few, so that small layers have several such parts.
inline constexpr u32 kNarrowColumns = 16;

constexpr u32 product0_columns(const LayerShape& shape) {
  return shape.gated() ? kGatedColumns : kPlainColumns;
}
/// A part makes whole groups of codes.
constexpr u32 product0_narrow_columns(const LayerShape& shape) {
  return shape.codes_rows() ? kHiddenGroup : kNarrowColumns;
}
constexpr u32 product1_narrow_columns(const LayerShape& shape) {
  return shape.codes_results() ? kResultGroup : kNarrowColumns;
}
static_assert(kGatedColumns % kHiddenGroup == 0 && kPlainColumns % kHiddenGroup == 0 &&
              kPlainColumns % kResultGroup == 0);

/// Sized for the largest task at construction; never grows.
class Scratch {
 public:
  Scratch(const Dimensions& dimensions, const LayerShape& shape)
      : panels(
            allocate(panel_floats(maximum(shape.hidden,
                                          maximum(shape.intermediate, shape.shared_intermediate))) *
                     ceil_div(maximum(dimensions.tile_rows, dimensions.route_tokens), kPanelRows))),
        results(allocate(std::size_t{maximum(dimensions.tile_rows, dimensions.route_tokens)} *
                         result_columns(dimensions, shape))),
        more_results(allocate(
            shape.shared_experts > 1 ? std::size_t{dimensions.tile_rows} * kPlainColumns : 0)),
        last_gate_rows(allocate(std::size_t{kGemmGranule} * shape.hidden)),
        scores(allocate(dimensions.routed_experts() + shape.zero_experts)),
        choice(allocate(dimensions.routed_experts() + shape.zero_experts)),
        row(allocate(maximum(shape.hidden, dimensions.routed_experts()))),
        token(shape.fp32_router ? std::make_unique<double[]>(shape.hidden) : nullptr),
        tokens(std::make_unique<u8[]>(std::size_t{kPanelRows} *
                                      maximum(dimensions.row_bytes, dimensions.hidden_bytes))) {}

  struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  using Floats = std::unique_ptr<float[], Free>;

  Floats panels;                    // packed rows of a tile
  Floats results;                   // fp32 results of a part: gate block and up block, or one block
  Floats more_results;              // of the next shared expert, to be added to those before
  Floats last_gate_rows;            // the gate's last rows, padded to the GEMM's granule
  Floats scores;                    // of one token
  Floats choice;                    // what its experts are selected by
  Floats row;                       // one output row; the scores of expert groups
  std::unique_ptr<double[]> token;  // one, for an fp32 router
  std::unique_ptr<u8[]> tokens;     // rows of a panel that are read by index, side by side

  static Floats allocate(std::size_t count) {
    return Floats(
        static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
  }

 private:
  static u32 result_columns(const Dimensions& dimensions, const LayerShape& shape) {
    const u32 router_rows =
        align_up(dimensions.routed_experts() + shape.zero_experts, kGemmGranule);
    return maximum(2 * kGatedColumns, maximum(kPlainColumns, router_rows));
  }
};

}  // namespace moeos::twin
