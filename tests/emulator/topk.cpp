// SPDX-License-Identifier: Apache-2.0
// The kernel of moeos.topk on the emulated GPU, as a shared library; tests/emulator/test_topk.py
// compiles it with its macros and calls it.
#include "kernels/topk.cu"

#include <cstdio>

#include "tests/emulator/gpu.hpp"

extern "C" int launch(const void* logits, moeos::u64 rows, moeos::u32 count, moeos::u32 chosen,
                      moeos::u32 lanes, moeos::u32 softmax, void* values, moeos::i64* places,
                      moeos::u32 threads) {
  using namespace moeos::topk;
  const auto blocks = static_cast<unsigned>(moeos::ceil_div(rows, moeos::u64{threads} / lanes));
  const auto kernel = [&] {
    moeos_topk(static_cast<const Bits*>(logits), rows, count, chosen, lanes,
               static_cast<Softmax>(softmax), values, places);
  };
  try {
    emulator::run({blocks, threads, 0, {kernel}, 1, 1ULL << 40});
  } catch (const emulator::Fault& fault) {
    std::fprintf(stderr, "%s\n", fault.what());
    return 1;
  }
  return 0;
}
