// SPDX-License-Identifier: Apache-2.0
// A part of a tile of a gradient call, as a consumer warpgroup computes it.
//
// GEMM0 of a part is dA = dY w2 of 128 columns, then h = x w1^T of the same columns: the three
// accumulators of a gated part would not fit in registers, so dA waits as pairs of two-byte
// elements. Rows of h that the forward call has saved are loaded instead. What is derived from both
// is kept (gradient_rows.cuh). GEMM1's results go to their owners, each followed by the gradient of
// its weight. Must not depend on: where operands come from.
#pragma once

#include "kernels/sm90/block/accumulators.cuh"
#include "kernels/sm90/block/saved_rows.cuh"
#include "kernels/sm90/epilogue/derivative.cuh"
#include "kernels/sm90/epilogue/exchange.cuh"
#include "kernels/sm90/epilogue/sinks.cuh"
#include "kernels/sm90/mainloop/mainloop.cuh"
#include "kernels/sm90/operands/gradient_operands.cuh"
#include "kernels/sm90/ptx/code.cuh"
#include "kernels/sm90/ptx/load.cuh"

namespace moeos::sm90 {

inline constexpr u32 kHalfSums = kValueColumns / 2;  // accumulators of 128 columns
inline constexpr u32 kFirstSums = kHalves * kHalfSums;
inline constexpr u32 kSecondSums = kTileColumns / 2;
/// Whether no part of GEMM0 has columns beyond I.
inline constexpr bool kWholeValues = kShape.intermediate % kValueColumns == 0;

/// The major order in a stage of weights that a gradient call multiplies transposed.
inline constexpr Major kTurnedMajor = kTransposed ? Major::depth : Major::columns;

/// d += the warpgroup's rows times such weights, over `steps` steps.
template <u32 kRegisters>
inline void multiply_turned(float (&d)[kRegisters], u32 steps, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, kAsLanded, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      multiply<kTurnedMajor>(d, from.rows + group * kConsumerRows * kSwizzleBytes, from.weights, k);
    }
  });
}

/// A row of a tile: where its source's row and its kept row lie, and its saved row, if there is
/// one; or none, for padding.
struct GradientRow {
  bool there = false;
  const u8* sent = nullptr;
  u8* kept = nullptr;
  const u8* saved = nullptr;
};
inline GradientRow gradient_row(const GradientArguments& arguments, const Task& task, u32 row) {
  GradientRow found;
  u32 first = 0;
  for (u32 s = 0; s < task.segment_count; ++s) {
    const Segment& segment = task.segments[s];
    if (row >= first && row < first + segment.rows) {
      const Layout layout(kGeometry, arguments.place);
      found.there = true;
      found.sent =
          arguments.heap + layout.cell_row(segment.source, segment.first_row + row - first);
      const u32 number = first_sent(arguments, task, segment) + row - first;
      found.kept = arguments.intermediate_rows +
                   u64{segment.source * kKeptOfSource + number} * kKeptRowBytes;
      if constexpr (kSaves) {
        found.saved = saved_place(arguments, segment.source, number);
      }
    }
    first += laid_out_rows(kGeometry, task, s, first);
  }
  return found;
}

/// The sum of the four lanes that have accumulators of the same rows.
inline float sum_of_row(float value) {
  value += __shfl_xor_sync(~0U, value, 1U);
  return value + __shfl_xor_sync(~0U, value, 2U);
}

/// The weight of a row's own expert; 1 where the token has been multiplied by it before it was
/// sent.
inline float weight_of_row(const GradientArguments& arguments, const Task& task,
                           const GradientRow& row) {
  if constexpr (kShape.weight_on_input) {
    return 1.0F;
  }
  const u32 expert = kGeometry.first_expert(holder_of(arguments)) + task.local_expert;
  float weight = 0.0F;
  for (u32 j = Machine::lane() % 4; row.there && j < kGeometry.top_k; j += 4) {
    const auto choice = reinterpret_cast<const SentChoice*>(row.sent + kChoicesAt)[j];
    weight = choice.expert == expert ? choice.weight : weight;
  }
  return sum_of_row(weight);
}

/// Copies a part's share of x and of the gradient of the output to the kept row, by four lanes.
inline void copy_inputs(const GradientRow& row, u32 part) {
  constexpr u32 kVectors = 2 * kHiddenBytes / sizeof(uint4);
  constexpr u32 kEach = ceil_div(kVectors, kGeometry.product0_parts);
  const u32 end = minimum(kVectors, (part + 1) * kEach);
  for (u32 i = part * kEach + Machine::lane() % 4; row.there && i < end; i += 4) {
    reinterpret_cast<uint4*>(row.kept + kCopiesAt)[i] = reinterpret_cast<const uint4*>(row.sent)[i];
  }
}

/// Adds biases to h, in accumulators from `first` on. After the product, which needs the registers
/// that would wait for memory.
inline void add_bias(float (&d)[kFirstSums], const GradientArguments& arguments, const Task& task,
                     u32 part, u32 first) {
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    const u64 row = u64{task.local_expert} * kHalves + half;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u32 i = half * kHalfSums + first + 4 * k;
      const u32 group = part * kValueColumns + i % kHalfSums / 4 * 8;
      if constexpr (kColumnsAlternate) {
        const u32 column = group + half * 4 + Machine::lane() % 4;
        const u64 at = u64{task.local_expert} * kShape.intermediate + column;
        const u32 pair = load_number(column < kShape.intermediate, arguments.b1 + at * 4);
        const u32 gate = pair_at(first + 4 * k) + half * 4;
        d[gate] += Element::low(pair);
        d[gate + 1] += Element::high(pair);
        continue;
      }
      const u32 column = group + Machine::lane() % 4 * 2;
      const bool there = column < kShape.intermediate;
      if constexpr (kGateUp == GateUp::interleaved) {
        const u64 at = u64{task.local_expert} * kShape.intermediate + column;
        const u32 pairs[2] = {load_number(there, arguments.b1 + at * 4),
                              load_number(there, arguments.b1 + at * 4 + 4)};
        const float2 values = alternate_pair(pairs, 0, half != 0);
        d[i] += values.x;
        d[i + 1] += values.y;
        continue;
      }
      const u32 pair = load_number(there, arguments.b1 + (row * kShape.intermediate + column) * 2);
      d[i] += Element::low(pair);
      d[i + 1] += Element::high(pair);
    }
  }
}

/// Packs eight columns of accumulators i, i + 4, i + 8, i + 12 and the one after each.
template <u32 kRegisters>
inline uint4 eight_columns(const float (&d)[kRegisters], u32 i) {
  u32 words[4];
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    words[k] = Element::pack(d[i + 4 * k], d[i + 4 * k + 1]);
  }
  return eight_columns(words);
}

/// Before a part's products: prefetches what keep_derived will load, which then waits only for a
/// cache.
inline void prefetch_saved(const RankArguments& arguments, const Task& task, u32 part) {
  const u32 first = part * kValueColumns;
  const u32 columns = minimum(kValueColumns, kShape.intermediate - first);
  const u32 half = Machine::lane() % 4;
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const u8* const row = saved_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
    if (row != nullptr && half < kHalves) {
      prefetch_bytes(reinterpret_cast<u64>(row) + u64{half * kShape.intermediate + first} * 2,
                     columns * 2);
    }
  }
}

/// Eight columns that the forward call has saved of a row, or zeros.
struct SavedColumns {
  uint4 halves[kHalves];
};
inline SavedColumns load_saved(const u8* row, u32 column) {
  SavedColumns found;
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    found.halves[half] =
        load_vector(row != nullptr && (kWholeValues || column < kShape.intermediate),
                    row + u64{half * kShape.intermediate + column} * 2);
  }
  return found;
}
/// Replaces h with them, in accumulators from `first` on. By a whole warp.
inline void put_saved(float (&d)[kFirstSums], const SavedColumns& columns, u32 first, bool saved) {
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    const uint4 eight = columns.halves[half];
    // A lane that has eight columns of one row gets two of each of four eights: the exchange works
    // both ways.
    u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    if constexpr (kColumnsAlternate) {
      halves_of_eight(words, eight);
    } else {
      eight_columns(words);
    }
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u32 i =
          kColumnsAlternate ? pair_at(first + 4 * k) + half : half * kHalfSums + first + 4 * k;
      const u32 next = i + (kColumnsAlternate ? 4 : 1);
      d[i] = saved ? Element::low(words[k]) : d[i];
      d[next] = saved ? Element::high(words[k]) : d[next];
    }
  }
}

/// Packs eight kept columns from a thread's four words. By a whole warp.
inline uint4 kept_eight(u32 (&words)[4]) {
  if constexpr (kColumnsAlternate) {
    return eight_of_halves(words);
  } else if constexpr (kTransposed) {
    return eight_columns(words);
  } else {
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}
/// Keeps the gradients of eight gates and eight ups, which alternate, from words that have columns
/// l and l + 4 of four eights. By a whole warp.
inline void keep_pairs(bool wanted, u8* to, const u32 (&gates)[4], const u32 (&ups)[4]) {
  constexpr u32 kWhich[2] = {kLowHalves, kHighHalves};
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    u32 words[4];
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      words[k] = permute_bytes(gates[k], ups[k], kWhich[half]);
    }
    store_vector(wanted, to + half * sizeof(uint4), eight_columns(words));
  }
}

/// Keeps activated values and the gradients before the activation, from h or from what is saved,
/// both times the row's weight, and the part's share of <dA, A>.
inline void keep_derived(float (&d)[kFirstSums], const u32 (&d_values)[kHalfSums / 2],
                         const GradientArguments& arguments, const Task& task, u32 part) {
  constexpr u32 kGroup = kOrderedRows / 2;  // accumulators that are 32 columns of two rows
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const GradientRow row = gradient_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
    const float weight = weight_of_row(arguments, task, row);
    if constexpr (kCopies) {
      copy_inputs(row, part);  // first, so that no register keeps their addresses
    }
    float product = 0.0F;
#pragma unroll
    for (u32 first = 2 * lower; first < kHalfSums; first += kGroup) {
      const u32 column =
          part * kValueColumns + first / kGroup * kOrderedRows + Machine::lane() % 4 * 8;
      if constexpr (kBias) {
        add_bias(d, arguments, task, part, first);
      }
      if constexpr (kSaves) {
        put_saved(d, load_saved(row.saved, column), first, row.saved != nullptr);
      }
      u32 values[4];
      u32 gates[4];
      u32 ups[4];
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const u32 i = first + 4 * k;
        const u32 gate = kColumnsAlternate ? pair_at(i) : i;
        const u32 up = !kShape.gated() ? i : kColumnsAlternate ? gate + 1 : kHalfSums + i;
        constexpr u32 kNext = kColumnsAlternate ? 4 : 1;
        const Derived made = derive<kActivation>(make_float2(d[gate], d[gate + kNext]),
                                                 make_float2(d[up], d[up + kNext]));
        const float2 d_value =
            make_float2(Element::low(d_values[i / 2]), Element::high(d_values[i / 2]));
        product += d_value.x * made.value.x + d_value.y * made.value.y;
        values[k] = Element::pack(weight * made.value.x, weight * made.value.y);
        gates[k] =
            Element::pack(weight * d_value.x * made.by_gate.x, weight * d_value.y * made.by_gate.y);
        ups[k] =
            Element::pack(weight * d_value.x * made.by_up.x, weight * d_value.y * made.by_up.y);
      }
      const bool wanted = row.there && (kWholeValues || column < kKeptColumns);
      u8* const to = row.kept + u64{column} * 2;
      store_vector(wanted, to, kept_eight(values));
      if constexpr (kColumnsAlternate) {
        keep_pairs(wanted, to + kDHiddenAt + u64{column} * 2, gates, ups);
      } else {
        store_vector(wanted, to + kDHiddenAt, kept_eight(gates));
        if constexpr (kShape.gated()) {
          store_vector(wanted, to + kDHiddenAt + kKeptColumns * 2, kept_eight(ups));
        }
      }
    }
    product = sum_of_row(product);
    const bool wanted = row.there && Machine::lane() % 4 == 0;
    store_number(wanted, row.kept + kProductsAt + part * sizeof(float), product);
    store_number(wanted && part == 0, row.kept + kWeightAt, weight);
  }
}

/// <dA, A> of all parts plus <dY, b2>: the gradient of a row's weight, by four lanes.
inline float weight_gradient(const GradientArguments& arguments, const Task& task,
                             const GradientRow& row) {
  float sum = 0.0F;
  for (u32 part = Machine::lane() % 4; row.there && part < kGeometry.product0_parts; part += 4) {
    sum += reinterpret_cast<const float*>(row.kept + kProductsAt)[part];
  }
  if constexpr (kBias) {
    const auto* const b2 =
        reinterpret_cast<const u32*>(arguments.b2) + u64{task.local_expert} * kShape.hidden / 2;
    for (u32 i = Machine::lane() % 4; row.there && i < kShape.hidden / 2; i += 4) {
      const u32 d_out = reinterpret_cast<const u32*>(row.sent + kDOutAt)[i];
      sum +=
          Element::low(d_out) * Element::low(b2[i]) + Element::high(d_out) * Element::high(b2[i]);
    }
  }
  return sum_of_row(sum);
}

/// Sends rows of dX to their owners, each followed by its weight's gradient.
inline void return_results(const float (&d)[kSecondSums], const GradientArguments& arguments,
                           const Task& task, const Slot& slot, u32 part) {
  constexpr u32 kGroup = kOrderedRows / 2;
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const ResultRows rows(task, lower);
#pragma unroll
    for (u32 i = 2 * lower; i < kSecondSums; i += 2 * kGroup) {
      const uint4 first = eight_columns(d, i);
      const uint4 second = eight_columns(d, i + kGroup);
      rows.store(slot, part * kTileColumns + i / kGroup * kOrderedRows, first, second);
    }
    if (part == 0) {
      const u32 own = tile_row(lower) + Machine::lane() / 4;
      const float gradient = weight_gradient(arguments, task, gradient_row(arguments, task, own));
      const u32 place = result_place(task, own);
      store_number(place != kNowhere && Machine::lane() % 4 == 0,
                   result_row(slot, place, kGeometry.row_bytes) + kDWeightAt, gradient);
    }
  }
}

/// Computes a warpgroup's 64 rows of a part; `word`: the slot's word; `place`: the slot's number.
MOEOS_INLINED void compute_tile(const RankArguments& given, const Slot& slot, ReadyWord word,
                                const Task& task, u32 group, u32 place, Shared& shared,
                                RingPosition<kStages>& stage) {
  const GradientArguments& arguments = of_gradients(given);
  const bool rehearses = task.padded_rows == 0;
  if (!rehearses && group * kConsumerRows >= task.padded_rows) {
    skip_tile(gradient_steps(arguments, task), shared, stage, kAsLanded);
  } else if (task.kind == TaskKind::product0) {
    if constexpr (kSaves) {
      prefetch_saved(arguments, task, word.part());
    }
    u32 d_values[kHalfSums / 2];
    {
      float d[kHalfSums] = {};
      multiply_turned(d, rehearses ? 0 : kHiddenSteps, group, shared, stage);
#pragma unroll
      for (u32 i = 0; i < kHalfSums / 2; ++i) {
        d_values[i] = Element::pack(d[2 * i], d[2 * i + 1]);
      }
    }
    float d[kFirstSums] = {};
    multiply_tile(d, hidden_steps(arguments, task), group, shared, stage, kAsLanded);
    stamp_computed(shared, place);
    keep_derived(d, d_values, arguments, task, slot.word.part());
  } else {
    float d[kSecondSums] = {};
    multiply_turned(d, rehearses ? 0 : kSecondSteps, group, shared, stage);
    stamp_computed(shared, place);
    return_results(d, arguments, task, slot, slot.word.part());
  }
}

}  // namespace moeos::sm90
