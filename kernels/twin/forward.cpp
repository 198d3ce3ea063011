// A rank of the twin: its memory, its workers, and one forward call. See forward.hpp.
#include "kernels/twin/forward.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <system_error>

#include "kernels/twin/kernels.hpp"
#include "runtime/lone_warp.hpp"
#include "runtime/os.hpp"

namespace moeos::twin {

static_assert(Platform<Machine>);
static_assert(Kernels<TwinKernels>);

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

/// Asks whether a call is to be left: at once when a signal has ended a nap of this thread, else
/// now and then, since a signal may come between two naps.
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

void TwinRank::Unmap::operator()(u8* memory) const { munmap(memory, bytes); }

TwinRank::Mapped TwinRank::map_zeroed(u64 bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "mapping " + std::to_string(bytes) + " bytes");
  }
  return Mapped(static_cast<u8*>(memory), Unmap{bytes});
}

TwinRank::TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank,
                   std::vector<u8*> heaps, const TwinSettings& settings, const MakeCrew& make_crew,
                   Nic* nic)
    : geometry_(geometry),
      shape_(shape),
      settings_(settings),
      heaps_(std::move(heaps)),
      own_memory_(map_zeroed(RankMemory::bytes(geometry))),
      os_memory_(map_zeroed(OsMemory::bytes(geometry))),
      os_(geometry_, os_memory_.get()),
      intermediate_(map_zeroed(u64{geometry.intermediate_rows_max()} * geometry.hidden_bytes)),
      rank_{Machine(heaps_.data(), rank, settings.ranks_per_node, nic),
            Layout(geometry_),
            RankMemory(geometry_, own_memory_.get()),
            &os_,
            heaps_[rank],
            rank,
            settings.deadline_ns} {
  *rank_.memory.epoch = 1;
  *rank_.memory.faults = settings.faults;
  for (u32 i = 0; i < geometry.processors; ++i) {
    scratch_.push_back(std::make_unique<Scratch>(geometry, shape));
  }
  const auto share = [this](u32 worker) { do_share(worker); };
  crew_ = make_crew ? make_crew(workers(), share) : std::make_unique<ThreadCrew>(workers(), share);
}

TwinRank::~TwinRank() {
  if (getpid() != process_) {
    // A fork has copied the crew without its threads, which nobody could join: it is left alone.
    static_cast<void>(crew_.release());
  }
}

u32 TwinRank::workers() const {
  const Geometry& geometry = rank_.geometry();
  return geometry.processors + (settings_.split_os ? os_warps<Machine>(geometry) - 1 : 0);
}

void TwinRank::install_jitter(u32 thread_index, u32 epoch) {
  if (settings_.jitter_us > 0.0) {
    thread_local std::unique_ptr<Jitter> jitter;
    std::seed_seq seed{settings_.jitter_seed, u64{rank_.rank}, u64{thread_index}, u64{epoch}};
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
  if (worker < processors) {
    TwinKernels kernels(rank_, job.call, shape_, *job.operands, intermediate_.get(),
                        *scratch_[worker]);
    run_processor(rank_, job.call, kernels, worker);
  } else {
    run_os_warp(rank_, job.call, worker - processors + 1);
  }
}

Failure TwinRank::forward(const Operands& operands, u32 tokens, u32 pair_limit,
                          const std::function<bool()>& must_leave) {
  const Geometry& geometry = rank_.geometry();
  // Publishes nothing: calls follow each other by whatever orders their threads.
  if (calling_.test_and_set(std::memory_order_relaxed)) {
    // The call that is running may end well: of it nothing is touched.
    return failure_of(rank_, Call{}, FailureKind::calls_at_once, Actor::host);
  }
  const ClearAtEnd clear(calling_);
  take_in_failures<Machine>(rank_.layout, rank_.heap);
  if (rank_.leaving(*rank_.memory.epoch)) {
    return first_failure<Machine>(rank_.layout, rank_.heap);
  }
  const bool may_be_unsent = operands.topk_ids != nullptr || pair_limit < geometry.max_tokens;
  const Call call{*rank_.memory.epoch, tokens, pair_limit, may_be_unsent ? 1U : 0U};
  begin_call(rank_, call);
  in_flight_ = CallInFlight{call, &operands};
  crew_->start();
  Interposer* const before = interposer;
  install_jitter(0, call.epoch);
  Onlooker onlooker(must_leave, rank_, call);
  bystander = &onlooker;
  if (settings_.split_os) {
    run_os_warp(rank_, call, 0);
  } else {
    run_os_block(rank_, call);
  }
  bystander = nullptr;
  interposer = before;
  crew_->join();
  in_flight_.reset();
  // The epoch moves on only when the call has ended well; a peer's later failure belongs to the
  // next call.
  return *rank_.memory.epoch == call.epoch ? first_failure<Machine>(rank_.layout, rank_.heap)
                                           : Failure{};
}

void TwinRank::abort() {
  Failure failure = failure_of(rank_, Call{}, FailureKind::host_abort, Actor::host);
  rank_.fail(failure);
  put_own_failure(rank_.platform, rank_.layout, rank_.heap, rank_.memory.failure_put(), rank_.rank);
}

void TwinRank::reset(const FaultPlan& faults) {
  std::memset(rank_.heap, 0, rank_.layout.bytes());
  std::memset(own_memory_.get(), 0, RankMemory::bytes(rank_.geometry()));
  std::memset(os_memory_.get(), 0, OsMemory::bytes(rank_.geometry()));
  *rank_.memory.epoch = 1;
  *rank_.memory.faults = faults;
}

std::vector<u32> TwinRank::rows_sent() const {
  std::vector<u32> rows;
  for (u32 peer = 0; peer < rank_.geometry().world; ++peer) {
    rows.push_back(rank_.memory.rows_sent(peer));
  }
  return rows;
}

std::vector<u32> TwinRank::rows_received(u32 source) const {
  const u32* starts = rank_.memory.receive_starts(source);
  std::vector<u32> rows;
  for (u32 expert = 0; expert < rank_.geometry().local_experts(); ++expert) {
    rows.push_back(starts[expert + 1] - starts[expert]);
  }
  return rows;
}

}  // namespace moeos::twin
