// SPDX-License-Identifier: Apache-2.0
// Threads that wait for calls. See crew.hpp.
#include "kernels/twin/crew.hpp"

#include <string>
#include <system_error>
#include <utility>

namespace moeos::twin {

ThreadCrew::ThreadCrew(u32 workers, std::function<void(u32)> share) : share_(std::move(share)) {
  threads_.reserve(workers);
  try {
    for (u32 i = 0; i < workers; ++i) {
      threads_.emplace_back([this, i] { live(i); });
    }
  } catch (const std::system_error& error) {
    end();
    throw std::system_error(error.code(), "thread " + std::to_string(threads_.size() + 1) + " of " +
                                              std::to_string(workers));
  }
}

ThreadCrew::~ThreadCrew() { end(); }

void ThreadCrew::end() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void ThreadCrew::live(u32 index) {
  u64 seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      started_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) {
        return;
      }
      seen = generation_;
    }
    share_(index);
    {
      const std::lock_guard lock(mutex_);
      --running_;
    }
    finished_.notify_one();
  }
}

void ThreadCrew::start() {
  {
    const std::lock_guard lock(mutex_);
    running_ = static_cast<u32>(threads_.size());
    ++generation_;
  }
  started_.notify_all();
}

void ThreadCrew::join() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return running_ == 0; });
}

}  // namespace moeos::twin
