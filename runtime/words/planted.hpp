// SPDX-License-Identifier: Apache-2.0
// Planted faults: named points of the source at which a build for tests does the wrong thing, so
// that a test is known to notice it.
//
// Must not depend on: what is wrong there.
#pragma once

// MOEOS_PLANTED(name): whether the fault `name` is planted. The name says what is then wrong, and
// has no quotes. Without MOEOS_PLANTS this is the word `false`, and the compiler sees no fault.
// With it a program has all faults, and plants the one that MOEOS_PLANT in its environment names at
// its start.
#ifndef MOEOS_PLANTS
#define MOEOS_PLANTED(name) false
#else

#include <cstdlib>
#include <cstring>

namespace moeos {

template <unsigned kSize>
struct FaultName {
  char text[kSize]{};
  constexpr FaultName(const char (&name)[kSize]) {
    for (unsigned i = 0; i < kSize; ++i) {
      text[i] = name[i];
    }
  }
};

template <FaultName kName>
inline const bool kPlanted = [] {
  const char* planted = std::getenv("MOEOS_PLANT");
  return planted != nullptr && std::strcmp(planted, kName.text) == 0;
}();

}  // namespace moeos

#define MOEOS_PLANTED(name) (::moeos::kPlanted<#name>)
#endif
