// SPDX-License-Identifier: Apache-2.0
// How long an actor that knows who is late waits for news of somebody who is late before that one.
//
// A rank that waits for a peer may see only the last of several that wait for each other; the one
// that waits for the first will say so, a little later perhaps. May not know: what is waited for.
#pragma once

#include "runtime/memory/watchdog.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// One actor's, in one call. By one lane.
template <Platform P>
class GraceTime {
 public:
  /// For each link of the chain, from the rank that sees who is late: as much longer than it as
  /// deadlines of ranks may end behind each other.
  static constexpr u64 kLinkNsMost = 250'000'000;
  static constexpr u32 kLinksOfDeadline = 8;
  /// Of any chain.
  static constexpr u32 kLinksMost = 11;

  /// What to say when asked: something is `late`, and somebody may know why behind up to so many
  /// links.
  Answer answer(bool late, u32 links, u64 deadline_ns) {
    if (!late) {
      const bool waited = since_ns_ != 0;
      since_ns_ = 0;
      return waited ? Answer::moot : Answer::nothing;
    }
    MOEOS_CHECK(links <= kLinksMost);
    const u64 now = P::now_ns();
    since_ns_ = since_ns_ == 0 ? now : since_ns_;
    const u64 most = links * minimum(deadline_ns / kLinksOfDeadline, kLinkNsMost);
    return now - since_ns_ < most ? Answer::wait : Answer::missing;
  }

 private:
  u64 since_ns_ = 0;  // when it was asked first; 0: it was not
};

}  // namespace moeos
