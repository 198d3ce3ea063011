// SPDX-License-Identifier: Apache-2.0
// A part of a tile of a call of gradients, as a consumer warpgroup computes it.
//
// The first product of a part is dA = dY w2 of 128 columns, then h = x w1^T of the same: all three
// accumulators of a gated part would not fit in registers, so dA waits as pairs of two-byte
// elements. Rows of h that the forward call has saved are loaded instead. A part of 256 columns has
// two such turns, or none of h where all rows are saved. What is made of both is
// kept (gradient_rows.cuh). The second product's results are their owners', with a weight's
// gradient behind each. May not know: where operands come from.
#pragma once

#include "kernels/sm90/derivative.cuh"
#include "kernels/sm90/gradient_operands.cuh"
#include "kernels/sm90/mainloop.cuh"
#include "kernels/sm90/ptx/code.cuh"
#include "kernels/sm90/ptx/load.cuh"
#include "kernels/sm90/saved_rows.cuh"
#include "kernels/sm90/sinks.cuh"

namespace moeos::sm90 {

inline constexpr u32 kHalfSums = kTurnColumns / 2;  // accumulators of a turn
inline constexpr u32 kValueSums = kValueColumns / 2;
inline constexpr u32 kFirstSums = kHalves * kHalfSums;
inline constexpr u32 kSecondSums = kTileColumns / 2;
/// Whether no part of the first product has columns beyond I.
inline constexpr bool kWholeValues = kShape.intermediate % kValueColumns == 0;
inline constexpr u32 kGroup = kOrderedRows / 2;  // accumulators that are 32 columns of two rows

/// d += the warpgroup's rows times weights whose rows are the depth, over so many steps.
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

/// A row of a tile: where its source's row and its kept row lie, and its saved one, if there is
/// one; or none, of padding.
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

/// What a row's own expert weighs; 1 where the token has been multiplied before it was sent.
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

/// Adds biases to h, in accumulators from `first` on. Behind the product, of which registers that
/// wait for memory would take the room.
inline void add_bias(float (&d)[kFirstSums], const GradientArguments& arguments, const Task& task,
                     u32 turn, u32 first) {
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    const u64 row = u64{task.local_expert} * kHalves + half;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u32 i = half * kHalfSums + first + 4 * k;
      const u32 column = turn * kTurnColumns + i % kHalfSums / 4 * 8 + Machine::lane() % 4 * 2;
      const u32 pair = load_number(column < kShape.intermediate,
                                   arguments.b1 + (row * kShape.intermediate + column) * 2);
      d[i] += Element::low(pair);
      d[i + 1] += Element::high(pair);
    }
  }
}

/// Of four words, columns 2l + {0, 1} of four eights (l = lane % 4): the eight columns of one.
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

/// Before a part's products: asks for what keep_derived will load, which then waits for a cache
/// alone.
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
/// Puts them in the place of h, in accumulators from `first` on. By a whole warp.
inline void put_saved(float (&d)[kFirstSums], const SavedColumns& columns, u32 first, bool saved) {
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    const uint4 eight = columns.halves[half];
    // Who has eight columns of one gets two of each of four eights: the same exchange.
    u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    eight_columns(words);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u32 i = half * kHalfSums + first + 4 * k;
      d[i] = saved ? Element::low(words[k]) : d[i];
      d[i + 1] = saved ? Element::high(words[k]) : d[i + 1];
    }
  }
}

/// Four pairs of a row's columns, of gates and of ups: two of each of four eights.
struct HiddenColumns {
  float2 gates[4];
  float2 ups[4];
};

/// Where the first of a row's eight columns of a group of 32 lies in its part's turns.
inline u32 column_of(u32 turn, u32 group) {
  return turn * kTurnColumns + group * kOrderedRows + Machine::lane() % 4 * 8;
}

/// Keeps eight columns of activated values and of the gradients before them, both times the row's
/// weight, and adds their share of <dA, A> up. d_values: of accumulators i, i + 1 at [i / 2].
template <u32 kWords>
inline void keep_columns(const HiddenColumns& hidden, const u32 (&d_values)[kWords], u32 first,
                         const GradientRow& row, float weight, u32 column, float& product) {
  u32 values[4];
  u32 gates[4];
  u32 ups[4];
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    const Derived made = derive<kActivation>(hidden.gates[k], hidden.ups[k]);
    const u32 pair = d_values[(first + 4 * k) / 2];
    const float2 d_value = make_float2(Element::low(pair), Element::high(pair));
    product += d_value.x * made.value.x + d_value.y * made.value.y;
    values[k] = Element::pack(weight * made.value.x, weight * made.value.y);
    gates[k] =
        Element::pack(weight * d_value.x * made.by_gate.x, weight * d_value.y * made.by_gate.y);
    ups[k] = Element::pack(weight * d_value.x * made.by_up.x, weight * d_value.y * made.by_up.y);
  }
  const bool wanted = row.there && (kWholeValues || column < kKeptColumns);
  u8* const to = row.kept + u64{column} * 2;
  store_vector(wanted, to, make_uint4(values[0], values[1], values[2], values[3]));
  store_vector(wanted, to + kDHiddenAt, make_uint4(gates[0], gates[1], gates[2], gates[3]));
  if constexpr (kShape.gated()) {
    store_vector(wanted, to + kDHiddenAt + kKeptColumns * 2,
                 make_uint4(ups[0], ups[1], ups[2], ups[3]));
  }
}

/// Keeps a turn's <dA, A>, and with the first one the row's weight. By four lanes.
inline void keep_product(const GradientRow& row, float weight, u32 turn, float product) {
  product = sum_of_row(product);
  const bool wanted = row.there && Machine::lane() % 4 == 0;
  store_number(wanted, row.kept + kProductsAt + turn * sizeof(float), product);
  store_number(wanted && turn == 0, row.kept + kWeightAt, weight);
}

/// Keeps what is derived of h, computed or saved, in one turn: the call's `turn`-th of the row.
inline void keep_derived(float (&d)[kFirstSums], const u32 (&d_values)[kHalfSums / 2],
                         const GradientArguments& arguments, const Task& task, u32 turn) {
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const GradientRow row = gradient_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
    const float weight = weight_of_row(arguments, task, row);
    if (kCopies && turn % kTurns == 0) {
      copy_inputs(row, turn / kTurns);  // first, so that no register keeps where they are from
    }
    float product = 0.0F;
#pragma unroll
    for (u32 first = 2 * lower; first < kHalfSums; first += kGroup) {
      const u32 column = column_of(turn, first / kGroup);
      if constexpr (kBias) {
        add_bias(d, arguments, task, turn, first);
      }
      if constexpr (kSaves) {
        put_saved(d, load_saved(row.saved, column), first, row.saved != nullptr);
      }
      HiddenColumns hidden;
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const u32 i = first + 4 * k;
        const u32 up = kShape.gated() ? kHalfSums + i : i;
        hidden.gates[k] = make_float2(d[i], d[i + 1]);
        hidden.ups[k] = make_float2(d[up], d[up + 1]);
      }
      keep_columns(hidden, d_values, first, row, weight, column, product);
    }
    keep_product(row, weight, turn, product);
  }
}

/// Two of each of four eights, of who has eight columns of one. By a whole warp.
inline HiddenColumns hidden_of(const SavedColumns& saved) {
  HiddenColumns hidden;
#pragma unroll
  for (u32 half = 0; half < kHalves; ++half) {
    const uint4 eight = saved.halves[half];
    u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    eight_columns(words);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const float2 pair = make_float2(Element::low(words[k]), Element::high(words[k]));
      hidden.gates[k] = half == 0 ? pair : hidden.gates[k];
      hidden.ups[k] = pair;  // of the last half
    }
  }
  return hidden;
}

/// The same of a part whose rows are all saved, with some groups of h under way.
inline void keep_derived_of_saved(const u32 (&d_values)[kValueSums / 2],
                                  const GradientArguments& arguments, const Task& task, u32 part) {
  constexpr u32 kAhead = 4;
  constexpr u32 kGroups = kValueSums / kGroup;
  constexpr u32 kGroupsOfTurn = kGroups / kTurns;
#pragma unroll
  for (u32 lower = 0; lower < 2; ++lower) {
    const GradientRow row = gradient_row(arguments, task, tile_row(lower) + Machine::lane() / 4);
    const u32 first_turn = part * kTurns;
    SavedColumns saved[kAhead];
#pragma unroll
    for (u32 group = 0; group < kAhead; ++group) {
      saved[group] = load_saved(row.saved, column_of(first_turn, group));
    }
    const float weight = weight_of_row(arguments, task, row);
    if constexpr (kCopies) {
      copy_inputs(row, part);
    }
    float product = 0.0F;
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const HiddenColumns hidden = hidden_of(saved[group % kAhead]);
      if (group + kAhead < kGroups) {
        saved[group % kAhead] = load_saved(row.saved, column_of(first_turn, group + kAhead));
      }
      keep_columns(hidden, d_values, group * kGroup + 2 * lower, row, weight,
                   column_of(first_turn, group), product);
      if ((group + 1) % kGroupsOfTurn == 0) {
        keep_product(row, weight, first_turn + group / kGroupsOfTurn, product);
        product = 0.0F;
      }
    }
  }
}

/// <dA, A> of all turns, and <dY, b2>: the gradient of a row's weight, by four lanes.
inline float weight_gradient(const GradientArguments& arguments, const Task& task,
                             const GradientRow& row) {
  float sum = 0.0F;
  for (u32 turn = Machine::lane() % 4; row.there && turn < kProductsOfRow; turn += 4) {
    sum += reinterpret_cast<const float*>(row.kept + kProductsAt)[turn];
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

/// dA of a turn, or of all columns of a part, as pairs of two-byte elements.
template <u32 kWords>
inline void multiply_values(u32 (&d_values)[kWords], u32 steps, u32 group, Shared& shared,
                            RingPosition<kStages>& stage) {
  float d[2 * kWords] = {};
  multiply_by_columns(d, steps, group, shared, stage);
#pragma unroll
  for (u32 i = 0; i < kWords; ++i) {
    d_values[i] = Element::pack(d[2 * i], d[2 * i + 1]);
  }
}

/// A warpgroup's 64 rows of a part; `word`: what the slot was given; `place`: which slot it is.
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
    if (kTurns > 1 && saves_all(arguments, task)) {
      u32 d_values[kValueSums / 2];
      multiply_values(d_values, rehearses ? 0 : kHiddenSteps, group, shared, stage);
      stamp_computed(shared, place);
      keep_derived_of_saved(d_values, arguments, task, slot.word.part());
      return;
    }
    bool is_last = kTurns == 1;  // a predicate: for a number, no register is left
#pragma unroll 1
    for (;;) {
      u32 d_values[kHalfSums / 2];
      multiply_values(d_values, rehearses ? 0 : kHiddenSteps, group, shared, stage);
      float d[kFirstSums] = {};
      multiply_tile(d, hidden_steps(arguments, task), group, shared, stage, kAsLanded);
      stamp_computed(shared, place);
      const u32 nth = is_last ? kTurns - 1 : 0;
      keep_derived(d, d_values, arguments, task, slot.word.part() * kTurns + nth);
      if (is_last) {
        break;
      }
      is_last = true;
    }
  } else {
    float d[kSecondSums] = {};
    multiply_by_columns(d, rehearses ? 0 : kSecondSteps, group, shared, stage);
    stamp_computed(shared, place);
    return_results(d, arguments, task, slot, slot.word.part());
  }
}

}  // namespace moeos::sm90
