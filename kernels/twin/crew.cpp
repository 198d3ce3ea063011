// Threads that wait for calls. See crew.hpp.
#include "kernels/twin/crew.hpp"

#include <utility>

namespace moeos::twin {

ThreadCrew::ThreadCrew(u32 workers, std::function<void(u32)> share) : share_(std::move(share)) {
  for (u32 i = 0; i < workers; ++i) {
    threads_.emplace_back([this, i] { live(i); });
  }
}

ThreadCrew::~ThreadCrew() {
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
