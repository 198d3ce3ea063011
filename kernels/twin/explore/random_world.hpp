// SPDX-License-Identifier: Apache-2.0
// Random small layers and calls, and their results in double precision.
//
// The caller gives the routing, so that a near-tie in the router cannot be mistaken for an error.
// Must not depend on: how ranks run.
#pragma once

#include <vector>

#include "kernels/shape.hpp"
#include "kernels/twin/explore/draw.hpp"
#include "kernels/twin/forward.hpp"
#include "kernels/twin/matrices.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/memory/layout.hpp"
#include "runtime/words/geometry.hpp"

namespace moeos::twin {

/// The use of a world.
enum class WorldScale {
  threads,  ///< up to 8 ranks and 600 tokens
  fibers,   ///< up to 4 ranks and 24 tokens, in chunks and tiles of few rows: many messages, little
            ///< to compute; a deadline of a millisecond, for a clock that only idling moves
};

struct RandomWorld {
  Geometry geometry;
  LayerShape shape;
  TwinSettings settings;
};
RandomWorld draw_world(Random& random, WorldScale scale);

/// Normally distributed numbers with this standard deviation.
std::vector<float> draw_floats(Random& random, u64 count, float deviation);

/// Now and then cuts a world's experts into slices, each as large as an expert was, held by at most
/// `holders_most` ranks; does not change `random`. For callers that run Geometry::ranks() ranks,
/// with holder_of and settings_of.
void draw_slices(const Random& random, RandomWorld& world, u32 holders_most);
/// The number of slices; 1 where experts are whole.
u32 slices_of(const RandomWorld& world);
/// For a rank of the whole world: its number among those that hold its slice, and its settings.
u32 holder_of(const RandomWorld& world, u32 rank);
TwinSettings settings_of(const RandomWorld& world, u32 rank);

/// An expert's places, among those of all ranks that hold a slice.
std::vector<u32> places_of(const RandomWorld& world, u32 expert);

/// Quantized matrices of weights; all empty where weights are plain.
struct Codes {
  std::vector<u8> codes, scales;
  std::vector<float> scales_2;
};

/// All experts' weights, and the shared ones'; with slices those of the first slice, then of the
/// next. With a format, matrices have the dequantized values. What ranks hold has an expert's
/// values in each of its places, and zeros in places without an expert.
struct Experts {
  std::vector<float> gate, w1, w2, shared_w1, shared_w2, shared_gate;
  std::vector<float> held_w1, held_w2;
  Codes held_w1_codes, held_w2_codes, shared_w1_codes, shared_w2_codes;
};
Experts draw_experts(Random& random, const RandomWorld& world);

/// Calls each(index in the plain layout, index) with each element of `mlps` MLPs' matrices. Up rows
/// that are a tensor of their own come after all gate rows here, so that a vector has both.
template <class Each>
void for_each_element(const MatrixLayout& layout, u32 halves, u32 mlps, Each each) {
  const u64 gates = u64{mlps} * layout.rows * layout.depth;
  u64 plain = 0;
  for (u32 mlp = 0; mlp < mlps; ++mlp) {
    for (u32 half = 0; half < halves; ++half) {
      u64 row = layout.first(mlp, half) + (half < layout.halves ? 0 : gates);
      for (u32 n = 0; n < layout.rows; ++n, row += layout.row_step()) {
        for (u32 k = 0; k < layout.depth; ++k) {
          each(plain++, row + u64{k} * layout.column_step());
        }
      }
    }
  }
}
/// The up rows of a rank's w1, or of its gradient, if they are a tensor of their own; else null.
template <class Pointer>
Pointer ups_of(const LayerShape& shape, Pointer w1, u64 size) {
  return shape.gate_up == GateUp::separate ? w1 + size / 2 : nullptr;
}

/// One call of one rank.
struct RankCall {
  u32 tokens = 0;
  bool leaves_partials = false;
  std::vector<float> x, weights, out;
  std::vector<i32> ids;
};
RankCall draw_call(Random& random, const RandomWorld& world);
/// [rank][call]: `calls` calls of each rank; those of ranks with the same tokens are alike.
std::vector<std::vector<RankCall>> draw_calls(Random& random, const RandomWorld& world, u32 calls);

/// What rank `rank` passes to TwinRank::forward.
Operands operands_of(const RandomWorld& world, const Experts& experts, u32 rank, RankCall& call);

/// The error of the worst element of `call.out`: |difference| / (1 + |right value|); infinite for a
/// value that is not a number. With slices, rank `rank` may write only some tokens.
double largest_error(const RandomWorld& world, const Experts& experts, const RankCall& call,
                     u32 rank = 0);
inline constexpr double kErrorMost = 1e-4;  // in float32

/// The symmetric heaps of a world, zeroed.
class Heaps {
 public:
  explicit Heaps(const Geometry& geometry);
  Heaps(u32 ranks, u64 bytes);
  ~Heaps();
  Heaps(const Heaps&) = delete;
  Heaps& operator=(const Heaps&) = delete;
  const std::vector<u8*>& addresses() const { return addresses_; }

 private:
  u64 bytes_;
  std::vector<u8*> addresses_;
};

}  // namespace moeos::twin
