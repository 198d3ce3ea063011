// SPDX-License-Identifier: Apache-2.0
// A rank of the twin: its memory, its workers, and one call. See forward.hpp.
#include "kernels/twin/forward.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "kernels/twin/gradients.hpp"
#include "kernels/twin/kernels.hpp"
#include "kernels/twin/weight_gradients.hpp"
#include "runtime/actors/os.hpp"
#include "runtime/actors/warp_processor.hpp"

namespace moeos::twin {

static_assert(Platform<Machine>);
static_assert(Kernels<TwinKernels>);
static_assert(Kernels<GradientKernels>);
static_assert(SlicedKernels<TwinKernels> && SlicedKernels<GradientKernels>);

namespace {

/// Sleeps now and then at an atomic access, so that actors meet in orders that a quiet machine
/// never shows.
class Jitter : public Interposer {
 public:
  Jitter(double longest_us, u64 seed) : random_(seed), longest_us_(longest_us) {}

  void at_access() override {
    constexpr u32 kOneIn = 64;
    if (random_() % kOneIn != 0) {
      return;
    }
    const double us = std::uniform_real_distribution<double>(0.0, longest_us_)(random_);
    const timespec nap{0, static_cast<long>(us * 1000.0)};
    nanosleep(&nap, nullptr);
  }

 private:
  std::mt19937_64 random_;
  double longest_us_;
};

/// Asks whether a call must be left: at once when a signal has ended a nap of this thread,
/// otherwise now and then, since a signal may come between two naps.
class Onlooker : public Bystander {
 public:
  Onlooker(const std::function<bool()>& must_leave, const Rank<Machine>& rank, const Call& call)
      : must_leave_(must_leave), rank_(rank), call_(call), asked_ns_(Machine::now_ns()) {}

  void at_nap(bool woken) override {
    constexpr u64 kBetweenNs = 50'000'000;
    if (!must_leave_ || left_ || (!woken && Machine::now_ns() - asked_ns_ < kBetweenNs)) {
      return;
    }
    left_ = must_leave_();
    asked_ns_ = Machine::now_ns();
    if (left_) {
      rank_.fail(failure_of(rank_, call_, FailureKind::interrupted, Actor::host));
    }
  }

 private:
  const std::function<bool()>& must_leave_;
  const Rank<Machine>& rank_;
  const Call& call_;
  u64 asked_ns_;
  bool left_ = false;
};

class ClearAtEnd {
 public:
  explicit ClearAtEnd(std::atomic_flag& flag) : flag_(flag) {}
  ~ClearAtEnd() { flag_.clear(std::memory_order_relaxed); }
  ClearAtEnd(const ClearAtEnd&) = delete;
  ClearAtEnd& operator=(const ClearAtEnd&) = delete;

 private:
  std::atomic_flag& flag_;
};

}  // namespace

void Unmap::operator()(u8* memory) const { munmap(memory, bytes); }

Mapped map_zeroed(u64 bytes) {
  const u64 some = maximum(bytes, u64{1});  // there is no mapping of 0 bytes
  void* memory = mmap(nullptr, some, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "mapping " + std::to_string(some) + " bytes");
  }
  return Mapped(static_cast<u8*>(memory), Unmap{some});
}

TwinShared::TwinShared(u32 rank, std::vector<u8*> heaps, u64 heap_bytes, u64 control_bytes,
                       u64 between_bytes, const MakeCrew& make_crew, Nic* nic)
    : rank_(rank),
      heaps_(std::move(heaps)),
      heap_bytes_(heap_bytes),
      control_(map_zeroed(control_bytes)),
      control_bytes_(control_bytes),
      between_(map_zeroed(between_bytes)),
      make_crew_(make_crew),
      nic_(nic) {}

TwinShared::~TwinShared() {
  if (getpid() != process_) {
    // A fork has copied the crew without its threads, which cannot be joined: leave it alone.
    static_cast<void>(crew_.release());
  }
}

TwinRecords::TwinRecords(const Geometry& geometry, const FaultPlan& faults, PlaceTable table)
    : geometry_(geometry),
      table_(std::move(table)),
      memory_(map_zeroed(RankMemory::bytes_of_parts(geometry).records)) {
  *memory().faults = faults;
  write_table();
}

void TwinRecords::place(PlaceTable table) {
  table_ = std::move(table);
  write_table();
}

void TwinRecords::clear(const FaultPlan& faults) {
  std::memset(base(), 0, bytes());
  *memory().faults = faults;
  write_table();
}

void TwinRecords::write_table() {
  const RankMemory its = memory();
  std::copy(table_.from.begin(), table_.from.end(), its.places_from);
  std::copy(table_.places.begin(), table_.places.end(), its.places);
}

std::vector<u32> TwinRecords::rows_sent() const {
  std::vector<u32> rows;
  for (u32 peer = 0; peer < geometry_.world; ++peer) {
    rows.push_back(memory().rows_sent(peer));
  }
  return rows;
}

std::vector<u32> TwinRecords::rows_received(u32 source) const {
  const RankMemory its = memory();
  const u32* starts = its.receive_starts(source);
  std::vector<u32> rows;
  for (u32 expert = 0; expert < geometry_.local_experts(); ++expert) {
    rows.push_back(starts[expert + 1] - starts[expert]);
  }
  return rows;
}

namespace {

/// Heaps in the given order, or unchanged if there is none.
std::vector<u8*> heaps_of(const std::vector<u8*>& heaps, const std::vector<u32>& order) {
  std::vector<u8*> ordered;
  for (const u32 rank : order) {
    ordered.push_back(heaps[rank]);
  }
  return order.empty() ? heaps : ordered;
}

}  // namespace

TwinRank::TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank,
                   const HeapPlace& place, std::shared_ptr<TwinShared> shared,
                   const TwinSettings& settings)
    : geometry_(geometry),
      shape_(shape),
      settings_(settings),
      shared_(std::move(shared)),
      tables_(map_zeroed(RankMemory::bytes_of_parts(geometry).tables)),
      os_memory_(map_zeroed(OsMemory::bytes(geometry))),
      coded_rows_(
          map_zeroed(shape.codes_rows() ? u64{geometry.max_tokens} * geometry.sent_bytes : u64{0})),
      peers_(heaps_of(shared_->heaps_, settings.peers)),
      rank_{Machine(peers_.data(), rank, settings.ranks_per_node, shared_->nic_),
            Layout(geometry_, place),
            memory_of(nullptr),
            OsMemory(geometry_, os_memory_.get()),
            peers_[rank],
            rank,
            settings.deadline_ns,
            settings.slice},
      places_(map_zeroed(settings.gradients ? u64{rank_.layout.rows()} * sizeof(u32) : u64{0})) {
  // Kept rows are read when the call is over.
  MOEOS_CHECK(!settings.gradients || (!geometry.reuses_places() && !geometry.rings_cells()));
  if (*rank_.memory.epoch == 0) {
    *rank_.memory.epoch = 1;
  }
  for (u32 i = 0; i < geometry.processors; ++i) {
    scratch_.push_back(std::make_unique<Scratch>(geometry, shape));
    if (settings.gradients) {
      gradient_scratch_.push_back(std::make_unique<GradientScratch>(geometry, shape));
    }
  }
  if (!shared_->crew_) {
    const auto share = [its = shared_.get()](u32 worker) { its->share_(worker); };
    shared_->crew_ = shared_->make_crew_ ? shared_->make_crew_(workers(), share)
                                         : std::make_unique<ThreadCrew>(workers(), share);
  }
}

TwinRank::TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank,
                   std::vector<u8*> heaps, const TwinSettings& settings, const MakeCrew& make_crew,
                   Nic* nic)
    : TwinRank(geometry, shape, rank, Layout::alone(geometry),
               std::make_shared<TwinShared>(settings.peers.empty() ? rank : settings.peers[rank],
                                            std::move(heaps), Layout(geometry).bytes(),
                                            RankMemory::bytes_of_parts(geometry).control,
                                            geometry.between_bytes(), make_crew, nic),
               settings) {
  own_records_ = std::make_unique<TwinRecords>(geometry, settings.faults, settings.table);
  rank_.memory = memory_of(own_records_.get());
}

RankMemory TwinRank::memory_of(const TwinRecords* records) const {
  return {geometry_,
          {shared_->control_.get(), tables_.get(), records == nullptr ? nullptr : records->base()}};
}

u32 TwinRank::workers() const {
  const Geometry& geometry = rank_.geometry();
  return geometry.processors + (settings_.split_os ? os_warps<Machine>(geometry) - 1 : 0);
}

void TwinRank::install_jitter(u32 thread_index, u32 epoch) {
  if (settings_.jitter_us > 0.0) {
    thread_local std::unique_ptr<Jitter> jitter;
    const u64 rank = rank_.everywhere(rank_.rank);
    std::seed_seq seed{settings_.jitter_seed, rank, u64{thread_index}, u64{epoch}};
    u32 drawn[1];
    seed.generate(drawn, drawn + 1);
    jitter = std::make_unique<Jitter>(settings_.jitter_us, drawn[0]);
    interposer = jitter.get();
  }
}

void TwinRank::do_share(u32 worker) {
  const u32 processors = rank_.geometry().processors;
  const CallInFlight job = *in_flight_;
  install_jitter(worker + 1, job.call.epoch);
  u8* between = shared_->between_.get();
  if (worker >= processors) {
    run_os_warp(job.rank, job.call, worker - processors + 1);
  } else if (settings_.gradients) {
    GradientKernels kernels(job.rank, job.call, shape_, *job.operands, between, places(),
                            *scratch_[worker], *gradient_scratch_[worker]);
    run_processor(job.rank, job.call, kernels, worker);
  } else {
    TwinKernels kernels(job.rank, job.call, shape_, *job.operands, between, coded_rows_.get(),
                        *scratch_[worker]);
    run_processor(job.rank, job.call, kernels, worker);
  }
}

void TwinRank::add_weight_gradients(const Rank<Machine>& rank, const Operands& operands) {
  shared_->share_ = [&](u32 worker) {
    const u32 processors = rank.geometry().processors;
    if (worker < processors) {
      WeightGradients(rank, shape_, operands, shared_->between_.get(), places(),
                      *gradient_scratch_[worker])
          .add(worker, processors);
    }
  };
  shared_->crew_->start();
  shared_->crew_->join();
}

Failure TwinRank::forward(const Operands& operands, u32 tokens, u32 pair_limit,
                          const std::function<bool()>& must_leave) {
  return forward(*own_records_, operands, tokens, pair_limit, 0, 0, must_leave);
}

Failure TwinRank::forward(TwinRecords& records, const Operands& operands, u32 tokens,
                          u32 pair_limit, u32 identity, u32 inputs,
                          const std::function<bool()>& must_leave) {
  const Geometry& geometry = rank_.geometry();
  MOEOS_CHECK(settings_.gradients == (operands.gradients != nullptr));
  // Publishes nothing: the order of the callers' threads orders calls.
  if (shared_->calling_.test_and_set(std::memory_order_relaxed)) {
    // The call that is running may end well: its state must not be touched.
    return failure_of(rank_, Call{}, FailureKind::calls_at_once, Actor::host);
  }
  const ClearAtEnd clear(shared_->calling_);
  Rank<Machine> mine = rank_;
  mine.memory = memory_of(&records);
  take_in_failures<Machine>(mine.layout, mine.heap);
  if (mine.leaving(*mine.memory.epoch)) {
    return first_failure<Machine>(mine.layout, mine.heap);
  }
  const bool may_be_unsent =
      operands.topk_ids != nullptr || pair_limit < geometry.max_tokens || shape_.zero_experts > 0;
  const Call call{*mine.memory.epoch,
                  tokens,
                  pair_limit,
                  may_be_unsent ? 1U : 0U,
                  identity,
                  inputs,
                  operands.leaves_partials ? 1U : 0U};
  begin_call(mine, call);
  in_flight_ = CallInFlight{mine, call, &operands};
  shared_->share_ = [this](u32 worker) { do_share(worker); };
  shared_->crew_->start();
  Interposer* const before = interposer;
  install_jitter(0, call.epoch);
  Onlooker onlooker(must_leave, mine, call);
  bystander = &onlooker;
  if (settings_.split_os) {
    run_os_warp(mine, call, 0);
  } else {
    run_os_block(mine, call);
  }
  bystander = nullptr;
  interposer = before;
  shared_->crew_->join();
  in_flight_.reset();
  // The epoch moves on only when the call has ended well; a peer's later failure belongs to the
  // next call.
  if (*mine.memory.epoch == call.epoch) {
    return first_failure<Machine>(mine.layout, mine.heap);
  }
  if (settings_.gradients) {
    add_weight_gradients(mine, operands);
  }
  return Failure{};
}

void TwinRank::abort(bool interrupted) {
  Call last{};  // an interrupted call has its number; a host that gives up aborts every call
  if (interrupted) {
    last.epoch = *rank_.memory.epoch - 1;
  }
  const FailureKind kind = interrupted ? FailureKind::interrupted : FailureKind::host_abort;
  Failure failure = failure_of(rank_, last, kind, Actor::host);
  rank_.fail(failure);
  put_own_failure(rank_.platform, rank_.layout, rank_.heap, rank_.memory.failure_put(), rank_.rank);
}

Failure TwinRank::failure() const { return first_failure<Machine>(rank_.layout, rank_.heap); }

void TwinShared::clear() {
  std::memset(heaps_[rank_], 0, heap_bytes_);
  std::memset(control_.get(), 0, control_bytes_);
}

void TwinRank::clear() {
  std::memset(tables_.get(), 0, tables_.get_deleter().bytes);
  std::memset(os_memory_.get(), 0, os_memory_.get_deleter().bytes);
  *rank_.memory.epoch = 1;
}

void TwinRank::reset(const FaultPlan& faults) {
  shared_->clear();
  clear();
  own_records_->clear(faults);
}

}  // namespace moeos::twin
