// A rank of the twin: its memory, its workers, and one forward call.
//
// The caller is the OS block; each processor is a worker of the crew. May not know: Python, how
// ranks found each other, whether workers are threads.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/shape.hpp"
#include "kernels/twin/crew.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/geometry.hpp"
#include "runtime/memory.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/rank.hpp"

namespace moeos::twin {

struct TwinSettings {
  u64 deadline_ns;
  bool split_os;     // a thread for each warp of the OS block, instead of one for all
  double jitter_us;  // random delays up to this at atomic accesses; 0: none
  u64 jitter_seed;
  u32 ranks_per_node;  // peers of other nodes are remote
  FaultPlan faults = {};
};

class TwinRank {
 public:
  /// heaps[p]: rank p's symmetric heap as mapped here, zeroed before the first call of any rank.
  /// Its actors run on threads, unless `make_crew` makes something else; its puts are done at once,
  /// unless there is a `nic`. Throws std::system_error if there is no memory or no thread for it.
  TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank, std::vector<u8*> heaps,
           const TwinSettings& settings, const MakeCrew& make_crew = {}, Nic* nic = nullptr);
  ~TwinRank();
  TwinRank(const TwinRank&) = delete;
  TwinRank& operator=(const TwinRank&) = delete;

  /// Runs one call and returns when this rank's part in it is over. The failure's kind is `none`
  /// when all went well; after any other, only reset() makes the rank usable again. `must_leave` is
  /// asked now and then while this thread waits, soon after a signal has come to it; once it says
  /// so, this rank and its peers are made to leave, and it is asked no more.
  Failure forward(const Operands& operands, u32 tokens, u32 pair_limit,
                  const std::function<bool()>& must_leave = {});

  /// Makes every actor of this rank and, best effort, of its peers leave. From any thread.
  void abort();

  /// Clears the heap and the memory, but for what goes wrong from now on. Collective: between two
  /// barriers of all ranks, and no call running.
  void reset(const FaultPlan& faults = {});

  std::vector<u32> rows_sent() const;                // [peer]
  std::vector<u32> rows_received(u32 source) const;  // [local expert]
  u32 epoch() const { return *rank_.memory.epoch; }
  const RankMemory& memory() const { return rank_.memory; }
  const Geometry& geometry() const { return geometry_; }

 private:
  struct CallInFlight {
    Call call;
    const Operands* operands;
  };

  void do_share(u32 worker);
  void install_jitter(u32 thread_index, u32 epoch);
  u32 workers() const;

  struct Unmap {
    u64 bytes = 0;
    void operator()(u8* memory) const;
  };
  using Mapped = std::unique_ptr<u8, Unmap>;
  static Mapped map_zeroed(u64 bytes);

  Geometry geometry_;
  LayerShape shape_;
  TwinSettings settings_;
  std::vector<u8*> heaps_;
  Mapped own_memory_;
  Mapped os_memory_;
  OsMemory os_;
  Mapped intermediate_;
  Rank<Machine> rank_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::atomic_flag calling_;
  std::optional<CallInFlight> in_flight_;  // crew_ orders it
  pid_t process_ = getpid();               // of the crew's threads
  std::unique_ptr<Crew> crew_;             // the last, so that its workers end first
};

}  // namespace moeos::twin
