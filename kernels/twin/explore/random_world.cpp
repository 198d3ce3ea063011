// SPDX-License-Identifier: Apache-2.0
// Random layers, calls and results. See random_world.hpp.
#include "kernels/twin/explore/random_world.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <system_error>

#include "runtime/memory/slices.hpp"

namespace moeos::twin {

u32 slices_of(const RandomWorld& world) { return maximum(1U, world.geometry.slices); }

namespace {

/// Draws a code, and appends it to `codes` or puts it into the upper half of their last byte.
float draw_code(Random& random, WeightFormat format, bool upper, std::vector<u8>& codes) {
  u32 code = draw(random, 0, is_fp8(format) ? 255 : 15);
  if (is_fp8(format)) {
    code -= code % 128 == 127 ? 1 : 0;  // not NaN
  }
  if (upper) {
    codes.back() |= static_cast<u8>(code << 4);
  } else {
    codes.push_back(static_cast<u8>(code));
  }
  return is_fp8(format)                         ? e4m3(static_cast<u8>(code))
         : format == WeightFormat::int4_group32 ? int4(code)
                                                : e2m1(code);
}

/// Draws a scale, and appends it to `scales`. Times it, and a second one, weights are below 1.
float draw_scale(Random& random, WeightFormat format, std::vector<u8>& scales) {
  if (format == WeightFormat::mxfp4) {
    scales.push_back(static_cast<u8>(draw(random, 122, 124)));
    return e8m0(scales.back());
  }
  if (format == WeightFormat::nvfp4) {
    scales.push_back(static_cast<u8>(draw(random, 0x30, 0x40)));
    return e4m3(scales.back());
  }
  float scale = static_cast<float>(draw(random, 128, 256)) / 256.0F;  // BF16 represents it as well
  scale *= is_fp8(format) ? 0x1p-9F : 0x1p-4F;
  const u32 bits = __builtin_bit_cast(u32, scale);
  for (u32 byte = 4 - scale_bytes(format); byte < 4; ++byte) {
    scales.push_back(static_cast<u8>(bits >> (8 * byte)));
  }
  return scale;
}

/// Draws `matrices` quantized matrices; `numbers` becomes their dequantized values.
Codes draw_codes(Random& random, WeightFormat format, u64 matrices, u32 rows, u32 columns,
                 std::vector<float>& numbers) {
  Codes drawn;
  const u32 scales_across = scales_of_row(format, columns);
  numbers.clear();
  for (u64 matrix = 0; matrix < matrices; ++matrix) {
    std::vector<float> scales(scale_rows(format, rows) * scales_across);
    for (float& scale : scales) {
      scale = draw_scale(random, format, drawn.scales);
    }
    const float scale_2 = static_cast<float>(draw(random, 8, 16)) / 256.0F;
    if (format == WeightFormat::nvfp4) {
      drawn.scales_2.push_back(scale_2);
    }
    for (u32 row = 0; row < rows; ++row) {
      const float* its = &scales[scale_row(format, row) * scales_across];
      for (u32 column = 0; column < columns; ++column) {
        const float scale = its[column / scale_columns(format, columns)];
        const bool upper = code_bits(format) == 4 && column % 2 == 1;
        const float number = draw_code(random, format, upper, drawn.codes) * scale;
        numbers.push_back(format == WeightFormat::nvfp4 ? number * scale_2 : number);
      }
    }
  }
  return drawn;
}

/// Quantizes and dequantizes `numbers`. Where a number is near a tie it may become another code,
/// since fp32 sums differ in rounding: `doubts` says by how much a number may be off, before and
/// after. Near means within its doubt plus `unsure` times the number and the largest number. If the
/// largest number is off, all scales of its group change.
void round_to_codes(std::vector<double>& numbers, u32 group, double unsure,
                    std::vector<double>& doubts) {
  for (u32 first = 0; first < numbers.size(); first += group) {
    double largest = 0.0;
    double off = 0.0;
    for (u32 i = first; i < first + group; ++i) {
      largest = std::fmax(largest, std::fabs(numbers[i]));
      off = std::fmax(off, doubts[i]);
    }
    off = largest > 0.0 ? off / largest : 0.0;
    const GroupScale scale = group_scale(static_cast<float>(largest));
    const auto rounded = [&scale](double number) {
      return double{e4m3(to_e4m3(static_cast<float>(number) * scale.inverse))} * scale.scale;
    };
    for (u32 i = first; i < first + group; ++i) {
      const double size = std::fabs(numbers[i]);
      const double near = doubts[i] + off * size + unsure * (size + largest);
      doubts[i] = rounded(numbers[i] + near) - rounded(numbers[i] - near) + off * size;
      numbers[i] = rounded(numbers[i]);
    }
  }
}

/// sum += weight times the output for x of MLP `mlp`, which has `inner` inner values; `doubt`: by
/// how much that may be off, if rows are `coded`.
void add_mlp(const LayerShape& shape, const std::vector<float>& w1, const std::vector<float>& w2,
             u32 mlp, u32 inner, bool coded, double weight, const float* row,
             std::vector<double>& sum, std::vector<double>& doubt) {
  const u32 hidden = shape.hidden;
  const u32 rows = shape.w1_rows_of(inner);
  std::vector<double> x(row, row + hidden);
  std::vector<double> inside(inner);
  std::vector<double> doubts(maximum(hidden, inner), 0.0);
  std::vector<double> results(hidden);
  std::vector<double> off(hidden, 0.0);
  if (coded) {
    round_to_codes(x, kTokenGroup, 0.0, doubts);
  }
  for (u32 i = 0; i < inner; ++i) {
    double gate = 0.0;
    double up = 0.0;
    for (u32 h = 0; h < hidden; ++h) {
      gate += x[h] * w1[(u64{rows} * mlp + i) * hidden + h];
      up += shape.gated() ? x[h] * w1[(u64{rows} * mlp + inner + i) * hidden + h] : 0.0;
    }
    inside[i] = shape.gated() ? gate / (1.0 + std::exp(-gate)) * up : std::fmax(gate, 0.0);
  }
  if (coded) {
    round_to_codes(inside, kHiddenGroup, 1e-5, doubts);
  }
  for (u32 h = 0; h < hidden; ++h) {
    double value = 0.0;
    for (u32 i = 0; i < inner; ++i) {
      const float factor = w2[(u64{hidden} * mlp + h) * inner + i];
      value += inside[i] * factor;
      off[h] += coded ? std::fabs(doubts[i] * factor) : 0.0;
    }
    results[h] = value;
  }
  if (coded && shape.codes_results()) {
    round_to_codes(results, kResultGroup, 1e-5, off);
  }
  for (u32 h = 0; h < hidden; ++h) {
    sum[h] += results[h] * weight;
    doubt[h] += off[h] * std::fabs(weight);
  }
}

/// Sets the length of rows, and the number of parts of products.
void size_rows(const LayerShape& shape, Geometry& g) {
  const bool coded = shape.codes_rows();
  g.row_bytes = shape.hidden * sizeof(float);
  g.sent_bytes = coded ? coded_row_bytes(shape.hidden, kTokenGroup) : g.row_bytes;
  g.hidden_bytes = coded ? coded_row_bytes(shape.intermediate, kHiddenGroup)
                         : shape.intermediate * sizeof(float);
  g.returned_bytes = shape.codes_results() ? coded_result_bytes(shape.hidden) : g.row_bytes;
  g.alters_rows = coded ? 1 : 0;
  g.product0_parts = ceil_div(shape.intermediate, product0_columns(shape));
  g.product1_parts = ceil_div(shape.hidden, kPlainColumns);
  g.product0_narrow_parts = ceil_div(shape.intermediate, product0_narrow_columns(shape));
  g.product1_narrow_parts = ceil_div(shape.hidden, product1_narrow_columns(shape));
  if (shape.shared_experts > 0) {
    const auto first_parts = [&shape](u32 columns) {
      return shape.shared_experts * ceil_div(shape.shared_intermediate, columns) +
             (shape.shared_gate ? 1 : 0);
    };
    g.shared_bytes = shape.shared_experts * shape.shared_intermediate * sizeof(float);
    g.shared0_parts = first_parts(product0_columns(shape));
    g.shared0_narrow_parts = first_parts(product0_narrow_columns(shape));
  }
}

/// Places experts anywhere, some in several ranks, with a table that says where.
void draw_table(Random& random, RandomWorld& world) {
  Geometry& g = world.geometry;
  const u32 experts = g.experts;
  const u32 each = g.local_experts() + draw(random, 0, 2);  // places of a rank
  std::vector<u32> order(experts);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::vector<u32>> places_of(experts);
  std::vector<u32> used(g.world, 0);  // places of each rank
  const auto put = [&](u32 expert, u32 rank) {
    places_of[expert].push_back(rank * each + used[rank]++);
  };
  for (u32 i = 0; i < experts; ++i) {
    put(order[i], i % g.world);
  }
  const bool copies = g.capacity >= g.max_tokens;  // (otherwise another rule decides which copy
                                                   // drops them)
  for (u32 rank = 0; copies && rank < g.world; ++rank) {
    for (const u32 expert : order) {
      const auto here = [&](u32 place) { return place / each == rank; };
      const auto& its = places_of[expert];
      if (used[rank] < each && draw(random, 0, 2) == 0 && std::ranges::none_of(its, here)) {
        put(expert, rank);
      }
    }
  }
  PlaceTable& table = world.settings.table;
  table.from.push_back(0);
  for (const auto& its : places_of) {
    table.places.insert(table.places.end(), its.begin(), its.end());
    table.from.push_back(static_cast<u32>(table.places.size()));
  }
  g.placed_experts = experts;
  g.experts = g.world * each;
}

/// The values of all experts, as ranks hold them.
template <class T>
std::vector<T> held(const RandomWorld& world, const std::vector<T>& all) {
  const Geometry& g = world.geometry;
  const u64 experts = g.routed_experts();
  const u64 size = all.size() / (experts * slices_of(world));
  std::vector<T> values(slices_of(world) * g.expert_places() * size);
  for (u64 n = 0; n < slices_of(world) * experts; ++n) {  // slice by slice
    for (const u32 its : places_of(world, static_cast<u32>(n % experts))) {
      const u64 place = n / experts * g.expert_places() + its;
      std::copy_n(all.data() + n * size, size, values.data() + place * size);
    }
  }
  return values;
}
/// What all ranks hold, in the layout that the shape has on each rank.
std::vector<float> lying(const RandomWorld& world, const MatrixLayout& layout, u32 halves,
                         const std::vector<float>& plain) {
  const u64 of_rank = plain.size() / world.geometry.ranks();
  const u32 mlps = static_cast<u32>(of_rank / (u64{halves} * layout.rows * layout.depth));
  std::vector<float> values(plain.size());
  for (u64 first = 0; first < values.size(); first += of_rank) {
    for_each_element(layout, halves, mlps,
                     [&](u64 from, u64 to) { values[first + to] = plain[first + from]; });
  }
  return values;
}
Codes held(const RandomWorld& world, const Codes& all) {
  return {held(world, all.codes), held(world, all.scales), held(world, all.scales_2)};
}

}  // namespace

RandomWorld draw_world(Random& random, WorldScale scale) {
  const bool small = scale == WorldScale::fibers;
  RandomWorld world{};
  Geometry& g = world.geometry;
  const u32 worlds[] = {1, 2, 3, 4, 8};
  g.world = worlds[draw(random, 0, small ? 3 : 4)];
  g.experts = g.world * draw(random, 1, 4);
  g.top_k = draw(random, 1, minimum(g.experts, 8U));
  // Now and then more than eight Route blocks: then a look-up among them takes more than one round.
  g.max_tokens = small                     ? draw(random, 1, 24)
                 : draw(random, 0, 9) == 0 ? draw(random, 300, 600)
                                           : draw(random, 1, 150);
  const u32 eights = small ? 1 : 5;  // of columns
  world.shape = LayerShape{8 * draw(random, 1, eights),
                           8 * draw(random, 1, eights),
                           draw(random, 0, 1) == 0
                               ? Activation{Curve::swish, true, 1.0F, 0.0F, INFINITY, false}
                               : Activation{Curve::relu, false, 1.0F, 0.0F, INFINITY, false},
                           Scoring::softmax,
                           true,
                           1.0F,
                           1,
                           1,
                           GroupScore::top2_sum,
                           0,
                           false,
                           false,
                           0,
                           0,
                           false,
                           WeightFormat::plain,
                           ActivationFormat::plain,
                           WeightFormat::plain,
                           ActivationFormat::plain,
                           false,
                           GateUp::concatenated};
  g.row_map = draw(random, 0, 1) == 0 ? RowMap::ragged : RowMap::capacity;
  g.capacity = draw(random, 0, 2) == 0 ? draw(random, 1, g.max_tokens) : g.max_tokens;
  g.chunk_rows = small ? 4 * draw(random, 1, 3) : 32;
  g.tile_rows = small ? 8 * draw(random, 1, 2) : draw(random, 0, 1) == 0 ? 128 : 16;
  g.route_tokens = small ? 8 : 32;
  g.route_slices = 1;
  const u32 narrow_rows = draw(random, 0, 1) == 0 ? 0 : 8 * draw(random, 1, 8);
  g.narrow_rows = minimum(narrow_rows, g.tile_rows - 8);
  g.segment_align = Geometry::kSegmentAlign;
  g.large_experts = draw(random, 0, 1);
  g.processors = draw(random, 1, 3);
  // All peers on one node, each on its own, or a mix of direct and remote peers.
  const u32 ranks_per_node = draw(random, 0, 2) == 0 ? g.world : draw(random, 1, g.world);
  g.remote = ranks_per_node < g.world ? 1 : 0;
  g.window_rows = draw(random, 0, 1) == 0 ? 0 : draw(random, 1, 400);  // 0: as small as possible
  g.dedup_rows = draw(random, 0, 1) == 0 ? 0 : draw(random, 1, small ? 8 : 60);
  g.dispatch_tokens = draw(random, 0, 1) == 0 ? 0 : draw(random, 1, small ? 8 : 60);
  g.up_front_rows = draw(random, 0, 1) == 0 ? 0 : 8 * draw(random, 1, 8);
  const bool split_os = draw(random, 0, 1) == 1 || Machine::kReturnsSubscribers > 1;
  const bool jitter = draw(random, 0, 3) == 0;
  g.dedup_after = g.dedup_rows == 0 ? 0 : draw(random, 0, 2);
  if (draw(random, 0, 2) == 0) {
    LayerShape& shape = world.shape;
    shape.shared_experts = draw(random, 1, 2);
    shape.shared_intermediate = 8 * draw(random, 1, eights);
    shape.shared_gate = draw(random, 0, 1) == 0;
  }
  Random aside = random;  // so that a seed gives the same calls, in the same order, in any format
  if (draw(aside, 0, 3) == 0) {  // with last scales that have fewer columns than a layer's do
    world.shape.weight_format = static_cast<WeightFormat>(draw(aside, 1, 6));
    if (is_fp8(world.shape.weight_format) && draw(aside, 0, 1) == 0) {  // then with other sizes
      world.shape.activation_format = ActivationFormat::fp8_group128;
      world.shape.hidden = kTokenGroup;
      world.shape.intermediate = kHiddenGroup * draw(aside, 1, 2);
    }
  }
  if (draw(aside, 0, 3) == 0) {  // the last ranks have fewer experts, or none
    g.experts -= draw(aside, 0, g.world - 1);
    g.top_k = minimum(g.top_k, g.experts);
  }
  if (world.shape.shared_experts > 0 && draw(aside, 0, 1) == 0) {
    world.shape.shared_weight_format = world.shape.weight_format;
  }
  Random last = aside;
  if (world.shape.weight_format != WeightFormat::plain && !is_fp8(world.shape.weight_format) &&
      draw(last, 0, 1) == 0) {
    world.shape.activation_format = ActivationFormat::fp8_group128;
    world.shape.hidden = kTokenGroup;
    world.shape.intermediate = kHiddenGroup;
  }
  if (world.shape.codes_rows() && draw(last, 0, 1) == 0) {
    world.shape.result_format = ActivationFormat::fp8_group128;
  }
  size_rows(world.shape, g);
  world.settings =
      small ? TwinSettings{1'000'000ULL, split_os, 0.0, 0, ranks_per_node}
            : TwinSettings{20'000'000'000ULL, split_os, jitter ? 50.0 : 0.0, 1, ranks_per_node};
  if (draw(aside, 0, 2) == 0) {
    draw_table(aside, world);
  }
  g.between_rows = draw(aside, 0, 1) == 0 ? 0 : draw(aside, 1, small ? 100 : 400);
  g.ring_rows = draw(aside, 0, 1) == 0 ? 0 : draw(aside, 1, small ? 20 : 200);
  g.in_place_tokens = draw(aside, 0, 3) == 0 ? 0 : Geometry::kInPlaceTokens;
  g.gathers_rows = draw(aside, 0, 1);
  g.between_pairs = g.in_place_tokens == 0 ? draw(aside, 0, 1) : 0;
  if (world.shape.weight_format == WeightFormat::plain) {
    world.shape.transposed = draw(aside, 0, 3) == 0;
    world.shape.gate_up =
        world.shape.gated() ? static_cast<GateUp>(draw(aside, 0, 2)) : GateUp::concatenated;
  }
  return world;
}

std::vector<float> draw_floats(Random& random, u64 count, float deviation) {
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

std::vector<u32> places_of(const RandomWorld& world, u32 expert) {
  if (!world.geometry.placed()) {
    return {expert};
  }
  const PlaceTable& table = world.settings.table;
  return {table.places.begin() + table.from[expert], table.places.begin() + table.from[expert + 1]};
}

void draw_slices(const Random& random, RandomWorld& world, u32 holders_most) {
  Geometry& g = world.geometry;
  Random aside = random;
  if (g.remote != 0 || g.placed() || draw(aside, 0, 1) != 0) {
    return;
  }
  g.world = minimum(g.world, holders_most);
  g.slices = draw(aside, 2, 4 / g.world);
  g.sums_everywhere = draw(aside, 0, 1);
  world.settings.ranks_per_node = g.ranks();
}

u32 holder_of(const RandomWorld& world, u32 rank) { return rank / slices_of(world); }

TwinSettings settings_of(const RandomWorld& world, u32 rank) {
  const Geometry& g = world.geometry;
  TwinSettings settings = world.settings;
  settings.slice = rank % slices_of(world);
  for (u32 peer = 0; g.sliced() && peer < g.ranks(); ++peer) {  // as Rank::everywhere
    settings.peers.push_back(peer % g.world * g.slices +
                             (settings.slice + peer / g.world) % g.slices);
  }
  return settings;
}

Experts draw_experts(Random& random, const RandomWorld& world) {
  const u64 slices = slices_of(world);
  const u64 routed = world.geometry.routed_experts();
  const u64 experts = routed * slices;
  const LayerShape& shape = world.shape;
  const u64 shared = slices * shape.shared_experts * shape.shared_intermediate;
  Experts drawn{draw_floats(random, routed * shape.hidden, 1.0F),
                draw_floats(random, experts * shape.w1_rows() * shape.hidden, 0.3F),
                draw_floats(random, experts * shape.hidden * shape.intermediate, 0.3F),
                draw_floats(random, shared * shape.w1_rows_of(1) * shape.hidden, 0.3F),
                draw_floats(random, shared * shape.hidden, 0.3F),
                draw_floats(random, shape.shared_gate ? shape.hidden : 0, 0.3F),
                {},
                {},
                {},
                {}};
  if (shape.weight_format != WeightFormat::plain) {
    Random aside = random;
    drawn.held_w1_codes =
        held(world, draw_codes(aside, shape.weight_format, experts * shape.w1_rows_of(1),
                               shape.intermediate, shape.hidden, drawn.w1));
    drawn.held_w2_codes = held(world, draw_codes(aside, shape.weight_format, experts, shape.hidden,
                                                 shape.intermediate, drawn.w2));
    if (shape.shared_weight_format != WeightFormat::plain) {
      drawn.shared_w1_codes = draw_codes(aside, shape.shared_weight_format,
                                         slices * shape.shared_experts * shape.w1_rows_of(1),
                                         shape.shared_intermediate, shape.hidden, drawn.shared_w1);
      drawn.shared_w2_codes =
          draw_codes(aside, shape.shared_weight_format, slices * shape.shared_experts, shape.hidden,
                     shape.shared_intermediate, drawn.shared_w2);
    }
  }
  drawn.held_w1 = lying(world, w1_layout(shape), shape.gated() ? 2 : 1, held(world, drawn.w1));
  drawn.held_w2 = lying(world, w2_layout(shape), 1, held(world, drawn.w2));
  return drawn;
}

RankCall draw_call(Random& random, const RandomWorld& world) {
  const Geometry& g = world.geometry;
  RankCall call;
  call.tokens = draw(random, 0, 3) == 0 ? 0 : draw(random, 0, g.max_tokens);
  call.x = draw_floats(random, u64{call.tokens} * world.shape.hidden, 1.0F);
  call.weights = draw_floats(random, u64{call.tokens} * g.top_k, 1.0F);
  call.out.assign(u64{call.tokens} * world.shape.hidden, NAN);
  Random aside = random;
  const bool left = draw(aside, 0, 3) == 0;
  call.leaves_partials = left && g.sliced() && !world.settings.gradients;  // caller sums up
  const bool hot = draw(random, 0, 2) == 0;  // the same few experts for every token
  for (u32 token = 0; token < call.tokens; ++token) {
    std::vector<i32> experts(g.routed_experts());
    for (u32 e = 0; e < g.routed_experts(); ++e) {
      experts[e] = static_cast<i32>(e);
    }
    if (!hot) {
      std::shuffle(experts.begin(), experts.end(), random);
    }
    for (u32 j = 0; j < g.top_k; ++j) {
      call.ids.push_back(draw(random, 0, 9) == 0 ? -1 : experts[j]);
    }
  }
  return call;
}

std::vector<std::vector<RankCall>> draw_calls(Random& random, const RandomWorld& world, u32 calls) {
  std::vector<std::vector<RankCall>> drawn(world.geometry.ranks());
  for (u32 rank = 0; rank < drawn.size(); ++rank) {
    const u32 slice = rank % slices_of(world);
    for (u32 call = 0; call < calls && slice == 0; ++call) {
      drawn[rank].push_back(draw_call(random, world));
    }
    if (slice != 0) {
      drawn[rank] = drawn[rank - slice];
    }
  }
  return drawn;
}

Operands operands_of(const RandomWorld& world, const Experts& experts, u32 rank, RankCall& call) {
  static const i32 kNobody = -1;  // routing is given even where there is no token
  const LayerShape& shape = world.shape;
  // This rank's part of what experts have.
  const Geometry& g = world.geometry;
  const u32 slice = rank % slices_of(world);
  const u32 place = slice * g.world + holder_of(world, rank);
  const auto own = [&g, place](const auto& all) {
    return all.data() + all.size() / g.ranks() * place;
  };
  const auto of_slice = [&](const auto& all) {
    return all.data() + all.size() / slices_of(world) * slice;
  };
  // The data of a matrix: its plain values, or its codes.
  const auto read = [](WeightFormat format, const auto* numbers, const auto* codes) {
    return format == WeightFormat::plain ? static_cast<const void*>(numbers) : codes;
  };
  const WeightFormat format = shape.weight_format;
  const WeightFormat shared = shape.shared_weight_format;
  return Operands{.element = Element::kFloat32,
                  .x = call.x.data(),
                  .gate = experts.gate.data(),
                  .topk_ids = call.ids.empty() ? &kNobody : call.ids.data(),
                  .topk_weights = call.weights.data(),
                  .w1 = read(format, own(experts.held_w1), own(experts.held_w1_codes.codes)),
                  .w2 = read(format, own(experts.held_w2), own(experts.held_w2_codes.codes)),
                  .w3 = ups_of(shape, own(experts.held_w1), experts.held_w1.size() / g.ranks()),
                  .w1_scale = own(experts.held_w1_codes.scales),
                  .w2_scale = own(experts.held_w2_codes.scales),
                  .w1_scale_2 = own(experts.held_w1_codes.scales_2),
                  .w2_scale_2 = own(experts.held_w2_codes.scales_2),
                  .shared_w1 = read(shared, of_slice(experts.shared_w1),
                                    of_slice(experts.shared_w1_codes.codes)),
                  .shared_w2 = read(shared, of_slice(experts.shared_w2),
                                    of_slice(experts.shared_w2_codes.codes)),
                  .shared_gate = experts.shared_gate.data(),
                  .shared_w1_scale = of_slice(experts.shared_w1_codes.scales),
                  .shared_w2_scale = of_slice(experts.shared_w2_codes.scales),
                  .shared_w1_scale_2 = of_slice(experts.shared_w1_codes.scales_2),
                  .shared_w2_scale_2 = of_slice(experts.shared_w2_codes.scales_2),
                  .out = call.out.data(),
                  .leaves_partials = call.leaves_partials};
}

/// The layer's definition, in double precision, one pair at a time.
double largest_error(const RandomWorld& world, const Experts& experts, const RankCall& call,
                     u32 rank) {
  const Geometry& g = world.geometry;
  const u32 hidden = world.shape.hidden;
  std::vector<u32> used(g.routed_experts(), 0);
  double worst = 0.0;
  const bool scatters = g.sliced() && g.sums_everywhere == 0 && !call.leaves_partials;
  const TokenRange own =
      scatters ? tokens_owned(g, call.tokens, rank % slices_of(world)) : TokenRange{0, call.tokens};
  // The slices whose sum is a rank's output.
  const u32 first = call.leaves_partials ? rank % slices_of(world) : 0;
  const u32 end = call.leaves_partials ? first + 1 : slices_of(world);
  for (u32 token = 0; token < own.end; ++token) {
    const float* x = &call.x[u64{token} * hidden];
    std::vector<double> sum(hidden, 0.0);
    std::vector<double> doubt(hidden, 0.0);
    for (u32 j = 0; j < g.top_k; ++j) {
      const i32 expert = call.ids[token * g.top_k + j];
      if (expert < 0 || used[expert]++ >= g.capacity) {
        continue;
      }
      for (u32 slice = first; slice < end; ++slice) {
        add_mlp(world.shape, experts.w1, experts.w2,
                slice * g.routed_experts() + static_cast<u32>(expert), world.shape.intermediate,
                world.shape.codes_rows(), call.weights[token * g.top_k + j], x, sum, doubt);
      }
    }
    double logit = 0.0;
    for (u32 h = 0; h < experts.shared_gate.size(); ++h) {
      logit += double{x[h]} * experts.shared_gate[h];
    }
    const double weight = world.shape.shared_gate ? 1.0 / (1.0 + std::exp(-logit)) : 1.0;
    for (u32 n = first * world.shape.shared_experts; n < end * world.shape.shared_experts; ++n) {
      add_mlp(world.shape, experts.shared_w1, experts.shared_w2, n, world.shape.shared_intermediate,
              false, weight, x, sum, doubt);
    }
    for (u32 h = 0; token >= own.first && h < hidden; ++h) {
      const double difference = std::fabs(sum[h] - call.out[u64{token} * hidden + h]) - doubt[h];
      const double error = difference / (1.0 + std::fabs(sum[h]));
      worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    }
  }
  return worst;
}

Heaps::Heaps(const Geometry& geometry) : Heaps(geometry.ranks(), Layout(geometry).bytes()) {}

Heaps::Heaps(u32 ranks, u64 bytes) : bytes_(bytes) {
  for (u32 p = 0; p < ranks; ++p) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "mapping a heap");
    }
    addresses_.push_back(static_cast<u8*>(memory));
  }
}

Heaps::~Heaps() {
  for (u8* memory : addresses_) {
    munmap(memory, bytes_);
  }
}

}  // namespace moeos::twin
