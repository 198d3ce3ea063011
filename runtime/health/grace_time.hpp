// SPDX-License-Identifier: Apache-2.0
// How long an actor that knows which rank is late waits for news of a rank that is late before that
// one.
//
// Where ranks wait for each other in a chain, each rank sees only its own peer; the rank that waits
// for the first late one will say so, perhaps a little later. Must not depend on: what is waited
// for.
#pragma once

#include "runtime/memory/watchdog.hpp"
#include "runtime/words/base.hpp"

namespace moeos {

/// The grace time of one actor, in one call. By one lane.
template <Platform P>
class GraceTime {
 public:
  /// For each link of the chain, from the rank that sees who is late: how much longer each rank
  /// waits than the next, since ranks' deadlines may end one after the other.
  static constexpr u64 kLinkNsMost = 250'000'000;
  static constexpr u32 kLinksOfDeadline = 8;
  /// Links of the longest chain.
  static constexpr u32 kLinksMost = 11;

  /// The answer to an inquiry: something is `late`, and a rank up to `links` links away may know
  /// why.
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
  u64 since_ns_ = 0;  // when it was first asked; 0: it was not
};

}  // namespace moeos
