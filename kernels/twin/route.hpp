// SPDX-License-Identifier: Apache-2.0
// The Route task: logits, scores, top-k and weights of one block of tokens, or the caller's
// routing.
//
// Logits and scores are fp32; an fp32 router's are summed in fp64. Ties go to the lower expert. May
// not know: slots, rows, flags.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/shape.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/placement.hpp"
#include "runtime/words/dimensions.hpp"

namespace moeos::twin {

class Router {
 public:
  Router(const Dimensions& dimensions, const LayerShape& shape, const Operands& operands,
         const RankMemory& memory, u32 rank, Scratch& scratch)
      : dimensions_(dimensions),
        shape_(shape),
        operands_(operands),
        memory_(memory),
        rank_(rank),
        scratch_(scratch),
        rows_(dimensions.routed_experts() + shape.zero_experts) {}

  /// Writes pair_expert and pair_weight of tokens [first, end). Returns the first token whose
  /// logits are not all finite (its pairs are then not written), or kNone.
  u32 route(u32 first, u32 end) {
    if (operands_.topk_ids != nullptr) {
      copy_given(first, end);
      if (operands_.topk_weights != nullptr) {
        return kNone;
      }
    }
    if (shape_.fp32_router) {
      compute_logits_exactly(first, end);
    } else {
      compute_logits(first, end);
      add_router_bias(end - first);
    }
    for (u32 token = first; token < end; ++token) {
      const float* logits = &scratch_.results[std::size_t{token - first} * logit_stride()];
      for (u32 expert = 0; expert < rows_; ++expert) {
        if (!std::isfinite(logits[expert])) {
          return token;
        }
      }
      score(logits, scratch_.scores.get());
      if (operands_.topk_ids == nullptr) {
        choose(logits, token * dimensions_.top_k);
      }
      weigh(logits, token * dimensions_.top_k);
    }
    return kNone;
  }

 private:
  static constexpr float kExcluded = -std::numeric_limits<float>::infinity();

  u32 logit_stride() const { return align_up(rows_, kGemmGranule); }

  void copy_given(u32 first, u32 end) {
    for (u32 pair = first * dimensions_.top_k; pair < end * dimensions_.top_k; ++pair) {
      const u32 choice = pair / dimensions_.pairs_of_choice();
      const i32 expert = operands_.topk_ids[choice];
      memory_.pair_expert[pair] = expert < 0 ? kNone : static_cast<u32>(expert);
      memory_.pair_weight[pair] =
          expert < 0 || operands_.topk_weights == nullptr ? 0.0F : operands_.topk_weights[choice];
    }
    if (operands_.topk_weights != nullptr) {
      place_pairs(first * dimensions_.top_k, end * dimensions_.top_k);
    }
  }

  /// From experts to their places. To all but Combine a pair with a zero expert is an unused slot;
  /// its weight, which is not 0, tells it apart.
  void place_pairs(u32 first_pair, u32 end_pair) {
    for (u32 pair = first_pair; pair < end_pair; ++pair) {
      u32& expert = memory_.pair_expert[pair];
      expert = place_of_pair(dimensions_, memory_, rank_, pair, expert);
    }
  }

  /// results[token - first][expert] = x . gate
  void compute_logits(u32 first, u32 end) {
    const std::size_t size = size_of(operands_.element);
    const std::size_t row_bytes = shape_.hidden * size;
    u32 panels = 0;
    for (u32 token = first; token < end; token += kPanelRows) {
      pack_rows(operands_.element,
                ConstElements(operands_.element, operands_.x).at(u64{token} * shape_.hidden),
                row_bytes, minimum(kPanelRows, end - token), shape_.hidden,
                &scratch_.panels[panels++ * panel_floats(shape_.hidden)]);
    }
    const u32 whole = rows_ / kGemmGranule * kGemmGranule;
    const u32 rest = rows_ - whole;
    if (whole > 0) {
      multiply(scratch_.panels.get(), panels, shape_.hidden,
               {operands_.element, operands_.gate, shape_.hidden}, 0, whole, scratch_.results.get(),
               logit_stride());
    }
    if (rest > 0) {
      auto* padded = reinterpret_cast<u8*>(scratch_.last_gate_rows.get());
      std::memcpy(padded,
                  ConstElements(operands_.element, operands_.gate).at(u64{whole} * shape_.hidden),
                  rest * row_bytes);
      std::memset(padded + rest * row_bytes, 0, (kGemmGranule - rest) * row_bytes);
      multiply(scratch_.panels.get(), panels, shape_.hidden,
               {operands_.element, padded, shape_.hidden}, 0, kGemmGranule,
               scratch_.results.get() + whole, logit_stride());
    }
  }

  void add_router_bias(u32 tokens) {
    for (u32 place = 0; operands_.router_bias != nullptr && place < tokens; ++place) {
      float* logits = &scratch_.results[std::size_t{place} * logit_stride()];
      for (u32 expert = 0; expert < rows_; ++expert) {
        logits[expert] += operands_.router_bias[expert];
      }
    }
  }

  /// The same of an fp32 router: products are exact, and their sums are fp64.
  void compute_logits_exactly(u32 first, u32 end) {
    const auto* gate = static_cast<const float*>(operands_.gate);
    const ConstElements x(operands_.element, operands_.x);
    double* row = scratch_.token.get();
    for (u32 token = first; token < end; ++token) {
      for (u32 k = 0; k < shape_.hidden; ++k) {
        row[k] = x[u64{token} * shape_.hidden + k];
      }
      float* logits = &scratch_.results[std::size_t{token - first} * logit_stride()];
      for (u32 expert = 0; expert < rows_; ++expert) {
        const double bias = operands_.router_bias != nullptr ? operands_.router_bias[expert] : 0.0;
        logits[expert] =
            static_cast<float>(product(row, gate + u64{expert} * shape_.hidden) + bias);
      }
    }
  }
  double product(const double* row, const float* weight) const {
    constexpr u32 kSums = 8;  // side by side in vectors; H is a multiple
    double sums[kSums] = {};
    for (u32 k = 0; k < shape_.hidden; k += kSums) {
      for (u32 i = 0; i < kSums; ++i) {
        sums[i] += row[k + i] * static_cast<double>(weight[k + i]);
      }
    }
    double sum = 0.0;
    for (const double part : sums) {
      sum += part;
    }
    return sum;
  }

  /// Top-k of one token, whose scores are there: with DeepSeek-V3's bias and groups.
  void choose(const float* logits, u32 first_pair) {
    const float* scores = scratch_.scores.get();
    float* choice = scratch_.choice.get();
    const bool by_logit = operands_.selection_bias == nullptr && shape_.chooses_by_logit();
    for (u32 e = 0; e < rows_; ++e) {
      choice[e] =
          by_logit ? logits[e]
                   : scores[e] +
                         (operands_.selection_bias != nullptr ? operands_.selection_bias[e] : 0.0F);
    }
    if (shape_.expert_groups > 1) {
      exclude_groups(choice);
    }
    const u32 pairs = dimensions_.pairs_of_choice();
    for (u32 j = 0; j < dimensions_.choices(); ++j) {
      const u32 best = best_of(choice, rows_);
      choice[best] = kExcluded;
      std::fill_n(memory_.pair_expert + first_pair + j * pairs, pairs, best);
    }
  }

  /// The weights of a token's pairs, out of its scores or, renormalised, its logits: scaled.
  void weigh(const float* logits, u32 first_pair) {
    const float* scores = scratch_.scores.get();
    const u32* experts = memory_.pair_expert + first_pair;
    float* weights = memory_.pair_weight + first_pair;
    const u32 pairs = dimensions_.pairs_of_choice();
    float top = kExcluded;
    for (u32 j = 0; j < dimensions_.top_k; j += pairs) {
      top = experts[j] == kNone ? top : maximum(top, logits[experts[j]]);
    }
    float sum = 0.0F;
    for (u32 j = 0; j < dimensions_.top_k; j += pairs) {
      weights[j] = experts[j] == kNone  ? 0.0F
                   : shape_.renormalize ? share(logits[experts[j]], top)
                                        : scores[experts[j]];
      sum += weights[j];
    }
    const float part = shape_.renormalize && sum > 0.0F ? 1.0F / sum : 1.0F;  // 0: no pair is used
    for (u32 j = 0; j < dimensions_.top_k; j += pairs) {
      if (experts[j] != kNone) {
        weights[j] = weights[j] * part * shape_.routed_scaling * scale_of(experts[j]);
      }
      std::fill_n(weights + j, pairs, weights[j]);
      if (operands_.chosen_ids != nullptr) {
        const u32 choice = (first_pair + j) / pairs;
        operands_.chosen_ids[choice] = static_cast<i32>(experts[j]);  // kNone is -1
        operands_.chosen_weights[choice] = weights[j];
      }
    }
    place_pairs(first_pair, first_pair + dimensions_.top_k);
  }

  /// A score of a token in proportion to its others, `top` being the largest logit among them. The
  /// scores may be too small for fp32, all of them; the share of the largest is not.
  float share(float logit, float top) const {
    if (shape_.scoring == Scoring::softmax) {
      return std::exp(logit - top);
    }
    const float low = minimum(top, 0.0F);  // below, scores fall as exponentials do
    if (shape_.scoring == Scoring::sigmoid) {
      return std::exp(minimum(logit, 0.0F) - low) / (1.0F + std::exp(-std::abs(logit)));
    }
    return logit < kSoftplusTail ? std::exp(0.5F * (logit - low))
                                 : sqrtsoftplus(logit) * std::exp(-0.5F * low);
  }

  float scale_of(u32 expert) const {
    return operands_.expert_scale != nullptr ? operands_.expert_scale[expert] : 1.0F;
  }

  static float sqrtsoftplus(float logit) {
    if (logit < kSoftplusTail) {
      return std::exp(0.5F * logit);
    }
    return std::sqrt(logit > kSoftplusLinear ? logit : std::log1p(std::exp(logit)));
  }

  void score(const float* logits, float* scores) const {
    if (shape_.scoring == Scoring::sqrtsoftplus) {
      for (u32 e = 0; e < rows_; ++e) {
        scores[e] = sqrtsoftplus(logits[e]);
      }
      return;
    }
    if (shape_.scoring == Scoring::sigmoid) {
      for (u32 e = 0; e < rows_; ++e) {
        scores[e] = 1.0F / (1.0F + std::exp(-logits[e]));
      }
      return;
    }
    float top = logits[0];
    for (u32 e = 1; e < rows_; ++e) {
      top = maximum(top, logits[e]);
    }
    float sum = 0.0F;
    for (u32 e = 0; e < rows_; ++e) {
      scores[e] = std::exp(logits[e] - top);
      sum += scores[e];
    }
    for (u32 e = 0; e < rows_; ++e) {
      scores[e] /= sum;
    }
  }

  static u32 best_of(const float* values, u32 count) {
    u32 best = 0;
    for (u32 i = 1; i < count; ++i) {
      if (values[i] > values[best]) {
        best = i;
      }
    }
    return best;
  }

  /// Keeps the top_groups groups with the highest scores.
  void exclude_groups(float* choice) {
    const u32 size = dimensions_.routed_experts() / shape_.expert_groups;
    float* group_scores = scratch_.row.get();
    for (u32 g = 0; g < shape_.expert_groups; ++g) {
      float first = kExcluded;
      float second = kExcluded;
      for (u32 e = g * size; e < (g + 1) * size; ++e) {
        if (choice[e] > first) {
          second = first;
          first = choice[e];
        } else if (choice[e] > second) {
          second = choice[e];
        }
      }
      const bool adds = shape_.group_score == GroupScore::top2_sum && size > 1;
      group_scores[g] = adds ? first + second : first;
    }
    for (u32 kept = 0; kept < shape_.top_groups; ++kept) {
      group_scores[best_of(group_scores, shape_.expert_groups)] = kExcluded;
    }
    for (u32 e = 0; e < dimensions_.routed_experts(); ++e) {
      if (group_scores[e / size] != kExcluded) {
        choice[e] = kExcluded;
      }
    }
  }

  const Dimensions& dimensions_;
  const LayerShape& shape_;
  const Operands& operands_;
  const RankMemory& memory_;
  u32 rank_;
  Scratch& scratch_;
  u32 rows_;  // of the router
};

}  // namespace moeos::twin
