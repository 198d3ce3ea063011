// SPDX-License-Identifier: Apache-2.0
// What a twin processor computes in a gradient call: the six tasks on one thread.
//
// The device OS runs it like a forward call; only what a row holds and what the two products are
// differs. A token's row brings x and the gradient dY of its output. GEMM0 of a tile is dA = dY *
// W2, together with h = x * W1^T + b1, which is recomputed where the forward call has not saved it.
// Its epilogue makes dH, the gradient of h, and a part <dA, A> of the weight's gradient. GEMM1 is
// dX = dH * W1, whose rows return to the token's owner. Combine adds them up. No row is multiplied
// by its weight on the way: the owner does that. Where experts are sliced, a token's sums are added
// up over slices as its outputs are, and each slice gets them: fp32 in rows that are long enough,
// so they are rounded once.
//
// Satisfies runtime/actors/warp_processor.hpp's Kernels. The gradients of weights come after the
// call (weight_gradients.hpp): GEMM0 keeps what they need. Must not depend on: queues, flags, when
// a task runs.
#pragma once

#include <cstring>

#include "kernels/shape.hpp"
#include "kernels/twin/activation.hpp"
#include "kernels/twin/element.hpp"
#include "kernels/twin/gemm.hpp"
#include "kernels/twin/gradient_rows.hpp"
#include "kernels/twin/matrices.hpp"
#include "kernels/twin/operands.hpp"
#include "kernels/twin/route.hpp"
#include "kernels/twin/saved_rows.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/memory/routing_map.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/rows/packet.hpp"
#include "runtime/words/task.hpp"

namespace moeos::twin {

class GradientKernels {
 public:
  /// kept: Geometry::between_bytes(), rows of GradientRows; places: for each row of the cells
  /// (Layout::rows()) the index of its kept row; both shared by the rank's processors.
  GradientKernels(const Rank<Machine>& rank, const Call& call, const LayerShape& shape,
                  const Operands& operands, u8* kept, u32* places, Scratch& scratch,
                  GradientScratch& more)
      : rank_(rank),
        call_(call),
        shape_(shape),
        operands_(operands),
        gradients_(*operands.gradients),
        rows_(rank.geometry(), shape, operands.element),
        w1_{operands.element, w1_layout(shape), operands.w1, operands.w3},
        w2_{operands.element, w2_layout(shape), operands.w2},
        kept_(kept),
        places_(places),
        scratch_(scratch),
        more_(more),
        router_(rank.geometry(), shape, operands, rank.memory, rank.rank, scratch),
        map_(rank.geometry(), rank.memory, call),
        saved_(rank, shape, operands) {
    MOEOS_CHECK(operands.topk_ids != nullptr);
    MOEOS_CHECK(operands.topk_weights != nullptr || call.tokens == 0);
    MOEOS_CHECK(rank.geometry().sent_bytes == rows_.sent_bytes());
    MOEOS_CHECK(rank.geometry().hidden_bytes == rows_.kept_bytes());
    MOEOS_CHECK(!rank.geometry().sliced() || (rank.geometry().sums_everywhere != 0 &&
                                              rows_.sums_bytes() <= rank.geometry().row_bytes));
  }

  /// The routing is the caller's, so no logits can be wrong.
  u32 route(u32 block) {
    const TokenRange tokens = tokens_of_block(rank_.geometry(), call_, block);
    router_.route(tokens.first, tokens.end);
    sort_block(rank_.geometry(), rank_.memory, call_, block);
    return kNone;
  }

  void copy_row(u32 token, u8* destination) {
    const u64 first = u64{token} * shape_.hidden;
    const ConstElements x(operands_.element, operands_.x);
    if (shape_.weight_on_input) {
      float* row = scratch_.row.get();
      for (u32 n = 0; n < shape_.hidden; ++n) {
        row[n] = rank_.memory.pair_weight[token * rows_.top_k] * x[first + n];
      }
      store(operands_.element, row, shape_.hidden, destination);
    } else {
      std::memcpy(destination, x.at(first), rows_.d_out_at());
    }
    std::memcpy(destination + rows_.d_out_at(), d_out().at(first), rows_.d_out_at());
    for (u32 j = 0; j < rows_.top_k; ++j) {
      const u32 pair = token * rows_.top_k + j;
      const SentChoice choice{rank_.memory.pair_expert[pair], rank_.memory.pair_weight[pair]};
      std::memcpy(destination + rows_.choices_at() + j * sizeof(choice), &choice, sizeof(choice));
    }
  }

  void replicate_row(const u8* source, u8* destination) {
    std::memcpy(destination, source, rows_.sent_bytes());
  }

  /// Computes one N-tile of a product.
  void product(const Task& task, u32 part) {
    if (task.kind == kFirstProduct.kind) {
      first_product(task, part);
    } else {
      second_product(task, part);
    }
  }

  /// Computes one N-tile of h and of dA = dY * W2, and keeps A, dH and a part of <dA, A>.
  void first_product(const Task& task, u32 part) {
    MOEOS_CHECK(task.narrow == 0 && task.from == RowsIn::cells);
    const u32 width = product0_columns(shape_);
    const u32 first = part * width;
    const u32 columns = minimum(width, shape_.intermediate - first);
    const u32 stride = (halves() + 1) * width;  // gate, up, dA
    const u32 panels = task.padded_rows / kPanelRows;
    float* results = more_.results.get();
    if (!saved_.has_all(task)) {
      make_hidden(task, first, columns, results, stride);
    }
    saved_.for_each(task, [&](const u8* saved, u32 row) {
      for (u32 half = 0; half < halves(); ++half) {
        const ConstElements values(operands_.element, saved);
        float* to = results + std::size_t{row} * stride + std::size_t{half} * width;
        for (u32 n = 0; n < columns; ++n) {
          to[n] = values[u64{half} * shape_.intermediate + first + n];
        }
      }
    });
    pack_sent(task, rows_.d_out_at());
    multiply(more_.panels.get(), panels, shape_.hidden, w2_.columns(task.local_expert, 1), first,
             columns, results + std::size_t{halves()} * width, stride);
    for (u32 row = 0; row < task.padded_rows; ++row) {
      derive(task, row, part, results + std::size_t{row} * stride, first, columns);
    }
    if (part == 0) {
      keep_sent(task);
    }
  }

  /// Computes one N-tile of dX = dH * W1, each row written where its owner will combine it; the
  /// first N-tile also writes the gradient of the row's weight.
  void second_product(const Task& task, u32 part) {
    MOEOS_CHECK(!has_narrow_parts(task));
    const u32 first = part * kPlainColumns;
    const u32 columns = minimum(kPlainColumns, shape_.hidden - first);
    for (u32 row = 0; row < task.padded_rows; row += kPanelRows) {
      pack_rows(operands_.element, kept_row(task.first_result + row) + rows_.d_hidden_at(),
                rows_.kept_bytes(), kPanelRows, rows_.w1_rows,
                &more_.panels[row / kPanelRows * panel_floats(rows_.w1_rows)]);
    }
    multiply(more_.panels.get(), task.padded_rows / kPanelRows, rows_.w1_rows,
             w1_.columns(task.local_expert, halves()), first, columns, more_.results.get(),
             kPlainColumns);
    for_each_row(task, [&](const Segment& segment, u32 i, u32 row) {
      u8* destination =
          outgoing_results(rank_, task, segment) + u64{i} * rank_.geometry().row_bytes;
      store(operands_.element, &more_.results[std::size_t{row} * kPlainColumns], columns,
            destination + first * rows_.size);
      if (part == 0) {
        const float gradient = weight_gradient(task, row);
        std::memcpy(destination + rows_.d_weight_at(), &gradient, sizeof(gradient));
      }
    });
  }

  /// Sums the gradients of a token and of its weights, in the order j = 0 ... k-1.
  void combine(u32 token) {
    const u64 first = u64{token} * shape_.hidden;
    const ConstElements x(operands_.element, operands_.x);
    float* sum = begin_sums(token);
    for (u32 j = 0; j < rows_.top_k; ++j) {
      const u32 pair = token * rows_.top_k + j;
      const float weight = rank_.memory.pair_weight[pair];
      const u32 pairs = rank_.geometry().pairs_of_choice();
      float& d_weight = sum[shape_.hidden + j / pairs];
      if (!map_.sent(pair)) {
        // The gradient of a zero expert, whose output is the token; otherwise none.
        const i32 expert = operands_.topk_ids[pair / pairs];
        const bool zero =
            expert >= 0 && static_cast<u32>(expert) >= rank_.geometry().routed_experts();
        for (u32 n = 0; zero && n < shape_.hidden; ++n) {
          sum[n] += weight * d_out()[first + n];
          d_weight += x[first + n] * d_out()[first + n];
        }
        continue;
      }
      const u8* row = rank_.heap + rank_.layout.result(rank_.memory.pair_row[pair]);
      const ConstElements d_x(operands_.element, row);
      for (u32 n = 0; n < shape_.hidden; ++n) {
        sum[n] += weight * d_x[n];
      }
      if (!shape_.weight_on_input) {
        float of_pair;
        std::memcpy(&of_pair, row + rows_.d_weight_at(), sizeof(of_pair));
        d_weight += of_pair;
      }
      for (u32 n = 0; shape_.weight_on_input && n < shape_.hidden; ++n) {
        d_weight += x[first + n] * d_x[n];
      }
    }
    if (rank_.geometry().sliced()) {
      std::memcpy(outgoing_partial(rank_, place_of_partial(rank_, call_, token)), sum,
                  rows_.sums_bytes());
    } else {
      write_sums(token, sum);
    }
  }

  /// Adds a token's sums up over slices, in their order: to what this rank writes and, if this rank
  /// is the token's owner, to all other slices.
  void add_slices(const Task& task, u32 token) {
    const Geometry& geometry = rank_.geometry();
    const Summands summands = summands_of(geometry, task);
    float* sum = more_.token.get();
    std::fill(sum, sum + rows_.sums(), 0.0F);
    for (u32 nth = 0; nth < sums_of(geometry, summands); ++nth) {
      const float* values = reinterpret_cast<const float*>(
          rank_.heap + rank_.layout.sum_at(sum_row(rank_, call_, summands, token, nth)));
      for (u32 n = 0; n < rows_.sums(); ++n) {
        sum[n] += values[n];
      }
    }
    write_sums(token, sum);
    for (u32 nth = 1; summands == Summands::slices && nth < geometry.slices; ++nth) {
      std::memcpy(outgoing_total(rank_, nth, token), sum, rows_.sums_bytes());
    }
  }

 private:
  ConstElements d_out() const { return {operands_.element, gradients_.d_out}; }

  /// Begins a token's sums (GradientRows::sums), which this processor keeps until the next token.
  float* begin_sums(u32 token) {
    float* sum = more_.token.get();
    std::fill(sum, sum + rows_.sums(), 0.0F);
    if (gradients_.d_x_added != nullptr) {
      std::memcpy(sum, gradients_.d_x_added + u64{token} * shape_.hidden,
                  shape_.hidden * sizeof(float));
    }
    if (gradients_.d_shared != nullptr) {
      sum[shape_.hidden + rows_.choices] = gradients_.d_shared[token];
    }
    return sum;
  }
  /// Overwrites what a slice has added: the token's sums are here, so that has been read.
  void write_sums(u32 token, const float* sum) {
    store(operands_.element, sum, shape_.hidden,
          static_cast<u8*>(operands_.out) + u64{token} * shape_.hidden * rows_.size);
    std::memcpy(gradients_.d_topk_weights + u64{token} * rows_.choices, sum + shape_.hidden,
                rows_.choices * sizeof(float));
    if (gradients_.d_shared != nullptr) {
      gradients_.d_shared[token] = sum[shape_.hidden + rows_.choices];
    }
  }

  u8* kept_row(u32 row) const { return kept_ + u64{row} * rows_.kept_bytes(); }

  u32 halves() const { return shape_.gated() ? 2 : 1; }

  /// Calls found(segment, row of the segment, row of the tile) for each row that counts.
  template <typename Found>
  void for_each_row(const Task& task, Found found) const {
    u32 first = 0;
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      for (u32 i = 0; i < segment.rows; ++i) {
        found(segment, i, first + i);
      }
      first += laid_out_rows(rank_.geometry(), task, s, first);
    }
  }
  const u8* sent_row(const Segment& segment, u32 i) const {
    return arrived_row(rank_, segment.source, segment.first_row + i);
  }

  /// Packs H elements of the tile's rows, from byte `at` of each on.
  void pack_sent(const Task& task, u32 at) {
    float* panel = more_.panels.get();
    for (u32 s = 0; s < task.segment_count; ++s) {
      const Segment& segment = task.segments[s];
      for (u32 row = 0; row < segment.rows; row += kPanelRows) {
        pack_rows(operands_.element, sent_row(segment, row) + at, rank_.geometry().sent_bytes,
                  minimum(kPanelRows, segment.rows - row), shape_.hidden, panel);
        panel += panel_floats(shape_.hidden);
      }
    }
  }

  /// Computes some columns of h of a tile's rows, gate and up.
  void make_hidden(const Task& task, u32 first, u32 columns, float* results, u32 stride) {
    const u32 width = product0_columns(shape_);
    pack_sent(task, 0);
    for (u32 half = 0; half < halves(); ++half) {
      float* to = results + std::size_t{half} * width;
      multiply(more_.panels.get(), task.padded_rows / kPanelRows, shape_.hidden,
               w1_.rows(task.local_expert, half), first, columns, to, stride);
      add_bias(ConstElements(operands_.element, operands_.b1), b1_layout(shape_), task.local_expert,
               half, first, columns, task.padded_rows, to, stride);
    }
  }

  /// For some columns of a row of the tile: keeps its activated values and the gradients before the
  /// activation.
  void derive(const Task& task, u32 row, u32 part, float* results, u32 first, u32 columns) {
    const u32 width = product0_columns(shape_);
    float* gates = results;
    float* ups = results + width;
    float* values = shape_.gated() ? ups + width : ups;  // first their gradients
    float product = 0.0F;
    for (u32 n = 0; n < columns; ++n) {
      const float up = shape_.gated() ? ups[n] : 0.0F;
      const Activated made = activated(shape_.activation, gates[n], up);
      const float d_value = values[n];
      product += d_value * made.value;
      gates[n] = d_value * made.by_gate;
      if (shape_.gated()) {
        ups[n] = d_value * made.by_up;
      }
      values[n] = made.value;
    }
    u8* kept = kept_row(task.first_result + row);
    store(operands_.element, values, columns, kept + rows_.values_at() + first * rows_.size);
    store(operands_.element, gates, columns, kept + rows_.d_hidden_at() + first * rows_.size);
    if (shape_.gated()) {
      store(operands_.element, ups, columns,
            kept + rows_.d_hidden_at() + (shape_.intermediate + first) * rows_.size);
    }
    std::memcpy(kept + rows_.products_at() + part * sizeof(product), &product, sizeof(product));
  }

  /// Keeps x, dY and the weight of the tile's rows: the next call's rows may overwrite them as soon
  /// as this call's have returned.
  void keep_sent(const Task& task) {
    const u32 expert = rank_.geometry().first_expert(rank_.rank) + task.local_expert;
    for_each_row(task, [&](const Segment& segment, u32 i, u32 row) {
      const u8* sent = sent_row(segment, i);
      u8* kept = kept_row(task.first_result + row);
      std::memcpy(kept, sent, rows_.choices_at());
      float weight = 1.0F;  // for a row that has already been multiplied by its weight
      for (u32 j = 0; !shape_.weight_on_input && j < rows_.top_k; ++j) {
        SentChoice choice;
        std::memcpy(&choice, sent + rows_.choices_at() + j * sizeof(choice), sizeof(choice));
        weight = choice.expert == expert ? choice.weight : weight;
      }
      std::memcpy(kept + rows_.weight_at(), &weight, sizeof(weight));
      places_[rank_.layout.row_index(segment.source, segment.first_row + i)] =
          task.first_result + row;
    });
  }

  /// <dA, A> of all parts plus <dY, b2>: the gradient of the row's weight.
  float weight_gradient(const Task& task, u32 row) const {
    const u8* kept = kept_row(task.first_result + row);
    float sum = 0.0F;
    for (u32 part = 0; part < rows_.parts; ++part) {
      float product;
      std::memcpy(&product, kept + rows_.products_at() + part * sizeof(product), sizeof(product));
      sum += product;
    }
    const ConstElements b2(operands_.element, operands_.b2);
    const ConstElements d_out_row(operands_.element, kept + rows_.d_out_at());
    for (u32 n = 0; b2 && n < shape_.hidden; ++n) {
      sum += d_out_row[n] * b2[u64{task.local_expert} * shape_.hidden + n];
    }
    return sum;
  }

  const Rank<Machine>& rank_;
  const Call& call_;
  const LayerShape& shape_;
  const Operands& operands_;
  const GradientOperands& gradients_;
  GradientRows rows_;
  Matrices w1_;
  Matrices w2_;
  u8* kept_;
  u32* places_;
  Scratch& scratch_;
  GradientScratch& more_;
  Router router_;
  RoutingMap map_;
  SavedRows saved_;
};

}  // namespace moeos::twin
