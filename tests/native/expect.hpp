// SPDX-License-Identifier: Apache-2.0
// What programs that step through one part of the runtime share: expectations that are counted, and
// memory such as a rank has.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/words/base.hpp"

inline int failed = 0;

inline void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("not so: %s\n", what);
    ++failed;
  }
}

/// Blocks of zeros, each at the begin of a page, for as long as this object lives.
class Memory {
 public:
  moeos::u8* take(moeos::u64 bytes) {
    constexpr moeos::u64 kPage = 4096;
    const moeos::u64 size = moeos::align_up(moeos::maximum(bytes, moeos::u64{1}), kPage);
    blocks_.emplace_back(static_cast<moeos::u8*>(std::aligned_alloc(kPage, size)));
    std::memset(blocks_.back().get(), 0, size);
    return blocks_.back().get();
  }

 private:
  struct Free {
    void operator()(moeos::u8* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<moeos::u8, Free>> blocks_;
};
