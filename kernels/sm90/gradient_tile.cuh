// SPDX-License-Identifier: Apache-2.0
// A part of a tile of a call of gradients, as a consumer warpgroup computes it.
//
// The first product of a part is dA = dY w2 of 128 columns, then h = x w1^T of
// the same: all three accumulators of a gated part would not fit in registers,
// so dA waits as pairs of two-byte elements. Rows of h that the forward call
// has saved are loaded instead. What is made of both is kept
// (gradient_rows.cuh). The second product's results are their owners', with a
// weight's gradient behind each. May not know: where operands come from.
#pragma once

#include "kernels/sm90/derivative.cuh"
#include "kernels/sm90/gradient_operands.cuh"
#include "kernels/sm90/mainloop.cuh"
#include "kernels/sm90/ptx/load.cuh"
#include "kernels/sm90/saved_rows.cuh"
#include "kernels/sm90/sinks.cuh"

namespace moeos::sm90 {

inline constexpr u32 kHalfSums = kValueColumns / 2;  // accumulators of 128 columns
inline constexpr u32 kFirstSums = kHalves * kHalfSums;
inline constexpr u32 kSecondSums = kTileColumns / 2;
/// Whether no part of the first product has columns beyond I.
inline constexpr bool kWholeValues = kShape.intermediate % kValueColumns == 0;

/// d += the warpgroup's rows times weights whose rows are the depth, over so
/// many steps.
template <u32 kRegisters>
inline void multiply_by_columns(float (&d)[kRegisters], u32 steps, u32 group, Shared& shared,
                                RingPosition<kStages>& stage) {
  for_each_step(d, steps, shared, stage, kAsLanded, [&](const Stage& from) {
#pragma unroll
    for (u32 k = 0; k < kTileDepth / 16; ++k) {
      multiply_accumulate<MOEOS_FLOAT16, Major::depth, Major::columns>(
          d, matrix_descriptor(from.rows + group * kConsumerRows * kSwizzleBytes + k * 32),
          columns_descriptor(from.weights + k * kDepthStepBytes));
    }
  });
}

/// A row of a tile: where its source's row and its kept row lie; or none, of
/// padding.
struct GradientRow {
  bool there = false;
  const u8* sent = nullptr;
  u8* kept = nullptr;
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

/// What a row's own expert weighs; 1 where the token has been multiplied before
/// it was sent.
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

/// Copies a part's share of x and of the gradient of the output to the kept
/// row, by four lanes.
inline void copy_inputs(const GradientRow& row, u32 part) {
  constexpr u32 kVectors = 2 * kHiddenBytes / sizeof(uint4);
  constexpr u32 kEach = ceil_div(kVectors, kGeometry.product0_parts);
  const u32 end = minimum(kVectors, (part + 1) * kEach);
  for (u32 i = part * kEach + Machine::lane() % 4; row.there && i < end; i += 4) {
    reinterpret_cast<uint4*>(row.kept + kCopiesAt)[i] = reinterpret_cast<const uint4*>(row.sent)[i];
  }
}

/// Adds biases to h. Behind the product, of which registers that wait for
/// memory would take the room.
inline void add_bias(float (&d)[kFirstSums], const GradientArguments& arguments, const Task& task,
                     u32 part) {
#pragma unroll
  for (u32 i = 0; i < kFirstSums; i += 4) {
    const u64 row = u64{task.local_expert} * kHalves + i / kHalfSums;
    const u32 column = part * kValueColumns + i % kHalfSums / 4 * 8 + Machine::lane() % 4 * 2;
    const u32 pair = load_number(column < kShape.intermediate,
                                 arguments.b1 + (row * kShape.intermediate + column) * 2);
    d[i] += Element::low(pair);
    d[i + 1] += Element::high(pair);
    d[i + 2] += Element::low(pair);
    d[i + 3] += Element::high(pair);
  }
}

/// Of four words, columns 2l + {0, 1} of four eights (l = lane % 4): the eight
/// columns of one.
inline uint4 eight_columns(u32 (&words)[4]) {
  const bool odd = (Machine::lane() & 1) != 0;
  const bool high = (Machine::lane() & 2) != 0;
  const auto exchange = [](u32& one, u32& other, bool second, u32 distance) {
    const u32 got = __shfl_xor_sync(~0U, second ? one : other, distance);
    one = second ? got : one;
    other = second ? other : got;
  };
  exchange(words[0], words[1], odd, 1);
  exchange(words[2], words[3], odd, 1);
  exchange(words[0], words[2], high, 2);
  exchange(words[1], words[3], high, 2);
  return make_uint4(words[0], words[1], words[2], words[3]);
}
/// The same of accumulators i, i + 4, i + 8, i + 12 and those behind each.
template <u32 kRegisters>
inline uint4 eight_columns(const float (&d)[kRegisters], u32 i) {
  u32 words[4];
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    words[k] = Element::pack(d[i + 4 * k], d[i + 4 * k + 1]);
  }
  return eight_columns(words);
}

/// h of a part: gates, then ups, as pairs of two-byte elements in the order of
/// accumulators.
using Hidden = u32[kFirstSums / 2];
/// Which of them four words of eight columns are: the first one, and how far
/// the next ones are.
constexpr u32 hidden_words(u32 half, u32 group, u32 lower) {
  return half * kHalfSums / 2 + group * kOrderedRows / 4 + lower;
}
inline constexpr u32 kNextWord = 2;
inline constexpr u32 kHiddenGroups = kValueColumns / kOrderedRows;

/// Asks for h of a part's saved rows: eight columns in four words, or zeros.
/// Before the products, under which memory answers.
inline void load_saved(Hidden& hidden, const RankArguments& arguments, const Task& task, u32 part) {
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const u8* const row = saved_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
#pragma unroll
      for (u32 group = 0; group < kHiddenGroups; ++group) {
        const u32 column = part * kValueColumns + group * kOrderedRows + Machine::lane() % 4 * 8;
        const uint4 eight =
            load_vector(row != nullptr && (kWholeValues || column < kShape.intermediate),
                        row + u64{half * kShape.intermediate + column} * 2);
        u32* const words = hidden + hidden_words(half, group, lower);
        words[0] = eight.x;
        words[kNextWord] = eight.y;
        words[2 * kNextWord] = eight.z;
        words[3 * kNextWord] = eight.w;
      }
    }
  }
}
/// Puts what was loaded in the order of accumulators: who has eight columns of
/// one gets two of each of four eights. By a whole warp.
inline void order_saved(Hidden& hidden) {
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
#pragma unroll
      for (u32 group = 0; group < kHiddenGroups; ++group) {
        u32* const words = hidden + hidden_words(half, group, lower);
        u32 eight[4] = {words[0], words[kNextWord], words[2 * kNextWord], words[3 * kNextWord]};
        eight_columns(eight);
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
          words[k * kNextWord] = eight[k];
        }
      }
    }
  }
}

/// h by a part's turn over x, none where all of it is saved.
inline void multiply_hidden(float (&d)[kFirstSums], const GradientArguments& arguments,
                            const Task& task, u32 part, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  multiply_tile(d, hidden_steps(arguments, task), group, shared, stage, kAsLanded);
  if constexpr (kBias) {
    add_bias(d, arguments, task, part);
  }
}
/// Rounds what was computed, and takes what is saved of the tile's rows
/// instead. By a whole warp.
inline void round_hidden(Hidden& hidden, const float (&d)[kFirstSums],
                         const RankArguments& arguments, const Task& task, u32 part) {
#pragma unroll
  for (u32 i = 0; i < kFirstSums / 2; ++i) {
    hidden[i] = Element::pack(d[2 * i], d[2 * i + 1]);
  }
  Hidden saved;
  load_saved(saved, arguments, task, part);
  order_saved(saved);
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const bool there = saved_row(arguments, task, tile_row(lower) + Machine::lane() / 4) != nullptr;
#pragma unroll
    for (u32 i = lower; i < kFirstSums / 2; i += 2) {
      hidden[i] = there ? saved[i] : hidden[i];
    }
  }
}

/// Keeps activated values and the gradients before them, both times the row's
/// weight, and the part's share of <dA, A>. hidden(i): h of accumulators i and
/// i + 1.
template <class HiddenOf>
inline void keep_derived(const HiddenOf& hidden, const u32 (&d_values)[kHalfSums / 2],
                         const float (&weights)[2], const GradientArguments& arguments,
                         const Task& task, u32 part) {
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const GradientRow row = gradient_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
    const float weight = weights[lower];
    if constexpr (kCopies) {
      copy_inputs(row,
                  part);  // first, so that no register keeps where they are from
    }
    float product = 0.0F;
#pragma unroll
    for (u32 group = 0; group < kHiddenGroups; ++group) {
      u32 values[4];
      u32 gates[4];
      u32 ups[4];
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const u32 i = group * kOrderedRows / 2 + 4 * k + 2 * lower;
        const Derived made =
            derive<kActivation>(hidden(i), hidden(kShape.gated() ? kHalfSums + i : i));
        const float2 d_value =
            make_float2(Element::low(d_values[i / 2]), Element::high(d_values[i / 2]));
        product += d_value.x * made.value.x + d_value.y * made.value.y;
        values[k] = Element::pack(weight * made.value.x, weight * made.value.y);
        gates[k] =
            Element::pack(weight * d_value.x * made.by_gate.x, weight * d_value.y * made.by_gate.y);
        ups[k] =
            Element::pack(weight * d_value.x * made.by_up.x, weight * d_value.y * made.by_up.y);
      }
      const u32 column = part * kValueColumns + group * kOrderedRows + Machine::lane() % 4 * 8;
      const bool wanted = row.there && (kWholeValues || column < kKeptColumns);
      u8* const to = row.kept + u64{column} * 2;
      store_vector(wanted, to, make_uint4(values[0], values[1], values[2], values[3]));
      store_vector(wanted, to + kDHiddenAt, make_uint4(gates[0], gates[1], gates[2], gates[3]));
      if constexpr (kShape.gated()) {
        store_vector(wanted, to + kDHiddenAt + kKeptColumns * 2,
                     make_uint4(ups[0], ups[1], ups[2], ups[3]));
      }
    }
    product = sum_of_row(product);
    const bool wanted = row.there && Machine::lane() % 4 == 0;
    store_number(wanted, row.kept + kProductsAt + part * sizeof(float), product);
    store_number(wanted && part == 0, row.kept + kWeightAt, weight);
  }
}

/// <dA, A> of all parts, and <dY, b2>: the gradient of a row's weight, by four
/// lanes.
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

/// Takes rows of dX to their owners, and behind them their weights' gradients.
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

/// A warpgroup's 64 rows of a part; `word`: what the slot was given; `place`:
/// which slot it is.
MOEOS_INLINED void compute_tile(const RankArguments& given, const Slot& slot, ReadyWord word,
                                const Task& task, u32 group, u32 place, Shared& shared,
                                RingPosition<kStages>& stage) {
  const GradientArguments& arguments = of_gradients(given);
  const bool rehearses = task.padded_rows == 0;
  if (!rehearses && group * kConsumerRows >= task.padded_rows) {
    skip_tile(gradient_steps(arguments, task), shared, stage, kAsLanded);
  } else if (task.kind == TaskKind::product0) {
    float weights[2];
#pragma unroll
    for (u32 lower = 0; lower < 2; ++lower) {
      const u32 row = tile_row(lower) + Machine::lane() / 4;
      weights[lower] = weight_of_row(arguments, task, gradient_row(arguments, task, row));
    }
    [[maybe_unused]] Hidden hidden = {};
    const bool loads = saves_all(arguments, task);
    if constexpr (kSaves) {
      if (loads) {
        load_saved(hidden, arguments, task, word.part());
      }
    }
    u32 d_values[kHalfSums / 2];
    {
      float d[kHalfSums] = {};
      multiply_by_columns(d, rehearses ? 0 : kHiddenSteps, group, shared, stage);
#pragma unroll
      for (u32 i = 0; i < kHalfSums / 2; ++i) {
        d_values[i] = Element::pack(d[2 * i], d[2 * i + 1]);
      }
    }
    if constexpr (kSaves) {
      if (loads) {
        order_saved(hidden);
      } else {
        float d[kFirstSums] = {};
        multiply_hidden(d, arguments, task, slot.word.part(), group, shared, stage);
        round_hidden(hidden, d, arguments, task, slot.word.part());
      }
      stamp_computed(shared, place);
      const auto rounded = [&](u32 i) {
        return make_float2(Element::low(hidden[i / 2]), Element::high(hidden[i / 2]));
      };
      keep_derived(rounded, d_values, weights, arguments, task, slot.word.part());
    } else {
      float d[kFirstSums] = {};
      multiply_hidden(d, arguments, task, slot.word.part(), group, shared, stage);
      stamp_computed(shared, place);
      const auto computed = [&](u32 i) { return make_float2(d[i], d[i + 1]); };
      keep_derived(computed, d_values, weights, arguments, task, slot.word.part());
    }
  } else {
    float d[kSecondSums] = {};
    multiply_by_columns(d, rehearses ? 0 : kSecondSteps, group, shared, stage);
    stamp_computed(shared, place);
    return_results(d, arguments, task, slot, slot.word.part());
  }
}

}  // namespace moeos::sm90
