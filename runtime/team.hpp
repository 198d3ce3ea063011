// The warps of a processor that share one part.
//
// May not know: what they do.
#pragma once

#include "runtime/base.hpp"

namespace moeos {

/// One of the warps that share a part.
struct Team {
  u32 index;
  u32 count;
};

/// How the warps of a team wait for each other when a processor has one warp.
struct NobodyElse {
  void operator()() const {}
};

}  // namespace moeos
