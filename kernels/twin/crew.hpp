// SPDX-License-Identifier: Apache-2.0
// The threads that run a call's actors next to its caller, and sleep between calls.
//
// Start and end of a call go through one lock, which stands for the kernel boundary and is not part
// of the protocol: it orders a call after the one before. Must not depend on: what the workers do.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/words/base.hpp"

namespace moeos::twin {

class Crew {
 public:
  virtual ~Crew() = default;
  /// Makes every worker do its share of the call.
  virtual void start() = 0;
  /// Returns when all workers have done theirs.
  virtual void join() = 0;
};

/// Makes a crew of `workers` workers; worker i does share(i) in each call.
using MakeCrew = std::function<std::unique_ptr<Crew>(u32 workers, std::function<void(u32)> share)>;

class ThreadCrew : public Crew {
 public:
  /// Throws std::system_error, and leaves no thread behind, if not all can be started.
  ThreadCrew(u32 workers, std::function<void(u32)> share);
  ~ThreadCrew() override;
  void start() override;
  void join() override;

 private:
  void live(u32 index);
  void end();

  std::function<void(u32)> share_;
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  u64 generation_ = 0;
  u32 running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace moeos::twin
