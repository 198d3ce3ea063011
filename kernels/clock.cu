// SPDX-License-Identifier: Apache-2.0
// A GPU's clock beside its host's: the host asks again and again what time it is, and the GPU
// answers.
//
// One thread, launched by host/moeos/engines/cuda/clock.py. Knows nothing of layers.
#include "runtime/platform/cuda/platform.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

using Machine = cuda::Machine<cuda::NoTransport, 1>;

/// In the host's pinned memory. One line has what the host writes, the other what the GPU does.
struct ClockExchange {
  Line<u64> asked;  // which question was the last
  alignas(kCacheLine) u64 answered;
  u64 answer_ns;  // of the GPU's clock
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
