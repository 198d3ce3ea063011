// SPDX-License-Identifier: Apache-2.0
// Compares a GPU's clock with its host's: the host asks repeatedly what time it is, and the GPU
// answers.
//
// One thread, launched by host/moeos/engines/cuda/clock.py. Must not depend on: layers.
#include "runtime/platform/cuda/platform.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

using Machine = cuda::Machine<cuda::NoTransport, 1>;

/// In the host's pinned memory. One cache line has what the host writes, the other what the GPU
/// writes.
struct ClockExchange {
  Line<u64> asked;  // number of the last question
  alignas(kCacheLine) u64 answered;
  u64 answer_ns;  // on the GPU's clock
};

/// Answers questions 1 to `questions`; leaves early if one does not come before the deadline.
extern "C" __global__ void moeos_clock(ClockExchange* exchange, u64 questions, u64 deadline_ns) {
  for (u64 question = 1; question <= questions; ++question) {
    const u64 begun = Machine::now_ns();
    // Pairs with nothing: the word alone is the question.
    while (Machine::load_acquire<Scope::system>(&exchange->asked.value) != question) {
      if (Machine::now_ns() - begun > deadline_ns) {
        return;
      }
    }
    exchange->answer_ns = Machine::now_ns();
    // Publishes the time to the host, which reads it when it sees the word.
    Machine::store_release<Scope::system>(&exchange->answered, question);
  }
}

}  // namespace moeos
