// One call of the layer, as its actors are told of it. May not know: anything else.
#pragma once

#include "runtime/base.hpp"

namespace moeos {

/// Fixed for one call; the epoch is read from device memory when the call starts.
struct Call {
  u32 epoch;
  u32 tokens;      // S of this rank
  u32 pair_limit;  // rows we may send to one expert in this call: capacity(S), or max_tokens when
                   // dropless
  u32 may_be_unsent;  // 1: a token may send no row at all (capacity, or routing given by the
                      // caller)
};

}  // namespace moeos
