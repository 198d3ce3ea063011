// SPDX-License-Identifier: Apache-2.0
// Fibers and the choice among them. See schedule.hpp.
#include "kernels/twin/explore/schedule.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moeos::twin {

namespace {

constexpr std::size_t kStackBytes = 128 << 10;

}  // namespace

Schedule::Schedule(u64 seed, Strategy strategy) : random_(seed), strategy_(strategy) {
  const u32 often[] = {1, 2, 8, 32};
  const u32 seldom[] = {50, 400, 3000};  // change points of priorities
  switch_one_in_ =
      strategy == Strategy::random ? often[draw(random_, 0, 3)] : seldom[draw(random_, 0, 2)];
  const u32 wakes[] = {4, 32, 256};
  wake_one_in_ = wakes[draw(random_, 0, 2)];
}

Schedule::~Schedule() = default;

u64 Schedule::spawn(u32 group, std::function<void()> body) {
  std::unique_ptr<Fiber> fiber;
  if (ended_.empty()) {
    fiber = std::make_unique<Fiber>();
    fiber->stack = std::make_unique<u8[]>(kStackBytes);
  } else {
    fiber = std::move(ended_.back());
    ended_.pop_back();
    fiber->held_until_ns = 0;
    fiber->resting = false;
    fiber->ended = false;
  }
  fiber->body = std::move(body);
  fiber->number = spawned_++;
  fiber->group = group;
  fiber->priority = random_();
  witnessed_.push_back(witness != nullptr ? witness->begins() : Witness::kCaller);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  // makecontext passes only ints.
  const auto self = reinterpret_cast<u64>(this);
  makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Schedule::enter), 2,
              static_cast<u32>(self), static_cast<u32>(self >> 32));
  fibers_.push_back(std::move(fiber));
  return fibers_.back()->number;
}

bool Schedule::ended(u64 fiber) const {
  const auto found =
      std::lower_bound(fibers_.begin(), fibers_.end(), fiber,
                       [](const auto& one, u64 number) { return one->number < number; });
  return found == fibers_.end() || (*found)->number != fiber || (*found)->ended;
}

void Schedule::enter(u32 low, u32 high) {
  auto* self = reinterpret_cast<Schedule*>(u64{high} << 32 | low);
  self->running_->body();
  if (witness != nullptr) {  // the caller of run() has waited for this fiber
    witness->follows(Witness::kCaller, self->witnessed_[self->running_->number]);
  }
  self->running_->ended = true;
  self->switch_to_next();
}

void Schedule::note_join(u64 fiber) const {
  if (witness != nullptr) {
    witness->follows(witness->running(), witnessed_[fiber]);
  }
}

bool Schedule::may_go_on(const Fiber& fiber) const {
  return !fiber.ended && !fiber.stopped && fiber.held_until_ns <= now_ns_;
}

Schedule::Fiber* Schedule::choose_among(const std::vector<Fiber*>& fibers) {
  if (strategy_ == Strategy::random) {
    return fibers[draw(random_, 0, static_cast<u32>(fibers.size() - 1))];
  }
  return *std::max_element(fibers.begin(), fibers.end(), [](const Fiber* a, const Fiber* b) {
    return a->priority < b->priority;
  });
}

bool Schedule::act_devices(bool all_wait) {
  bool more = false;
  for (Device* device : devices_) {
    more = device->act(random_, all_wait) || more;
  }
  return more;
}

Schedule::Fiber* Schedule::choose() {
  const auto first_ended = std::stable_partition(fibers_.begin(), fibers_.end(),
                                                 [](const auto& fiber) { return !fiber->ended; });
  std::move(first_ended, fibers_.end(), std::back_inserter(ended_));
  fibers_.erase(first_ended, fibers_.end());
  for (;;) {
    candidates_.clear();
    bool any_left = false;
    for (const auto& fiber : fibers_) {
      any_left = any_left || (!fiber->ended && !fiber->stopped);
      if (may_go_on(*fiber) && !fiber->resting) {
        candidates_.push_back(fiber.get());
      }
    }
    if (!any_left) {
      return nullptr;
    }
    if (!candidates_.empty()) {
      if (early_looks_ < kEarlyLooksMost && draw(random_, 1, wake_one_in_) == 1) {
        fibers_[draw(random_, 0, static_cast<u32>(fibers_.size() - 1))]->resting = false;
        ++early_looks_;
      }
      return choose_among(candidates_);
    }
    if (!act_devices(true)) {
      now_ns_ += kTickNs;  // all have looked, and nothing has come since
    }
    early_looks_ = 0;
    for (const auto& fiber : fibers_) {
      fiber->resting = false;
    }
  }
}

void Schedule::switch_to_next() {
  Fiber* const before = running_;
  running_ = choose();
  if (running_ == before) {
    return;
  }
  ++switches_;
  if (witness != nullptr) {
    witness->goes_on(running_ == nullptr ? Witness::kCaller : witnessed_[running_->number]);
  }
  ucontext_t* const to = running_ == nullptr ? &main_ : &running_->context;
  if (before == nullptr) {
    swapcontext(&main_, to);
  } else {
    swapcontext(&before->context, to);
  }
}

bool Schedule::run(u64 points) {
  points_most_ = points_ + points;
  Interposer* const outer = interposer;
  interposer = this;
  switch_to_next();
  interposer = outer;
  return points_ <= points_most_;
}

void Schedule::stop(u32 group) {
  for (const auto& fiber : fibers_) {
    fiber->stopped = fiber->stopped || fiber->group == group;
  }
}

void Schedule::hold(u32 group, u64 until_ns) {
  for (const auto& fiber : fibers_) {
    if (fiber->group == group) {
      fiber->held_until_ns = until_ns;
    }
  }
}

void Schedule::release() {
  for (const auto& fiber : fibers_) {
    fiber->held_until_ns = 0;
  }
}

void Schedule::at_access() {
  ++points_;
  if (running_ == nullptr) {
    return;  // an access of the caller's, before or after the run
  }
  if (points_ > points_most_) {
    for (const auto& fiber : fibers_) {
      fiber->stopped = true;
    }
  }
  constexpr u32 kDevicesOneIn = 4;
  if (!devices_.empty() && draw(random_, 1, kDevicesOneIn) == 1) {
    act_devices(false);
  }
  const bool stopped = !may_go_on(*running_);  // by a device
  if (draw(random_, 1, switch_one_in_) == 1 || stopped) {
    running_->priority = strategy_ == Strategy::priority ? random_() >> 32 : 0;
    switch_to_next();
  }
}

bool Schedule::at_pause() {
  if (running_ == nullptr) {
    return false;
  }
  running_->resting = true;
  switch_to_next();
  return true;
}

void FiberCrew::start() {
  fibers_.clear();
  for (u32 i = 0; i < workers_; ++i) {
    fibers_.push_back(schedule_.spawn(group_, [this, i] { share_(i); }));
  }
}

void FiberCrew::join() {
  const auto all_ended = [this] {
    return std::all_of(fibers_.begin(), fibers_.end(),
                       [this](u64 fiber) { return schedule_.ended(fiber); });
  };
  while (!all_ended()) {
    schedule_.at_pause();
  }
  for (const u64 fiber : fibers_) {
    schedule_.note_join(fiber);
  }
}

}  // namespace moeos::twin
