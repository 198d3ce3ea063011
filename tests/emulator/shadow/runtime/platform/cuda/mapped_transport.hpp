// SPDX-License-Identifier: Apache-2.0
// In place of runtime/platform/cuda/mapped_transport.hpp: says that there are remote peers, to
// which the emulator's machine puts.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos::cuda {

class MappedTransport {
 public:
  static constexpr bool kExists = true;
};

}  // namespace moeos::cuda
