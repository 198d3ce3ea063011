// SPDX-License-Identifier: Apache-2.0
// A rank of the twin: what its layers share, its workers, and one forward or gradient call.
//
// The caller is the OS block; each processor is a worker of the crew. Must not depend on: Python,
// how ranks found each other, whether workers are threads.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/shape.hpp"
#include "kernels/twin/crew.hpp"
#include "kernels/twin/gradient_rows.hpp"
#include "kernels/twin/operands.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/rank.hpp"
#include "runtime/platform/twin/platform.hpp"
#include "runtime/words/geometry.hpp"

namespace moeos::twin {

/// Where experts are (RankMemory::places_from, places); both empty where the places have the
/// experts' numbers.
struct PlaceTable {
  std::vector<u32> from = {};
  std::vector<u32> places = {};
};

struct TwinSettings {
  u64 deadline_ns;
  bool split_os;     // a thread for each warp of the OS block, instead of one for all
  double jitter_us;  // random delays at atomic accesses, at most this long; 0: none
  u64 jitter_seed;
  u32 ranks_per_node;           // peers of other nodes are remote
  FaultPlan faults = {};        // for a layer that shares nothing
  PlaceTable table = {};        // for a layer that shares nothing: where its experts are
  bool gradients = false;       // its calls are gradient calls
  u32 slice = 0;                // of the experts, where these are sliced
  std::vector<u32> peers = {};  // [Geometry::ranks()], where experts are sliced: the rank of each
                                // peer (Rank::everywhere)
};

/// Zeroed memory of this process, whose pages are allocated when they are first written.
struct Unmap {
  u64 bytes = 0;
  void operator()(u8* memory) const;
};
using Mapped = std::unique_ptr<u8, Unmap>;
/// Throws std::system_error if there is no memory.
Mapped map_zeroed(u64 bytes);

/// What the layers of a workspace share on one rank, whatever their shapes: heaps, the memory that
/// depends only on the world, the rows between the two GEMMs, and the workers.
class TwinShared {
 public:
  /// heaps[p]: rank p's symmetric heap as mapped here, zeroed before the first call of any rank.
  /// `control_bytes`: the same for all of its shapes; `between_bytes`: the most of any shape.
  /// Workers are threads, unless `make_crew` makes something else; puts are done at once, unless
  /// there is a `nic`. Throws std::system_error if there is no memory for it.
  TwinShared(u32 rank, std::vector<u8*> heaps, u64 heap_bytes, u64 control_bytes, u64 between_bytes,
             const MakeCrew& make_crew = {}, Nic* nic = nullptr);
  ~TwinShared();
  TwinShared(const TwinShared&) = delete;
  TwinShared& operator=(const TwinShared&) = delete;

  /// Clears this rank's heap and what depends only on the world. Collective: between two barriers
  /// of all ranks, with no call running; the shapes' tables (TwinRank::clear) come after it.
  void clear();

 private:
  friend class TwinRank;

  u32 rank_;
  std::vector<u8*> heaps_;
  u64 heap_bytes_;
  Mapped control_;
  u64 control_bytes_;
  Mapped between_;
  MakeCrew make_crew_;
  Nic* nic_;
  std::atomic_flag calling_;
  std::function<void(u32)> share_;  // the share of the call in flight; crew_ orders accesses
  pid_t process_ = getpid();        // the process of the crew's threads
  std::unique_ptr<Crew> crew_;      // last, so that its workers end first
};

/// A layer's own memory on one rank: its part of RankMemory.
class TwinRecords {
 public:
  /// `table`: present if the geometry has one.
  TwinRecords(const Geometry& geometry, const FaultPlan& faults, PlaceTable table = {});

  u8* base() const { return memory_.get(); }
  u64 bytes() const { return memory_.get_deleter().bytes; }
  /// Only the layer's part, in which the host reads what was noted of the last call.
  RankMemory memory() const { return {geometry_, {nullptr, nullptr, base()}}; }
  const Geometry& geometry() const { return geometry_; }
  std::vector<u32> rows_sent() const;                // [peer]
  std::vector<u32> rows_received(u32 source) const;  // [local expert]
  /// Moves experts to the places of `table`. No call is running.
  void place(PlaceTable table);
  /// Forgets everything except where experts are, and sets the faults from now on. No call is
  /// running.
  void clear(const FaultPlan& faults);

 private:
  void write_table();

  Geometry geometry_;
  PlaceTable table_;
  Mapped memory_;
};

/// One rank of the layers of one shape.
class TwinRank {
 public:
  /// `place`: of this shape in the shared heaps. Throws std::system_error if there is no memory or
  /// no thread for it.
  TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank, const HeapPlace& place,
           std::shared_ptr<TwinShared> shared, const TwinSettings& settings);
  /// A layer that shares nothing: `heaps`, `make_crew` and `nic` as for TwinShared.
  TwinRank(const Geometry& geometry, const LayerShape& shape, u32 rank, std::vector<u8*> heaps,
           const TwinSettings& settings, const MakeCrew& make_crew = {}, Nic* nic = nullptr);
  TwinRank(const TwinRank&) = delete;
  TwinRank& operator=(const TwinRank&) = delete;

  /// Runs one call of a layer, a gradient call if the settings say so, and returns when this rank's
  /// part in it is over. The failure's kind is `none` when all went well; after any other, only
  /// reset() makes the rank usable again. `identity`, `inputs`: as in Call. `must_leave` is asked
  /// now and then while this thread waits, soon after a signal has come to it; once it returns
  /// true, this rank and its peers are made to leave, and it is not asked again.
  Failure forward(TwinRecords& records, const Operands& operands, u32 tokens, u32 pair_limit,
                  u32 identity, u32 inputs, const std::function<bool()>& must_leave = {});
  /// Runs a call of a layer that shares nothing.
  Failure forward(const Operands& operands, u32 tokens, u32 pair_limit,
                  const std::function<bool()>& must_leave = {});

  /// Makes every actor of this rank and, best effort, of its peers leave. From any thread.
  /// `interrupted`: a signal has ended the last call after its kernel.
  void abort(bool interrupted = false);

  /// The failure of this rank or a peer since the last reset(); its kind may be `none`.
  Failure failure() const;

  /// Clears this shape's tables; after TwinShared::clear(), by its caller.
  void clear();
  /// Clears everything of a layer that shares nothing, and sets the faults from now on; as
  /// TwinShared::clear().
  void reset(const FaultPlan& faults = {});

  u32 epoch() const { return *rank_.memory.epoch; }
  const RankMemory& memory() const { return rank_.memory; }
  const Geometry& geometry() const { return geometry_; }

 private:
  struct CallInFlight {
    Rank<Machine> rank;
    Call call;
    const Operands* operands;
  };

  void do_share(u32 worker);
  void add_weight_gradients(const Rank<Machine>& rank, const Operands& operands);
  void install_jitter(u32 thread_index, u32 epoch);
  u32 workers() const;
  u32* places() const { return reinterpret_cast<u32*>(places_.get()); }
  RankMemory memory_of(const TwinRecords* records) const;

  Geometry geometry_;
  LayerShape shape_;
  TwinSettings settings_;
  std::shared_ptr<TwinShared> shared_;
  std::unique_ptr<TwinRecords> own_records_;  // of the layer that shares nothing
  Mapped tables_;
  Mapped os_memory_;
  Mapped coded_rows_;       // a call's tokens, where they are sent quantized
  std::vector<u8*> peers_;  // their heaps, where experts are sliced
  Rank<Machine> rank_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  Mapped places_;                                                   // for gradients
  std::vector<std::unique_ptr<GradientScratch>> gradient_scratch_;  // [processor], for gradients
  std::optional<CallInFlight> in_flight_;                           // the crew orders accesses
};

}  // namespace moeos::twin
