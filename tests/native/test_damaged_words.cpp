// SPDX-License-Identifier: Apache-2.0
// What a rank makes of words in its heap that no peer would write: an error, never an access
// outside of its buffers and never a hang.
//
// Built and run by tests/native/test_native.py. Knows where the heap's words lie (layout.hpp).
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/twin/forward.hpp"
#include "runtime/memory/layout.hpp"

namespace {

using moeos::Activation;
using moeos::count_word;
using moeos::Curve;
using moeos::Failure;
using moeos::FailureKind;
using moeos::Geometry;
using moeos::GroupScore;
using moeos::i32;
using moeos::LayerShape;
using moeos::Layout;
using moeos::RowMap;
using moeos::Scoring;
using moeos::seal;
using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::twin::Element;
using moeos::twin::Operands;
using moeos::twin::TwinRank;
using moeos::twin::TwinSettings;

constexpr u32 kTokens = 100;
constexpr u32 kHidden = 8;
constexpr u32 kExperts = 4;
constexpr u32 kTopK = 2;

Geometry make_geometry(RowMap row_map) {
  Geometry g{};
  g.world = 2;
  g.experts = kExperts;
  g.top_k = kTopK;
  g.max_tokens = kTokens;
  g.row_bytes = g.sent_bytes = g.returned_bytes = kHidden * sizeof(float);
  g.hidden_bytes = kHidden * sizeof(float);
  g.row_map = row_map;
  g.capacity = kTokens;
  g.chunk_rows = 32;
  g.tile_rows = 128;
  g.route_tokens = 32;
  g.route_slices = 1;
  g.product0_parts = 1;
  g.product1_parts = 1;
  g.segment_align = Geometry::kSegmentAlign;
  g.dedup_rows = 1;
  g.processors = 1;
  return g;
}

struct Unmap {
  u64 bytes = 0;
  void operator()(u8* memory) const { munmap(memory, bytes); }
};
using Heap = std::unique_ptr<u8, Unmap>;

Heap make_heap(u64 bytes) {
  return Heap(static_cast<u8*>(
                  mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
              Unmap{bytes});
}

template <class T>
T& word(u8* heap, u64 offset) {
  return *reinterpret_cast<T*>(heap + offset);
}

/// Two ranks; rank 0's heap is damaged before it makes its first call. Rank 1 makes its own beside
/// it or, so that it cannot write the right words first, afterwards. Returns what came of both
/// calls.
std::vector<Failure> call_with(RowMap row_map, bool split_os, bool together,
                               const std::function<void(const Layout&, u8*)>& damage) {
  const Geometry g = make_geometry(row_map);
  const LayerShape shape{kHidden,
                         kHidden,
                         Activation{Curve::relu},
                         Scoring::softmax,
                         true,
                         1.0F,
                         1,
                         1,
                         GroupScore::top2_sum,
                         0,
                         false,
                         false};
  const TwinSettings settings{2'000'000'000ULL, split_os, 0.0, 0, g.world};
  const Layout layout(g);
  std::vector<Heap> heaps;
  heaps.push_back(make_heap(layout.bytes()));
  heaps.push_back(make_heap(layout.bytes()));
  const std::vector<u8*> addresses = {heaps[0].get(), heaps[1].get()};
  if (!together) {
    word<u64>(addresses[0], layout.call_of(1, 1)) =
        count_word(1, 0);  // rank 1's, as if it had begun
  }
  damage(layout, addresses[0]);

  const std::vector<float> values(kExperts * kHidden * kHidden, 0.5F);  // of every operand
  const std::vector<float> x(kTokens * kHidden, 1.0F);
  std::vector<i32> ids;
  for (u32 token = 0; token < kTokens; ++token) {
    ids.push_back(static_cast<i32>(token % kExperts));
    ids.push_back(static_cast<i32>((token + 1) % kExperts));
  }
  const std::vector<float> weights(kTokens * kTopK, 1.0F);
  std::vector<std::vector<float>> out(2, std::vector<float>(kTokens * kHidden));
  std::vector<Failure> failures(2);
  std::vector<std::unique_ptr<TwinRank>> ranks;
  for (u32 p = 0; p < 2; ++p) {
    ranks.push_back(std::make_unique<TwinRank>(g, shape, p, addresses, settings));
  }
  const auto call = [&](u32 p) {
    const Operands operands{.element = Element::kFloat32,
                            .x = x.data(),
                            .gate = values.data(),
                            .topk_ids = ids.data(),
                            .topk_weights = weights.data(),
                            .w1 = values.data(),
                            .w2 = values.data(),
                            .out = out[p].data()};
    failures[p] = ranks[p]->forward(operands, kTokens, kTokens);
  };
  if (together) {
    std::thread other(call, 1);
    call(0);
    other.join();
  } else {
    call(0);
    call(1);
  }
  return failures;
}

struct Case {
  const char* name;
  FailureKind expected;
  std::function<void(const Layout&, u8*)> damage;
};

}  // namespace

int main() {
  const Case cases[] = {
      {"nothing is damaged", FailureKind::none, [](const Layout&, u8*) {}},
      {"words of an earlier call", FailureKind::none,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.count(0, 1, 0)) = count_word(0, 99);
         word<u64>(heap, layout.count(1, 1, 1)) = count_word(0, 7);
         word<u32>(heap, layout.arrived(1, 0)) = seal(0U);
       }},
      {"a count beyond an expert's rows", FailureKind::count_too_large,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.count(1, 1, 0)) = count_word(1, kTokens + 1);
         word<u64>(heap, layout.count(1, 1, 1)) = count_word(1, 0);
       }},
      {"the largest count", FailureKind::count_too_large,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.count(1, 1, 0)) = count_word(1, 0);
         word<u64>(heap, layout.count(1, 1, 1)) = count_word(1, 0xFFFFFFFF);
       }},
      {"a chunk with more results than rows", FailureKind::returns_too_many,
       [](const Layout& layout, u8* heap) {
         word<u32>(heap, layout.returned(1, 0)) = seal(1000U);
       }},
      {"a credit that nobody gives", FailureKind::returns_too_many,
       [](const Layout& layout, u8* heap) { word<u32>(heap, layout.returned(1, 0)) = 1; }},
      {"a count with a bit too many", FailureKind::count_damaged,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.count(1, 1, 0)) = count_word(1, 5) ^ 16;
       }},
      {"another call than ours", FailureKind::call_differs,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.call_of(1, 1)) = count_word(1, 7);
       }},
      {"a call with a bit too many", FailureKind::count_damaged,
       [](const Layout& layout, u8* heap) {
         word<u64>(heap, layout.call_of(1, 1)) = count_word(1, 0) ^ 16;
       }},
      {"an arrival flag that was never written", FailureKind::flag_damaged,
       [](const Layout& layout, u8* heap) {
         constexpr u32 kRowsEach = kTokens * kTopK / kExperts;
         word<u64>(heap, layout.count(1, 1, 0)) = count_word(1, kRowsEach);
         word<u64>(heap, layout.count(1, 1, 1)) = count_word(1, kRowsEach);
         word<u32>(heap, layout.arrived(1, 0)) = 1;
       }},
      {"a row that comes from a later one", FailureKind::origin_damaged,
       [](const Layout& layout, u8* heap) {
         constexpr u32 kRowsEach = kTokens * kTopK / kExperts;
         word<u64>(heap, layout.count(1, 1, 0)) = count_word(1, kRowsEach);
         word<u64>(heap, layout.count(1, 1, 1)) = count_word(1, kRowsEach);
         word<u32>(heap, layout.arrived(1, 0)) = seal(1U);
         word<u32>(heap, layout.origin(1, 0)) = seal(1U);
       }},
  };
  int failed = 0;
  for (const Case& one : cases) {
    for (const RowMap row_map : {RowMap::ragged, RowMap::capacity}) {
      for (const bool split_os : {false, true}) {
        const bool together = one.expected == FailureKind::none;
        for (const Failure& failure : call_with(row_map, split_os, together, one.damage)) {
          if (failure.kind != one.expected) {
            std::printf("%s: failure kind %u instead of %u\n", one.name,
                        static_cast<u32>(failure.kind), static_cast<u32>(one.expected));
            ++failed;
          }
        }
      }
    }
  }
  std::printf("test_damaged_words: %d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
