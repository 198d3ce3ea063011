// SPDX-License-Identifier: Apache-2.0
// What a twin processor computes: the six tasks on one thread.
//
// Satisfies runtime/actors/warp_processor.hpp's Kernels. Must not depend on: queues, flags, when a
// task runs.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/shape.hpp"
#include "kernels/twin/activation.hpp"
#include "kernels/twin/coded_rows.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/gemm.hpp"
#include "kernels/twin/matrices.hpp"
#include "kernels/twin/operands.hpp"
#include "kernels/twin/route.hpp"
#include "kernels/twin/saved_rows.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/plan/counted_rows.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/rows/row_tasks.hpp"
#include "runtime/words/task.hpp"

namespace moeos::twin {

class TwinKernels {
 public:
  /// intermediate: Geometry::between_bytes(), shared by the rank's processors: in the storage type
  /// [Geometry::intermediate_rows_max()][I], or quantized rows, then [token][n * Is] of the shared
  /// experts. coded_rows: [Geometry::max_tokens][Geometry::sent_bytes], also shared, where tokens
  /// are sent quantized.
  TwinKernels(const Rank<Machine>& rank, const Call& call, const LayerShape& shape,
              const Operands& operands, u8* intermediate, u8* coded_rows, Scratch& scratch)
      : rank_(rank),
        call_(call),
        shape_(shape),
        operands_(operands),
        intermediate_(intermediate),
        coded_rows_(coded_rows),
        scratch_(scratch),
        router_(rank.geometry(), shape, operands, rank.memory, rank.rank, scratch),
        map_(rank.geometry(), rank.memory, call),
        saved_(rank, shape, operands) {}

  u32 route(u32 block) {
    const Geometry& geometry = rank_.geometry();
    const TokenRange tokens = tokens_of_block(geometry, call_, block);
    MOEOS_CHECK(tokens.first < tokens.end);
    const u32 bad_token = router_.route(tokens.first, tokens.end);
    if (bad_token == kNone) {
      for (u32 token = tokens.first; shape_.codes_rows() && token < tokens.end; ++token) {
        code_token(token);
      }
      const u32 end = geometry.reads_in_place(call_.tokens) ? tokens.end : tokens.first;
      for (u32 pair = tokens.first * geometry.top_k; pair < end * geometry.top_k; ++pair) {
        tell_choice<Machine>(rank_.memory, call_.epoch, pair, rank_.memory.pair_expert[pair]);
      }
      sort_block(geometry, rank_.memory, call_, block);
    }
    return bad_token;
  }

  void copy_row(u32 token, u8* destination) {
    if (shape_.codes_rows()) {
      std::memcpy(destination, coded_row(token), rank_.geometry().sent_bytes);
    } else if (shape_.weight_on_input) {
      store(operands_.element, read_token(token, weight_on_input(token)), shape_.hidden,
            destination);
    } else {
      const ConstElements x(operands_.element, operands_.x);
      std::memcpy(destination, x.at(u64{token} * shape_.hidden), rank_.geometry().row_bytes);
    }
  }

  void replicate_row(const u8* source, u8* destination) {
    std::memcpy(destination, source, rank_.geometry().sent_bytes);
  }

  /// Computes one N-tile of a product.
  void product(const Task& task, u32 part) {
    if (task.kind == kFirstProduct.kind) {
      first_product(task, part);
    } else {
      second_product(task, part);
    }
  }

  /// Computes one N-tile of activation(A * W1^T + b1), written to the tile's rows between the
  /// products; or, for the shared experts' gate, the weights of tokens' shared results.
  void first_product(const Task& task, u32 part) {
    const Element element = operands_.element;
    const Mlps mlps = mlps_of(task);
    const u32 width = task.narrow != 0 ? product0_narrow_columns(shape_) : product0_columns(shape_);
    const u32 parts = ceil_div(mlps.values, width);
    const u32 nth = part / parts;
    const u32 panels = task.padded_rows / kPanelRows;
    pack_inputs(task);
    if (nth == mlps.count) {  // after all MLPs: their gate
      weigh_shared(task);
      return;
    }
    const u32 first = part % parts * width;
    const u32 columns = minimum(width, mlps.values - first);
    const u32 halves = shape_.gated() ? 2 : 1;
    const u32 stride = halves * width;
    float* results = scratch_.results.get();
    for (u32 half = 0; half < halves; ++half) {
      float* to = results + std::size_t{half} * width;
      multiply(scratch_.panels.get(), panels, shape_.hidden, mlps.w1.rows(mlps.first + nth, half),
               first, columns, to, stride);
      add_bias(ConstElements(element, mlps.b1), b1_layout(shape_), mlps.first, half, first, columns,
               task.padded_rows, to, stride);
    }
    if (!is_shared(rank_.geometry(), task)) {
      saved_.for_each(task, [&](u8* saved, u32 row) {
        const float* values = results + std::size_t{row} * stride;
        store(element, values, columns, saved + first * size_of(element));
        if (shape_.gated()) {
          store(element, values + width, columns,
                saved + (shape_.intermediate + first) * size_of(element));
        }
      });
    }
    for (u32 row = 0; row < task.padded_rows; ++row) {
      float* values = results + std::size_t{row} * stride;
      for (u32 n = 0; n < columns; ++n) {
        values[n] = shape_.gated() ? gated(shape_.activation, values[n], values[width + n])
                                   : curve_of(shape_.activation, values[n]);
      }
      if (const u32 place = row_between(task, row); place != kNone) {
        store_between(mlps, place, nth * mlps.values + first, values, columns);
      }
    }
  }

  /// Computes one N-tile of GEMM1, each row written where its owner will combine it.
  void second_product(const Task& task, u32 part) {
    const Element element = operands_.element;
    const Mlps mlps = mlps_of(task);
    const u32 width = has_narrow_parts(task) ? product1_narrow_columns(shape_) : kPlainColumns;
    const u32 first = part * width;
    const u32 columns = minimum(width, shape_.hidden - first);
    const u64 weight_row = u64{mlps.first} * shape_.hidden + first;
    float* results = scratch_.results.get();
    for (u32 nth = 0; nth < mlps.count; ++nth) {
      float* sums = nth == 0 ? results : scratch_.more_results.get();
      multiply_second(task, mlps, nth, first, columns, sums, width);
      for (u32 i = 0; nth > 0 && i < task.padded_rows * width; ++i) {
        results[i] += i % width < columns ? sums[i] : 0.0F;
      }
    }
    const ConstElements b2(element, mlps.b2);
    u32 tile_row = 0;
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      u8* destination = outgoing_results(rank_, task, segment);
      for (u32 i = 0; i < segment.rows; ++i) {
        float* values = results + std::size_t{tile_row + i} * width;
        for (u32 n = 0; b2 && n < columns; ++n) {
          values[n] += b2[weight_row + n];
        }
        store_result(mlps, destination + u64{i} * mlps.result_bytes, first, values, columns);
      }
      tile_row += laid_out_rows(rank_.geometry(), task, s, tile_row);
    }
  }

  /// Sums the token's rows, weighted, in the order j = 0 ... k-1 in fp32 (thesis eq. 5.2), rounded
  /// once.
  void combine(u32 token) {
    const Geometry& geometry = rank_.geometry();
    float* sum = scratch_.row.get();
    std::fill(sum, sum + shape_.hidden, 0.0F);
    for (u32 j = 0; j < geometry.top_k; ++j) {
      const u32 pair = token * geometry.top_k + j;
      if (!map_.sent(pair)) {
        add_own_row(pair, sum);
        continue;
      }
      const u8* result = rank_.heap + rank_.layout.result(rank_.memory.pair_row[pair]);
      const float weight = shape_.weight_on_input ? 1.0F : rank_.memory.pair_weight[pair];
      if (shape_.codes_results()) {
        add_codes(result, shape_.hidden, kResultGroup, weight, sum);
        continue;
      }
      const ConstElements values(operands_.element, result);
      for (u32 n = 0; n < shape_.hidden; ++n) {
        sum[n] += weight * values[n];
      }
    }
    if (geometry.shares()) {
      const ConstElements values(operands_.element, rank_.heap + rank_.layout.shared_result(token));
      const float weight = shape_.shared_gate ? rank_.memory.shared_weight[token] : 1.0F;
      for (u32 n = 0; n < shape_.hidden; ++n) {
        sum[n] += weight * values[n];
      }
    }
    store(operands_.element, sum, shape_.hidden,
          adds_slices(geometry, call_)
              ? outgoing_partial(rank_, place_of_partial(rank_, call_, token))
              : output_row(token));
  }

  /// Adds the token's sums up over slices, in their order in fp32, rounded once: to this rank's
  /// output and, if this rank is the token's owner, to all other slices.
  void add_slices(const Task& task, u32 token) {
    const Geometry& geometry = rank_.geometry();
    const Summands summands = summands_of(geometry, task);
    float* sum = scratch_.row.get();
    std::fill(sum, sum + shape_.hidden, 0.0F);
    for (u32 nth = 0; nth < sums_of(geometry, summands); ++nth) {
      const ConstElements values(
          operands_.element,
          rank_.heap + rank_.layout.sum_at(sum_row(rank_, call_, summands, token, nth)));
      for (u32 n = 0; n < shape_.hidden; ++n) {
        sum[n] += values[n];
      }
    }
    store(operands_.element, sum, shape_.hidden, output_row(token));
    const bool to_all = summands == Summands::slices && geometry.sums_everywhere != 0;
    for (u32 nth = 1; to_all && nth < geometry.slices; ++nth) {
      store(operands_.element, sum, shape_.hidden, outgoing_total(rank_, nth, token));
    }
  }

 private:
  static_assert(kPanelRows == Geometry::kSegmentAlign, "a segment fills whole panels");

  /// The MLPs of a tile: an expert, or all shared experts, each of which has its own columns of the
  /// rows between the products, and whose results are added up.
  struct Mlps {
    Matrices w1;
    const void* b1;
    Matrices w2;
    const void* b2;
    u32 first;  // index in these weights
    u32 count;
    u32 values;  // of one MLP, in a row between the products
    u64 between_at;
    u32 between_bytes;  // of a row
    bool coded;         // its rows, and those between the products, are quantized
    u32 result_bytes;   // of a row
    bool codes_results;
  };
  Mlps mlps_of(const Task& task) const {
    if (is_shared(rank_.geometry(), task)) {
      const WeightFormat format = shape_.shared_weight_format;
      const u32 values = shape_.shared_intermediate;
      return {{operands_.element,
               {values, shape_.hidden, shape_.gated() ? 2U : 1U},
               operands_.shared_w1,
               nullptr,
               format,
               operands_.shared_w1_scale,
               operands_.shared_w1_scale_2},
              nullptr,
              {operands_.element,
               {shape_.hidden, values, 1},
               operands_.shared_w2,
               nullptr,
               format,
               operands_.shared_w2_scale,
               operands_.shared_w2_scale_2},
              nullptr,
              0,
              shape_.shared_experts,
              values,
              rank_.geometry().shared_between_at(),
              rank_.geometry().shared_bytes,
              false,
              rank_.geometry().row_bytes,
              false};
    }
    const WeightFormat format = shape_.weight_format;
    // A weight that is multiplied by quantized rows is code times scale, unrounded.
    const Element element = shape_.codes_rows() ? Element::kFloat32 : operands_.element;
    return {{element, w1_layout(shape_), operands_.w1, operands_.w3, format, operands_.w1_scale,
             operands_.w1_scale_2},
            operands_.b1,
            {element, w2_layout(shape_), operands_.w2, nullptr, format, operands_.w2_scale,
             operands_.w2_scale_2},
            operands_.b2,
            task.local_expert,
            1,
            shape_.intermediate,
            0,
            rank_.geometry().hidden_bytes,
            shape_.codes_rows(),
            rank_.geometry().returned_bytes,
            shape_.codes_results()};
  }

  /// sums = the tile's rows of one MLP times some columns of its w2.
  void multiply_second(const Task& task, const Mlps& mlps, u32 nth, u32 first, u32 columns,
                       float* sums, u32 stride) {
    for (u32 row = 0; row < task.padded_rows; row += kPanelRows) {
      float* panel = &scratch_.panels[row / kPanelRows * panel_floats(mlps.values)];
      const u8* rows = rows_between(task, mlps, row);
      if (mlps.coded) {
        pack_codes(rows, mlps.between_bytes, kPanelRows, mlps.values, kHiddenGroup, panel);
      } else {
        pack_rows(operands_.element, rows + nth * mlps.values * size_of(operands_.element),
                  mlps.between_bytes, kPanelRows, mlps.values, panel);
      }
    }
    multiply(scratch_.panels.get(), task.padded_rows / kPanelRows, mlps.values,
             mlps.w2.rows(mlps.first + nth, 0), first, columns, sums, stride);
  }

  /// Computes the weight of each token's shared result, from the packed rows of its tile.
  void weigh_shared(const Task& task) {
    const ConstElements gate(operands_.element, operands_.shared_gate);
    for (u32 row = 0; row < task.rows; ++row) {
      const float* panel =
          &scratch_.panels[row / kPanelRows * panel_floats(shape_.hidden)] + row % kPanelRows;
      float logit = 0.0F;
      for (u32 n = 0; n < shape_.hidden; ++n) {
        logit += panel[n * kPanelRows] * gate[n];
      }
      rank_.memory.shared_weight[task.first_result + row] = 1.0F / (1.0F + std::exp(-logit));
    }
  }

  /// sum += weight times x for a pair with a zero expert. Pairs beyond a capacity have an expert.
  void add_own_row(u32 pair, float* sum) {
    const float weight = rank_.memory.pair_weight[pair];
    if (rank_.memory.pair_expert[pair] != kNone || weight == 0.0F) {
      return;
    }
    const ConstElements x(operands_.element, operands_.x);
    const u64 first = u64{pair / rank_.geometry().top_k} * shape_.hidden;
    for (u32 n = 0; n < shape_.hidden; ++n) {
      sum[n] += weight * x[first + n];
    }
  }

  /// Packs the tile's rows: tokens, or segments from the arrival cells, each padded with zero rows
  /// to a panel.
  void pack_inputs(const Task& task) {
    if (is_shared(rank_.geometry(), task)) {
      const ConstElements x(operands_.element, operands_.x);
      for (u32 row = 0; row < task.rows; row += kPanelRows) {
        pack_rows(operands_.element, x.at(u64{task.first_result + row} * shape_.hidden),
                  rank_.geometry().row_bytes, minimum(kPanelRows, task.rows - row), shape_.hidden,
                  &scratch_.panels[row / kPanelRows * panel_floats(shape_.hidden)]);
      }
      return;
    }
    if (task.from == RowsIn::listed_tokens) {
      static_assert(Geometry::kInPlaceTokens <= kPanelRows);
      pack_tokens(task.rows, scratch_.panels.get(),
                  [&](u32 row) { return token_of_row(task, row); });
      return;
    }
    float* panel = scratch_.panels.get();
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      if (!copies_rows(rank_, segment.source)) {
        for (u32 row = 0; row < segment.rows; row += kPanelRows) {
          pack_tokens(minimum(kPanelRows, segment.rows - row), panel, [&](u32 nth) {
            return own_token(rank_, own_place(rank_, task.local_expert, segment, row + nth));
          });
          panel += panel_floats(shape_.hidden);
        }
        continue;
      }
      const u8* const first = arrived_row(rank_, segment.source, segment.first_row);
      for (u32 row = 0; row < segment.rows; row += kPanelRows) {
        const u32 stride = rank_.geometry().sent_bytes;
        const u8* from = first + u64{row} * stride;
        const u32 rows = minimum(kPanelRows, segment.rows - row);
        if (shape_.codes_rows()) {
          pack_codes(from, stride, rows, shape_.hidden, kTokenGroup, panel);
        } else {
          pack_rows(operands_.element, from, stride, rows, shape_.hidden, panel);
        }
        panel += panel_floats(shape_.hidden);
      }
    }
  }

  /// Packs rows that are tokens, at most a panel's: row r is token token(r).
  template <class TokenOf>
  void pack_tokens(u32 rows, float* panel, TokenOf token) {
    const u32 row_bytes = rank_.geometry().row_bytes;
    for (u32 row = 0; row < rows; ++row) {
      copy_row(token(row), scratch_.tokens.get() + row * row_bytes);
    }
    pack_rows(operands_.element, scratch_.tokens.get(), row_bytes, rows, shape_.hidden, panel);
  }

  u8* output_row(u32 token) const {
    return static_cast<u8*>(operands_.out) +
           u64{token} * shape_.hidden * size_of(operands_.element);
  }

  /// The factor of a token before its experts.
  float weight_on_input(u32 token) const {
    const Geometry& geometry = rank_.geometry();
    MOEOS_CHECK(!shape_.weight_on_input || geometry.choices() == 1);
    return shape_.weight_on_input ? rank_.memory.pair_weight[token * geometry.top_k] : 1.0F;
  }
  /// A token in fp32, times a weight; valid until this processor's next token.
  const float* read_token(u32 token, float weight) {
    const ConstElements x(operands_.element, operands_.x);
    float* row = scratch_.row.get();
    for (u32 n = 0; n < shape_.hidden; ++n) {
      row[n] = weight * x[u64{token} * shape_.hidden + n];
    }
    return row;
  }

  u8* coded_row(u32 token) const { return coded_rows_ + u64{token} * rank_.geometry().sent_bytes; }
  /// Quantizes a token's row, which is then sent to all of its experts.
  void code_token(u32 token) {
    u8* codes = coded_row(token);
    if (operands_.x_scale != nullptr) {  // quantized by the caller
      const u32 scales = shape_.hidden / kTokenGroup;
      std::memcpy(codes, static_cast<const u8*>(operands_.x) + u64{token} * shape_.hidden,
                  shape_.hidden);
      std::memcpy(codes + shape_.hidden, operands_.x_scale + u64{token} * scales,
                  scales * sizeof(float));
      return;
    }
    code_numbers(read_token(token, 1.0F), shape_.hidden, kTokenGroup, weight_on_input(token), codes,
                 codes + shape_.hidden);
  }

  /// Whether rows between the products are in the order of pairs.
  bool by_pairs(const Task& task) const {
    return rank_.geometry().between_by_pairs() && !is_shared(rank_.geometry(), task);
  }
  /// The index of row `row` of a tile between the products; kNone: it has none.
  u32 row_between(const Task& task, u32 row) const {
    if (!by_pairs(task)) {
      return task.first_result + row;
    }
    return row < task.rows ? place_between(pairs_of_tile(rank_, task)[row]) : kNone;
  }
  /// A panel's rows of a tile between the products, from row `first` on, contiguous; rows without
  /// an index are zeros.
  const u8* rows_between(const Task& task, const Mlps& mlps, u32 first) {
    if (!by_pairs(task)) {
      return between_at(mlps, task.first_result + first);
    }
    for (u32 nth = 0; nth < kPanelRows; ++nth) {
      u8* const row = scratch_.tokens.get() + u64{nth} * mlps.between_bytes;
      const u32 place = row_between(task, first + nth);
      if (place == kNone) {
        std::memset(row, 0, mlps.between_bytes);
      } else {
        std::memcpy(row, between_at(mlps, place), mlps.between_bytes);
      }
    }
    return scratch_.tokens.get();
  }

  /// A row between two products: of one expert's values, or of all shared experts'.
  u8* between_at(const Mlps& mlps, u32 row) const {
    return intermediate_ + mlps.between_at + u64{row} * mlps.between_bytes;
  }

  /// Writes some columns of a row between the products, from `column` on.
  void store_between(const Mlps& mlps, u32 row, u32 column, const float* values, u32 columns) {
    u8* to = between_at(mlps, row);
    if (mlps.coded) {
      u8* scales = to + mlps.values + column / kHiddenGroup * sizeof(float);
      code_numbers(values, columns, kHiddenGroup, 1.0F, to + column, scales);
    } else {
      store(operands_.element, values, columns, to + u64{column} * size_of(operands_.element));
    }
  }

  /// Writes some columns of a result, from `column` on.
  void store_result(const Mlps& mlps, u8* to, u32 column, const float* values, u32 columns) const {
    if (mlps.codes_results) {
      u8* scales = to + shape_.hidden + column / kResultGroup * sizeof(float);
      code_numbers(values, columns, kResultGroup, 1.0F, to + column, scales);
    } else {
      store(operands_.element, values, columns, to + u64{column} * size_of(operands_.element));
    }
  }

  const Rank<Machine>& rank_;
  const Call& call_;
  const LayerShape& shape_;
  const Operands& operands_;
  u8* intermediate_;
  u8* coded_rows_;
  Scratch& scratch_;
  Router router_;
  RoutingMap map_;
  SavedRows saved_;
};

}  // namespace moeos::twin
