// SPDX-License-Identifier: Apache-2.0
// A link between two GPUs, used as a layer uses it: rows are stored into the peer's memory, a flag
// releases them, and a credit comes back by an atomic add. Also a stream of stores, to be timed.
//
// The sender and the receiver of a link run at the same time, one block on each GPU. Launched by
// host/moeos/cli/links.py. Must not depend on: layers.
#include "runtime/platform/cuda/platform.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

using Machine = cuda::Machine<cuda::NoTransport, 1>;

/// What a sender or a receiver reports to the host.
struct LinkReport {
  u64 rounds;     // rounds that ended well
  u64 wrong;      // 16-byte words that were not what the sender had stored
  u64 timed_out;  // 1 if the peer did not answer before the deadline
};

/// In a flag: no round follows.
inline constexpr u32 kLastRound = 1U << 31;

/// The word at index i in a round; no two rounds of a test have the same words.
inline uint4 pattern(u32 seed, u32 round, u32 i) {
  const u32 mixed = (i * 0x9E3779B9U) ^ (round * 0x85EBCA6BU) ^ seed;
  return uint4{mixed, ~mixed, mixed + round, mixed ^ i};
}

/// Waits for a word in this GPU's memory; false at the deadline. The acquire pairs with the peer's
/// release of the word and makes what the peer did before visible.
template <class Predicate>
inline bool wait_for(const u32* word, u64 deadline_ns, Predicate is_there) {
  const u64 begun = Machine::now_ns();
  u32 idle = 0;
  while (!is_there(Machine::load_acquire<Scope::system>(word))) {
    if (Machine::now_ns() - begun > deadline_ns) {
      return false;
    }
    Machine::pause(idle);
  }
  return true;
}

/// Stores a fresh pattern into `payload`, which is the peer's, repeatedly for `duration_ns`.
/// `credit` is this GPU's: the rounds that the receiver has read.
extern "C" __global__ void moeos_link_send(uint4* payload, u32* flag, const u32* credit, u32 words,
                                           u32 seed, u64 duration_ns, u64 deadline_ns,
                                           LinkReport* report) {
  __shared__ bool answered;
  __shared__ bool last;
  const u64 begun = Machine::now_ns();
  u32 round = 0;
  do {
    ++round;
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
      payload[i] = pattern(seed, round, i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      last = Machine::now_ns() - begun > duration_ns || round + 1 == kLastRound;
      // Publishes the block's stores, which the barrier orders before it, to the receiver.
      Machine::store_release<Scope::system>(flag, round | (last ? kLastRound : 0));
      // Pairs with the receiver's add: the payload has been read and may be overwritten.
      answered = wait_for(credit, deadline_ns, [&](u32 seen) { return seen == round; });
    }
    __syncthreads();
  } while (answered && !last);
  if (threadIdx.x == 0) {
    *report = LinkReport{answered ? round : round - 1, 0, answered ? 0U : 1U};
  }
}

/// Reads what the sender stores into `payload`, which is this GPU's, and checks it. `credit` is the
/// sender's.
extern "C" __global__ void moeos_link_receive(const uint4* payload, const u32* flag, u32* credit,
                                              u32 words, u32 seed, u64 deadline_ns,
                                              LinkReport* report) {
  __shared__ bool arrived;
  __shared__ bool last;
  u32 round = 0;
  u64 wrong = 0;
  bool ends = false;
  do {
    ++round;
    if (threadIdx.x == 0) {
      arrived = wait_for(flag, deadline_ns, [&](u32 seen) {
        last = (seen & kLastRound) != 0;
        return (seen & ~kLastRound) == round;
      });
    }
    __syncthreads();
    if (!arrived) {
      break;
    }
    ends = last;  // before the count's barrier, after which `last` may be the next round's
    for (u32 first = 0; first < words; first += blockDim.x) {
      const u32 i = first + threadIdx.x;
      bool differs = false;
      if (i < words) {
        const uint4 seen = payload[i];
        const uint4 sent = pattern(seed, round, i);
        differs = seen.x != sent.x || seen.y != sent.y || seen.z != sent.z || seen.w != sent.w;
      }
      wrong += __syncthreads_count(differs);
    }
    if (threadIdx.x == 0) {
      // After the barrier of the count: every thread has read its words.
      Machine::add_release<Scope::system>(credit, 1U);
    }
  } while (!ends);
  if (threadIdx.x == 0) {
    *report = LinkReport{arrived ? round : round - 1, wrong, arrived ? 0U : 1U};
  }
}

/// Stores 16 bytes per thread and step, over all of `to`.
extern "C" __global__ void moeos_link_stream(uint4* to, u64 words) {
  const u64 threads = u64{gridDim.x} * blockDim.x;
  for (u64 i = u64{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += threads) {
    to[i] = pattern(0, 0, static_cast<u32>(i));
  }
}

}  // namespace moeos
