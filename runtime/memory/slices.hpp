// SPDX-License-Identifier: Apache-2.0
// Which of the ranks that hold slices of the same experts adds up which tokens.
//
// These ranks have the same tokens. Each makes a partial sum of every token, over its slices of the
// token's experts. A token's owner adds up the partial sums of all slices, in their order. Must not
// depend on: flags, rows, the actors that run parts.
#pragma once

#include "runtime/words/base.hpp"
#include "runtime/words/call.hpp"
#include "runtime/words/dimensions.hpp"
#include "runtime/words/task.hpp"

namespace moeos {

/// What a part of Combine adds up.
enum class Summands : u32 {
  pairs,   ///< a token's rows of its experts here: its output or, with slices, its partial sum
  slices,  ///< a token's partial sums of all slices: its output
  total,   ///< a token's output, which its owner has sent
};

/// The tokens of one owner, and a token's owner.
constexpr TokenRange tokens_owned(const Dimensions& dimensions, u32 tokens, u32 slice) {
  const u32 each = dimensions.tokens_owned_most(tokens);
  return {minimum(tokens, slice * each), minimum(tokens, (slice + 1) * each)};
}
constexpr u32 owner_of_token(const Dimensions& dimensions, u32 tokens, u32 token) {
  return token / dimensions.tokens_owned_most(tokens);
}

/// An owner's tokens are announced and added up in groups, each with a flag. With few tokens groups
/// are small, so that many processors have some. All ranks cut the groups alike.
constexpr u32 sum_group_tokens(const Dimensions& dimensions, u32 tokens) {
  const u32 each = dimensions.tokens_owned_most(tokens) / Dimensions::kSumGroups;
  return maximum(1U, minimum(each, dimensions.sum_group_most()));
}
constexpr u32 sum_groups(const Dimensions& dimensions, u32 tokens, u32 owner) {
  const TokenRange owned = tokens_owned(dimensions, tokens, owner);
  return ceil_div(owned.end - owned.first, sum_group_tokens(dimensions, tokens));
}
constexpr TokenRange tokens_of_group(const Dimensions& dimensions, u32 tokens, u32 owner,
                                     u32 group) {
  const TokenRange owned = tokens_owned(dimensions, tokens, owner);
  const u32 each = sum_group_tokens(dimensions, tokens);
  const u32 first = owned.first + group * each;
  return {minimum(owned.end, first), minimum(owned.end, first + each)};
}
/// A token's group among its owner's.
constexpr u32 group_of_token(const Dimensions& dimensions, u32 tokens, u32 token) {
  const u32 owner = owner_of_token(dimensions, tokens, token);
  return (token - tokens_owned(dimensions, tokens, owner).first) /
         sum_group_tokens(dimensions, tokens);
}

/// Whether a call adds up the partial sums of slices.
constexpr bool adds_slices(const Dimensions& dimensions, const Call& call) {
  return dimensions.sliced() && call.leaves_partials == 0;
}

/// What a call counts before it may end (CallState::tokens_combined): its tokens; with slices, in
/// addition the tokens whose sums are written here, and 1 when all slices have said that they make
/// the call.
constexpr u32 combines_of(const Dimensions& dimensions, const Call& call, u32 slice) {
  if (!adds_slices(dimensions, call)) {
    return call.tokens + (dimensions.sliced() ? 1 : 0);
  }
  const TokenRange owned = tokens_owned(dimensions, call.tokens, slice);
  const u32 sums = dimensions.sums_everywhere != 0 ? call.tokens : owned.end - owned.first;
  return call.tokens + sums + 1;
}

/// Where the caller adds up a call's partial sums, the host may describe the call's rows: multiples
/// of this number cannot be confused with a number of tokens.
inline constexpr u32 kRowsApart = 65'537;

/// What slices tell each other of a call's inputs, which must be equal: the host's digest of them,
/// and their number of tokens.
constexpr u32 inputs_of(const Call& call) { return call.inputs + call.tokens; }

/// The word of a Combine of a group's tokens has, instead of a part's number, Summands times this
/// number plus the number of tokens.
inline constexpr u32 kTokensOfSums = ReadyWord::kParts / 4;
static_assert(Dimensions::kCombineTokens < kTokensOfSums);
constexpr ReadyWord sums_word(u32 epoch, Summands summands, TokenRange tokens) {
  MOEOS_CHECK(tokens.first < tokens.end);
  return ReadyWord(epoch, TaskKind::combine, tokens.first,
                   static_cast<u32>(summands) * kTokensOfSums + tokens.end - tokens.first);
}
/// What a processor makes of a sums_word, or of any other word of Combine.
constexpr Task combine_task_of_slices(ReadyWord word) {
  Task task = combine_task(word);
  task.rows = word.part() % kTokensOfSums;
  task.local_expert = word.part() / kTokensOfSums;
  return task;
}

/// What a part of Combine adds up. Where experts are whole it is known without a look.
constexpr Summands summands_of(const Dimensions& dimensions, const Task& task) {
  return dimensions.sliced() ? static_cast<Summands>(task.local_expert) : Summands::pairs;
}

}  // namespace moeos
