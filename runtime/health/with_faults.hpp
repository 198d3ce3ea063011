// SPDX-License-Identifier: Apache-2.0
// Makes any machine one whose actors do what a rank's fault plan says (runtime/health/faults.hpp).
//
// A class of its own, so that nothing of a kernel without faults changes, not even its symbols.
// Must not depend on: plans.
#pragma once

namespace moeos {

template <class Machine>
class WithFaults : public Machine {
 public:
  using Machine::Machine;
  static constexpr bool has_faults() { return true; }
};

}  // namespace moeos
