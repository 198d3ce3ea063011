// SPDX-License-Identifier: Apache-2.0
// partition_point against its definition, for every size up to 600 and every answer.
//
// Build: g++ -std=c++20 -I. tests/native/words/test_base.cpp -o test_base
#include <cstdio>

#include "runtime/words/base.hpp"

int main() {
  for (unsigned n = 0; n <= 600; ++n) {
    for (unsigned answer = 0; answer <= n; ++answer) {
      const unsigned found = moeos::partition_point(n, [answer](unsigned i) { return i < answer; });
      if (found != answer) {
        std::printf("partition_point(%u): %u instead of %u\n", n, found, answer);
        return 1;
      }
    }
  }
  return 0;
}
