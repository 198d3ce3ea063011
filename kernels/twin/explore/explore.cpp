// SPDX-License-Identifier: Apache-2.0
// Small worlds under a schedule. See explore.hpp.
#include "kernels/twin/explore/explore.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "kernels/twin/explore/gradient_world.hpp"
#include "kernels/twin/explore/hostile_nic.hpp"
#include "kernels/twin/explore/random_world.hpp"

namespace moeos::twin {

namespace {

constexpr u32 kCalls = 3;
constexpr u64 kPointsMost = 20'000'000;  // of a run; the longest runs seen take a tenth of it

/// A world whose experts may be cut into slices, and whose calls may be gradient calls.
RandomWorld draw_explored(Random& random, bool gradients) {
  RandomWorld world = draw_world(random, WorldScale::fibers);
  draw_slices(random, world, 1);
  if (gradients) {
    make_gradient_world(world);
  }
  return world;
}

/// A word that peers or actors write, and the bits to flip in it.
struct Damage {
  std::string what;
  u8* word;
  u32 bytes;
  u64 flip;
};

/// A fault that happens once, at an access drawn beforehand.
class Fault : public Device {
 public:
  Fault(Schedule& schedule, Scenario scenario, const RandomWorld& world, u64 at)
      : schedule_(schedule), scenario_(scenario), world_(world), at_(at) {}

  void watch(std::vector<std::unique_ptr<TwinRank>>& ranks, const Heaps& heaps) {
    ranks_ = &ranks;
    heaps_ = &heaps;
  }

  bool act(Random& random, bool) override {
    const bool none = scenario_ < Scenario::die || scenario_ == Scenario::late;
    if (happened_ || none || schedule_.points() < at_) {
      return false;
    }
    happened_ = true;
    at_ns_ = schedule_.now_ns();
    rank_ = draw(random, 0, world_.geometry.ranks() - 1);
    std::ostringstream said;
    if (scenario_ == Scenario::die) {
      schedule_.stop(rank_);
      said << "rank " << rank_ << " stops";
    } else if (scenario_ == Scenario::stall) {
      const u64 ns = draw(random, 1, 3 * static_cast<u32>(world_.settings.deadline_ns));
      schedule_.hold(rank_, at_ns_ + ns);
      said << "rank " << rank_ << " stands still for " << ns << " ns";
    } else {
      const Damage damage = choose(random);
      for (u32 i = 0; i < damage.bytes; i += sizeof(u32)) {
        std::atomic_ref<u32>(*reinterpret_cast<u32*>(damage.word + i))
            .fetch_xor(static_cast<u32>(damage.flip >> (8 * i)));
      }
      said << damage.what << " of rank " << rank_ << ", bits " << std::hex << damage.flip;
    }
    said << " at access " << std::dec << schedule_.points();
    text_ = said.str();
    return false;
  }

  bool happened() const { return happened_; }
  u32 rank() const { return rank_; }
  u64 at_ns() const { return at_ns_; }
  const std::string& text() const { return text_; }

 private:
  Damage choose(Random& random) {
    const Geometry& g = world_.geometry;
    const Layout layout(g);
    const RankMemory& memory = (*ranks_)[rank_]->memory();
    u8* const heap = heaps_->addresses()[rank_];
    const u32 source = draw(random, 0, g.world - 1);
    const u32 chunk = draw(random, 0, g.chunks() - 1);
    // One bit, or any of them.
    const u64 bits = draw(random, 0, 1) == 0 ? u64{1} << draw(random, 0, 63) : random();
    const u64 low = static_cast<u32>(bits) != 0 ? static_cast<u32>(bits) : bits >> 32;
    const auto early = [&](u64 count) {  // entries that are used first are used most
      return static_cast<u32>(random() % (1 + random() % count));
    };
    const u32 least = g.tells_bases() ? 0 : 1;
    switch (draw(random, least, g.deduplicates_any() ? 9 : 6)) {
      case 0:
        return Damage{"a base of results", heap + layout.base(draw(random, 0, 1), source),
                      sizeof(u64), bits};
      case 1:
        return Damage{
            "a count",
            heap + layout.count(draw(random, 0, 1), source, draw(random, 0, g.local_experts() - 1)),
            sizeof(u64), bits};
      case 2:
        return Damage{"an arrival flag", heap + layout.arrived(source, chunk), sizeof(u32), low};
      case 3:
        return Damage{"a credit", heap + layout.returned(source, chunk), sizeof(u32), low};
      case 4: {
        const auto kind = static_cast<TaskKind>(draw(random, 2, 4));  // a GEMM, or Dispatch
        const MailboxView mailbox = kind == TaskKind::dispatch
                                        ? MailboxView{memory.dispatch_list, g.dispatch_parts_max()}
                                        : memory.mailbox(kind);
        return Damage{
            kind == TaskKind::dispatch ? "a word of the list of Dispatch" : "a mailbox word",
            reinterpret_cast<u8*>(&mailbox.words[early(mailbox.capacity)]), sizeof(u64), bits};
      }
      case 5:
        return Damage{"a ring word",
                      reinterpret_cast<u8*>(&memory.ring[early(memory.ring_slots())]), sizeof(u64),
                      bits};
      case 7:
        return Damage{"an origin", heap + layout.origin(source, early(g.origins())), sizeof(u32),
                      low};
      case 8:
        return Damage{"a word of the list of chunks to complete",
                      reinterpret_cast<u8*>(&memory.replication_list[early(g.replications_max())]),
                      sizeof(u64), bits};
      case 9:
        return Damage{"a replicated chunk's flag",
                      reinterpret_cast<u8*>(memory.replicated_flag(source, chunk)), sizeof(u32),
                      low};
      default: {
        const u32 task = minimum(early(8), g.tiles_max() - 1);
        constexpr u32 kHeaderWords = 10;
        const u32 word = draw(random, 0, kHeaderWords + 5);  // a word of the first segments, or not
        const u32 offset = word < kHeaderWords ? 4 * word
                                               : static_cast<u32>(offsetof(Task, segments)) +
                                                     4 * (word - kHeaderWords);
        return Damage{"a descriptor", reinterpret_cast<u8*>(&memory.tasks[task]) + offset,
                      sizeof(u32), low};
      }
    }
  }

  Schedule& schedule_;
  Scenario scenario_;
  const RandomWorld& world_;
  u64 at_;
  std::vector<std::unique_ptr<TwinRank>>* ranks_ = nullptr;
  const Heaps* heaps_ = nullptr;
  bool happened_ = false;
  u32 rank_ = 0;
  u64 at_ns_ = 0;
  std::string text_ = "no fault";
};

/// A world, its calls, and their outcome.
class Run {
 public:
  Run(u64 seed, Strategy strategy, Scenario scenario)
      : random_(seed),
        gradients_(scenario == Scenario::backward),
        scenario_(gradients_ ? static_cast<Scenario>(seed % static_cast<u32>(Scenario::backward))
                             : scenario),
        world_(draw_explored(random_, gradients_)),
        experts_(draw_experts(random_, world_)),
        heaps_(world_.geometry),
        schedule_(seed, strategy),
        fault_(schedule_, scenario_, world_, draw(random_, 0, kFaultAtMost)) {
    const Geometry& g = world_.geometry;
    schedule_.attach(&fault_);
    failures_.resize(g.ranks());
    failed_at_ns_.resize(g.ranks());
    const bool with_nic =
        scenario_ == Scenario::nic || (scenario_ != Scenario::quiet && draw(random_, 0, 1) == 1);
    calls_ = draw_calls(random_, world_, kCalls);
    if (gradients_) {
      call_gradients_ = draw_gradients(random_, world_, calls_);
    }
    for (u32 p = 0; p < g.ranks(); ++p) {
      Nic* nic = nullptr;
      if (with_nic) {
        nics_.push_back(
            std::make_unique<HostileNic>(heaps_.addresses(), u64{g.window()} * g.row_bytes));
        schedule_.attach(nics_.back().get());
        nic = nics_.back().get();
      }
      const auto make_crew = [this, p](u32 workers, std::function<void(u32)> share) {
        return std::make_unique<FiberCrew>(schedule_, p, workers, std::move(share));
      };
      ranks_.push_back(std::make_unique<TwinRank>(g, world_.shape, holder_of(world_, p),
                                                  heaps_.addresses(), settings_of(world_, p),
                                                  make_crew, nic));
    }
    fault_.watch(ranks_, heaps_);
  }

  Outcome go() {
    make_calls();
    first_failed_ = failed();
    if (wrong_.empty() && first_failed_ > 0 && scenario_ != Scenario::die) {
      begin_again();
    }
    Outcome outcome{};
    outcome.wrong = wrong_;
    outcome.world = world_.geometry.ranks();
    outcome.calls = right_;
    outcome.failed = first_failed_;
    outcome.kinds = kinds_;
    outcome.points = schedule_.points();
    outcome.switches = schedule_.switches();
    outcome.latency_ns = latency_ns_;
    outcome.deadline_ns = world_.settings.deadline_ns;
    outcome.happened = fault_.happened();
    outcome.fault = fault_.text();
    return outcome;
  }

 private:
  static constexpr u32 kFaultAtMost = 6'000;  // accesses; half of the runs are longer

  bool dead(u32 rank) const {
    return scenario_ == Scenario::die && fault_.happened() && fault_.rank() == rank;
  }

  u32 failed() const {
    u32 count = 0;
    for (const Failure& failure : failures_) {
      count += failure.kind != FailureKind::none ? 1 : 0;
    }
    return count;
  }

  void complain(u32 rank, const std::string& what) {
    std::ostringstream said;
    said << "rank " << rank << ' ' << what << " (" << fault_.text() << ')';
    wrong_ = wrong_.empty() ? said.str() : wrong_;
  }

  /// Makes all ranks' calls, one after the other and without a barrier.
  void make_calls() {
    const u32 world = world_.geometry.ranks();
    std::vector<u32> made(world, 0);
    sums_.clear();
    for (u32 p = 0; p < world; ++p) {
      sums_.push_back(no_sums(world_, experts_, p));
    }
    right_sums_ = no_sums(experts_);
    for (u32 p = 0; p < world; ++p) {
      failures_[p] = Failure{};
      schedule_.spawn(p, [this, p, &made] {
        for (u32 number = 0; number < kCalls; ++number) {
          RankCall& call = calls_[p][number];
          be_late(p);
          std::fill(call.out.begin(), call.out.end(), NAN);
          Operands operands = operands_of(world_, experts_, p, call);
          GradientOperands its{};
          if (gradients_) {
            its = gradients_of(world_, call_gradients_[p][number], sums_[p]);
            operands.gradients = &its;
          }
          failures_[p] = ranks_[p]->forward(operands, call.tokens, world_.geometry.capacity);
          if (failures_[p].kind != FailureKind::none) {
            failed_at_ns_[p] = schedule_.now_ns();
            return;
          }
          ++made[p];
        }
      });
    }
    if (!schedule_.run(kPointsMost)) {
      complain(0, "or another does not end");
      return;
    }
    for (u32 p = 0; p < world; ++p) {
      judge(p, made[p]);
      if (!nics_.empty() && nics_[p]->refused() > 0) {
        complain(p, "puts more than a window");
      }
    }
    if (gradients_ && std::ranges::all_of(made, [](u32 calls) { return calls == kCalls; })) {
      const double error = error_of_sums(world_, experts_, sums_, right_sums_);
      if (!(error < kErrorMost)) {
        complain(0, "or another gives a wrong result of weights, error " + std::to_string(error));
      }
    }
  }

  /// In a rank's fiber, before a call: now and then delays its beginning.
  void be_late(u32 rank) {
    if (scenario_ == Scenario::late && draw(random_, 0, 2) == 0) {
      const u64 most_ns = world_.settings.deadline_ns / 10;
      schedule_.hold(rank, schedule_.now_ns() + draw(random_, 1, static_cast<u32>(most_ns)));
      schedule_.at_pause();
    }
  }

  /// Judges a rank's calls, of which the first `made` ended well.
  void judge(u32 rank, u32 made) {
    for (u32 call = 0; call < made; ++call) {
      const double error = gradients_ ? error_of_call(world_, experts_, rank, calls_[rank][call],
                                                      call_gradients_[rank][call], right_sums_)
                                      : largest_error(world_, experts_, calls_[rank][call], rank);
      if (!(error < kErrorMost)) {
        complain(rank, "gives a wrong result in call " + std::to_string(call + 1) + ", error " +
                           std::to_string(error));
      }
      ++right_;
    }
    const Failure& failure = failures_[rank];
    if (dead(rank) || (made == kCalls && failure.kind == FailureKind::none)) {
      return;
    }
    const auto kind = static_cast<u32>(failure.kind);
    if (failure.kind == FailureKind::none) {
      complain(rank, "neither makes its calls nor fails");
    } else if (!fault_.happened()) {
      complain(rank, "fails with kind " + std::to_string(kind) + " without a fault");
    } else {
      kinds_ |= u64{1} << kind;
      if (scenario_ == Scenario::damage || rank != fault_.rank()) {
        latency_ns_ = maximum(latency_ns_, failed_at_ns_[rank] - fault_.at_ns());
      }
      if (scenario_ == Scenario::die && failure.peer != fault_.rank()) {
        complain(rank, "fails with kind " + std::to_string(kind) + " and names rank " +
                           std::to_string(static_cast<i32>(failure.peer)));
      }
    }
  }

  /// After a failure resets all ranks, makes the same calls again, and expects them to be right.
  void begin_again() {
    schedule_.release();
    for (const auto& nic : nics_) {
      nic->quiet();
    }
    for (const auto& rank : ranks_) {
      rank->reset();
    }
    make_calls();
    if (wrong_.empty() && failed() > 0) {
      complain(0, "or another fails after a reset");
    }
  }

  Random random_;
  bool gradients_;  // calls are gradient calls
  Scenario scenario_;
  RandomWorld world_;
  Experts experts_;
  Heaps heaps_;
  Schedule schedule_;
  Fault fault_;
  std::vector<std::unique_ptr<HostileNic>> nics_;
  std::vector<std::vector<RankCall>> calls_;
  std::vector<std::vector<CallGradients>> call_gradients_;
  std::vector<WeightSums<float>> sums_;
  WeightSums<double> right_sums_;
  std::vector<Failure> failures_;
  std::vector<u64> failed_at_ns_;
  std::vector<std::unique_ptr<TwinRank>> ranks_;
  std::string wrong_;
  u32 right_ = 0;
  u32 first_failed_ = 0;  // before a reset
  u64 kinds_ = 0;
  u64 latency_ns_ = 0;
};

}  // namespace

Outcome explore(u64 seed, Strategy strategy, Scenario scenario) {
  return Run(seed, strategy, scenario).go();
}

}  // namespace moeos::twin
