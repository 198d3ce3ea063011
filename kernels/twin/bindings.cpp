// SPDX-License-Identifier: Apache-2.0
// The twin as a Python module: sizes of a layer, one rank of it (for host/engines/twin.py), and
// runs in an order that a seed decides (for host/explore.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "kernels/twin/explore/explore.hpp"
#include "kernels/twin/forward.hpp"
#include "runtime/layout.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeos::twin {
namespace {

// Tile sizes of the twin. Rows as on the GPU, so that both pack the same tiles; Route blocks small
// enough that few processors share a call of few tokens.
constexpr u32 kChunkRows = 32;
static_assert(kChunkRows < SentChunk::kRows);
constexpr u32 kTileRows = 128;
constexpr u32 kRouteTokens = 32;

/// Sizes of a layer as the runtime derives them, checked against what its words can hold.
struct Sizes {
  Geometry geometry;
  LayerShape shape;
};

void require(bool holds, const std::string& what) {
  if (!holds) {
    throw std::invalid_argument(what);
  }
}

Sizes make_sizes(u32 world, u32 experts, u32 top_k, u32 max_tokens, u32 hidden, u32 intermediate,
                 u32 element_bytes, u32 capacity, bool capacity_rows, u32 curve, bool gated,
                 float alpha, float up_offset, float swiglu_limit, bool clamps_after, u32 scoring,
                 bool renormalize, float routed_scaling, u32 expert_groups, u32 top_groups,
                 u32 group_score, u32 zero_experts, bool weight_on_input, bool fp32_router,
                 u32 processors, u32 couriers, bool remote, u32 tile_rows, u32 route_tokens,
                 u32 route_slices, u32 kept_bytes, u32 gemm0_columns, u32 gemm1_columns,
                 u32 narrow_rows, u32 segment_align, bool large_experts, u32 once_rows,
                 u32 once_after, u32 spread_tokens, u32 whole_rows, u32 trace_events) {
  Sizes sizes{};
  sizes.shape =
      LayerShape{hidden,
                 intermediate,
                 {static_cast<Curve>(curve), gated, alpha, up_offset, swiglu_limit, clamps_after},
                 static_cast<Scoring>(scoring),
                 renormalize,
                 routed_scaling,
                 expert_groups,
                 top_groups,
                 static_cast<GroupScore>(group_score),
                 zero_experts,
                 weight_on_input,
                 fp32_router};
  Geometry& geometry = sizes.geometry;
  geometry.world = world;
  geometry.experts = experts;
  geometry.top_k = top_k;
  geometry.max_tokens = max_tokens;
  geometry.row_bytes = hidden * element_bytes;
  geometry.hidden_bytes = intermediate * element_bytes;
  geometry.row_map = capacity_rows ? RowMap::capacity : RowMap::ragged;
  geometry.capacity = capacity;
  geometry.chunk_rows = kChunkRows;
  geometry.tile_rows = tile_rows;
  geometry.route_tokens = route_tokens;
  geometry.route_slices = route_slices;
  geometry.kept_bytes = kept_bytes;
  geometry.gemm0_parts = ceil_div(intermediate, gemm0_columns);
  geometry.gemm1_parts = ceil_div(hidden, gemm1_columns);
  geometry.narrow_rows = narrow_rows;
  if (narrow_rows > 0) {
    geometry.gemm0_narrow_parts = ceil_div(intermediate, gemm0_columns / 2);
    geometry.gemm1_narrow_parts = ceil_div(hidden, gemm1_columns / 2);
  }
  geometry.segment_align = segment_align;
  geometry.large_experts = large_experts ? 1 : 0;
  geometry.processors = processors;
  geometry.couriers = couriers;
  geometry.remote = remote ? 1 : 0;
  geometry.window_rows = Geometry::kWindowBytes / maximum(1U, geometry.row_bytes);
  geometry.once_rows = once_rows;
  geometry.once_after = once_after;
  geometry.spread_tokens = spread_tokens;
  geometry.whole_rows = whole_rows;
  geometry.alters_rows = weight_on_input ? 1 : 0;
  geometry.trace_events = trace_events;

  const auto limit = [](u64 value, u64 largest, const char* what) {
    require(value <= largest, std::string(what) + " is " + std::to_string(value) +
                                  ", and at most " + std::to_string(largest) +
                                  " fit: lower max_tokens or the world's size");
  };
  require(world > 0 && experts % world == 0, "experts must be a multiple of the world's size");
  limit(u64{world} * max_tokens * minimum(top_k, experts / world),
        std::numeric_limits<u32>::max() / 2, "the number of rows that a rank can receive");
  limit(u64{experts / world} * capacity, std::numeric_limits<u32>::max() / 2,
        "the number of rows of a cell");
  limit(geometry.tiles_max(), ReadyWord::kTasks, "the number of tiles");
  limit(u64{kReturnsSubscribersMax} * max_tokens, ReadyWord::kTasks,
        "the number of places for tokens that are complete");
  limit(maximum(geometry.route_blocks(), geometry.tile_parts_max()), ReadyWord::kParts - 1,
        "the number of parts of a task");
  limit(geometry.parts_max(), std::numeric_limits<u32>::max() / 2, "the number of parts of a call");
  require(narrow_rows < tile_rows, "narrow_rows must be below tile_rows");
  require(ceil_div(tile_rows, kChunkRows) + 2 * Geometry::kMaxSegments <= Geometry::kAwaitedMost,
          "a tile's rows must lie in fewer chunks");
  limit(u64{world} * geometry.chunks(), SentChunk::kNumbers, "the number of chunks of rows");
  static_assert(u64{SentChunk::kNumbers} * Geometry::kPiecesOfChunk * 2 <= ReadyWord::kNumbers);
  limit(world, std::numeric_limits<u16>::max(), "the world's size");
  limit(geometry.chunks(), ReadyWord::kTasks, "the number of a peer's chunks");
  if (geometry.once()) {
    limit(world, ReadyWord::kParts, "the world's size");
  }
  return sizes;
}

/// Where the host finds what it reads of a rank on the GPU: byte offsets in its heap, in its
/// control ("epoch") and in a layer's records.
nb::dict offsets_of(const Sizes& sizes) {
  const Layout layout(sizes.geometry);
  const RankMemory memory(sizes.geometry, MemoryParts<u8*>{});
  const auto offset = [](const auto* array) { return reinterpret_cast<std::uintptr_t>(array); };
  nb::dict offsets;
  offsets["abort_word"] = layout.abort_word();
  offsets["failures"] = layout.failure(0);
  offsets["put_failures"] = layout.put_failure(0);
  offsets["put_failures_end"] = layout.put_failure(sizes.geometry.world);
  offsets["epoch"] = offset(memory.epoch);
  offsets["tallies"] = offset(memory.tallies);
  offsets["record"] = offset(memory.record);
  offsets["peer_records"] = offset(memory.peer_records);
  offsets["send_start"] = offset(memory.send_start);
  offsets["receive_start"] = offset(memory.receive_start);
  offsets["trace_counts"] = offset(memory.trace_counts);
  offsets["trace_events"] = offset(memory.trace_events);
  offsets["faults"] = offset(memory.faults);
  return offsets;
}

FaultPlan to_fault_plan(const nb::bytes& packed) {
  require(packed.size() == sizeof(FaultPlan), "a fault plan has FAULT_PLAN_BYTES bytes");
  FaultPlan plan;
  std::memcpy(&plan, packed.data(), sizeof(plan));
  return plan;
}

/// Runs the handlers of signals that have come, as Python does between two instructions, and keeps
/// what one of them raises. Only the process's first thread runs handlers.
class Signals {
 public:
  static bool come_to_this_thread() { return getpid() == gettid(); }

  /// Whether a handler has raised. Called without the GIL.
  bool raised() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) {
      error_.emplace();
    }
    return error_.has_value();
  }
  void raise_again() {
    if (error_.has_value()) {
      throw std::move(*error_);
    }
  }

 private:
  std::optional<nb::python_error> error_;
};

std::vector<u8*> to_pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<u8*> pointers;
  for (const std::uintptr_t address : addresses) {
    pointers.push_back(reinterpret_cast<u8*>(address));
  }
  return pointers;
}

/// What a layer noted of its last call: tallies, the call's record, the peers' (host/counters.py).
nb::tuple counters_of(const TwinRecords& records) {
  const RankMemory memory = records.memory();
  const Geometry& geometry = records.geometry();
  return nb::make_tuple(nb::bytes(memory.tallies, geometry.tallies() * sizeof(Tally)),
                        nb::bytes(memory.record, sizeof(CallRecord)),
                        nb::bytes(memory.peer_records, geometry.world * sizeof(PeerRecord)));
}

/// What its actors noted of the last call: how many events each, and the events.
nb::tuple trace_of(const TwinRecords& records) {
  const RankMemory memory = records.memory();
  const u64 actors = records.geometry().trace_actors();
  const u64 room = records.geometry().trace_events;
  return nb::make_tuple(nb::bytes(memory.trace_counts, room > 0 ? actors * sizeof(u32) : 0),
                        nb::bytes(memory.trace_events, actors * room * sizeof(TraceEvent)));
}

}  // namespace

NB_MODULE(_twin, module) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void* /*unused*/) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      // what() is what was tried and then the code's sentence, which Python has as well.
      const std::string what = error.what();
      const std::string sentence = ": " + error.code().message();
      const nb::tuple said =
          nb::make_tuple(error.code().value(), what.substr(0, what.rfind(sentence)));
      PyErr_SetObject(PyExc_OSError, said.ptr());
    }
  });
  module.doc() = "The device OS on a machine without a GPU.";
  // A daemon thread that is in a call when the program ends stands still and keeps what it uses,
  // and a forked child never frees what its parent's other threads hold.
  nb::set_leak_warnings(false);
  module.attr("TILE_ROWS") = kTileRows;
  module.attr("CHUNK_ROWS") = kChunkRows;
  module.attr("ROUTE_TOKENS") = kRouteTokens;
  module.attr("SEGMENT_ALIGN") = Geometry::kSegmentAlign;
  module.attr("MAX_SEGMENTS") = Geometry::kMaxSegments;
  module.attr("GATED_COLUMNS") = kGatedColumns;
  module.attr("PLAIN_COLUMNS") = kPlainColumns;
  module.attr("FAULTS") = u32{FaultPlan::kMost};
  module.attr("FAULT_PLAN_BYTES") = sizeof(FaultPlan);

  nb::class_<Sizes>(module, "Sizes", "Buffers and bounds of a layer, as the runtime derives them.")
      .def(nb::new_(&make_sizes), nb::kw_only(), "world"_a, "experts"_a, "top_k"_a, "max_tokens"_a,
           "hidden"_a, "intermediate"_a, "element_bytes"_a, "capacity"_a, "capacity_rows"_a,
           "curve"_a, "gated"_a, "alpha"_a, "up_offset"_a, "swiglu_limit"_a, "clamps_after"_a,
           "scoring"_a, "renormalize"_a, "routed_scaling"_a, "expert_groups"_a, "top_groups"_a,
           "group_score"_a, "zero_experts"_a, "weight_on_input"_a, "fp32_router"_a, "processors"_a,
           "couriers"_a, "remote"_a, "tile_rows"_a, "route_tokens"_a, "route_slices"_a,
           "kept_bytes"_a, "gemm0_columns"_a, "gemm1_columns"_a, "narrow_rows"_a, "segment_align"_a,
           "large_experts"_a, "once_rows"_a, "once_after"_a, "spread_tokens"_a, "whole_rows"_a,
           "trace_events"_a)
      .def_prop_ro("heap_bytes", [](const Sizes& s) { return Layout(s.geometry).bytes(); })
      .def_prop_ro("header_bytes", [](const Sizes& s) { return Layout(s.geometry).header_bytes(); })
      .def_prop_ro("words_bytes", [](const Sizes& s) { return Layout(s.geometry).words_bytes(); })
      .def_prop_ro("row_bytes", [](const Sizes& s) { return s.geometry.row_bytes; })
      .def_prop_ro("memory_bytes", [](const Sizes& s) { return RankMemory::bytes(s.geometry); })
      .def_prop_ro("control_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).control; })
      .def_prop_ro("tables_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).tables; })
      .def_prop_ro("records_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).records; })
      .def_prop_ro("intermediate_bytes",
                   [](const Sizes& s) {
                     return u64{s.geometry.intermediate_rows_max()} * s.geometry.hidden_bytes;
                   })
      .def_prop_ro("os_memory_bytes", [](const Sizes& s) { return OsMemory::bytes(s.geometry); })
      .def_prop_ro("offsets", &offsets_of, nb::sig("def offsets(self) -> dict[str, int]"))
      .def_prop_ro("first_cell", [](const Sizes& s) { return Layout(s.geometry).first_cell(); })
      .def_prop_ro("cells", [](const Sizes& s) { return Layout(s.geometry).cells(); })
      .def_prop_ro("intermediate_rows",
                   [](const Sizes& s) { return s.geometry.intermediate_rows_max(); })
      .def_prop_ro("cell_rows", [](const Sizes& s) { return s.geometry.cell_rows(); })
      .def_prop_ro("chunks", [](const Sizes& s) { return s.geometry.chunks(); })
      .def_prop_ro("chunk_rows", [](const Sizes& s) { return s.geometry.chunk_rows; })
      .def_prop_ro("window_rows", [](const Sizes& s) { return s.geometry.window(); })
      .def(
          "dispatch_parts",
          [](const Sizes& s, u32 chunks, u32 rows) {
            return s.geometry.dispatch_parts(s.geometry.rows_in_pieces(chunks), rows);
          },
          "chunks"_a, "rows"_a)
      .def_prop_ro("tile_rows", [](const Sizes& s) { return s.geometry.tile_rows; })
      .def_prop_ro("route_tokens", [](const Sizes& s) { return s.geometry.route_tokens; })
      .def_prop_ro("route_slices", [](const Sizes& s) { return s.geometry.route_slices; })
      .def_prop_ro("kept_bytes", [](const Sizes& s) { return s.geometry.kept_bytes; })
      .def(
          "route_blocks",
          [](const Sizes& s, u32 tokens) { return s.geometry.route_blocks_of(tokens); }, "tokens"_a)
      .def(
          "route_parts",
          [](const Sizes& s, u32 tokens) {
            return s.geometry.route_blocks_of(tokens) * s.geometry.route_parts_of_block(tokens);
          },
          "tokens"_a)
      .def_prop_ro("tiles_max", [](const Sizes& s) { return s.geometry.tiles_max(); })
      .def_prop_ro("parts_max", [](const Sizes& s) { return s.geometry.parts_max(); })
      .def_prop_ro("gemm0_parts", [](const Sizes& s) { return s.geometry.gemm0_parts; })
      .def_prop_ro("gemm1_parts", [](const Sizes& s) { return s.geometry.gemm1_parts; })
      .def_prop_ro("narrow_rows", [](const Sizes& s) { return s.geometry.narrow_rows; })
      .def_prop_ro("segment_align", [](const Sizes& s) { return s.geometry.segment_align; })
      .def_prop_ro("once_rows", [](const Sizes& s) { return s.geometry.once_rows; })
      .def_prop_ro("once_after", [](const Sizes& s) { return s.geometry.once_after; })
      .def_prop_ro("spread_tokens", [](const Sizes& s) { return s.geometry.spread_tokens; })
      .def_prop_ro("whole_rows", [](const Sizes& s) { return s.geometry.whole_rows; })
      .def(
          "spreads", [](const Sizes& s, u32 tokens) { return s.geometry.spreads(tokens); },
          "tokens"_a)
      .def(
          "sends_once", [](const Sizes& s, u32 rows) { return s.geometry.sends_once(rows); },
          "rows"_a)
      .def(
          "chunks_made_whole",
          [](const Sizes& s, u32 rows) { return s.geometry.chunks_made_whole(rows); }, "rows"_a)
      .def(
          "may_await", [](const Sizes& s, u32 tokens) { return s.geometry.may_await(tokens); },
          "tokens"_a)
      .def(
          "combine_tokens",
          [](const Sizes& s, u32 tokens) { return s.geometry.combine_tokens(tokens); }, "tokens"_a)
      .def_prop_ro("large_experts", [](const Sizes& s) { return s.geometry.large_experts != 0; })
      .def_prop_ro("gemm0_narrow_parts",
                   [](const Sizes& s) { return s.geometry.gemm0_narrow_parts; })
      .def_prop_ro("gemm1_narrow_parts",
                   [](const Sizes& s) { return s.geometry.gemm1_narrow_parts; });

  nb::class_<Failure>(module, "Failure",
                      "What ended a call before its time; host/failure.py has the sentences.")
      .def_prop_ro("kind", [](const Failure& f) { return static_cast<u32>(f.kind); })
      .def_prop_ro("actor", [](const Failure& f) { return static_cast<u32>(f.actor); })
      .def_ro("rank", &Failure::rank)
      .def_ro("peer", &Failure::peer)
      .def_ro("expert", &Failure::expert)
      .def_ro("chunk", &Failure::chunk)
      .def_ro("epoch", &Failure::epoch)
      .def_ro("identity", &Failure::identity)
      .def_ro("expected", &Failure::expected)
      .def_ro("seen", &Failure::seen)
      .def_ro("waited_ns", &Failure::waited_ns);

  nb::class_<TwinShared>(module, "Shared", "What the layers of a workspace share on one rank.")
      .def(nb::new_([](u32 rank, const std::vector<std::uintptr_t>& heaps, u64 heap_bytes,
                       u64 control_bytes, u64 between_bytes) {
             require(rank < heaps.size(), "one heap address for each rank");
             return std::make_shared<TwinShared>(rank, to_pointers(heaps), heap_bytes,
                                                 control_bytes, between_bytes);
           }),
           nb::kw_only(), "rank"_a, "heaps"_a, "heap_bytes"_a, "control_bytes"_a, "between_bytes"_a)
      .def("clear", &TwinShared::clear);

  nb::class_<TwinRecords>(module, "Records", "What a layer has of its own on one rank.")
      .def(
          "__init__",
          [](TwinRecords* self, const Sizes& sizes, const nb::bytes& faults) {
            new (self) TwinRecords(sizes.geometry, to_fault_plan(faults));
          },
          nb::kw_only(), "sizes"_a, "faults"_a)
      .def(
          "clear",
          [](TwinRecords& self, const nb::bytes& faults) { self.clear(to_fault_plan(faults)); },
          "faults"_a)
      .def("counters", &counters_of, nb::sig("def counters(self) -> tuple[bytes, bytes, bytes]"))
      .def("trace", &trace_of, nb::sig("def trace(self) -> tuple[bytes, bytes]"))
      .def("rows_sent", &TwinRecords::rows_sent)
      .def("rows_received", &TwinRecords::rows_received, "source"_a);

  nb::class_<TwinRank>(module, "Rank",
                       "One rank of the layers of one shape: its threads and calls.")
      .def(
          "__init__",
          [](TwinRank* self, const Sizes& sizes, u32 rank, std::shared_ptr<TwinShared> shared,
             u64 words_at, u64 rows_at, u32 stride_rows, double deadline, bool split_os,
             double jitter_us, u64 jitter_seed, u32 ranks_per_node) {
            require(rank < sizes.geometry.world && stride_rows >= sizes.geometry.cell_rows(),
                    "the cells of a heap are too small");
            new (self) TwinRank(sizes.geometry, sizes.shape, rank,
                                HeapPlace{words_at, rows_at, stride_rows}, std::move(shared),
                                TwinSettings{static_cast<u64>(deadline * 1e9), split_os, jitter_us,
                                             jitter_seed, ranks_per_node});
          },
          nb::kw_only(), "sizes"_a, "rank"_a, "shared"_a, "words_at"_a, "rows_at"_a,
          "stride_rows"_a, "deadline"_a, "split_os"_a, "jitter_us"_a, "jitter_seed"_a,
          "ranks_per_node"_a)
      .def(
          "forward",
          [](TwinRank& self, TwinRecords& records, u32 identity, bool bfloat16, u32 tokens,
             u32 pair_limit, std::uintptr_t x, std::uintptr_t gate, std::uintptr_t selection_bias,
             std::uintptr_t router_bias, std::uintptr_t expert_scale, std::uintptr_t topk_ids,
             std::uintptr_t topk_weights, std::uintptr_t w1, std::uintptr_t b1, std::uintptr_t w2,
             std::uintptr_t b2, std::uintptr_t out) {
            const Operands operands{bfloat16 ? Element::kBfloat16 : Element::kFloat32,
                                    reinterpret_cast<const void*>(x),
                                    reinterpret_cast<const void*>(gate),
                                    reinterpret_cast<const float*>(selection_bias),
                                    reinterpret_cast<const float*>(router_bias),
                                    reinterpret_cast<const float*>(expert_scale),
                                    reinterpret_cast<const i32*>(topk_ids),
                                    reinterpret_cast<const float*>(topk_weights),
                                    reinterpret_cast<const void*>(w1),
                                    reinterpret_cast<const void*>(b1),
                                    reinterpret_cast<const void*>(w2),
                                    reinterpret_cast<const void*>(b2),
                                    reinterpret_cast<void*>(out)};
            Signals signals;
            std::function<bool()> must_leave;
            if (Signals::come_to_this_thread()) {
              must_leave = [&signals] { return signals.raised(); };
            }
            Failure failure;
            {
              const nb::gil_scoped_release release;
              failure = self.forward(records, operands, tokens, pair_limit, identity, must_leave);
            }
            signals.raise_again();
            return failure;
          },
          nb::kw_only(), "records"_a, "identity"_a, "bfloat16"_a, "tokens"_a, "pair_limit"_a, "x"_a,
          "gate"_a, "selection_bias"_a, "router_bias"_a, "expert_scale"_a, "topk_ids"_a,
          "topk_weights"_a, "w1"_a, "b1"_a, "w2"_a, "b2"_a, "out"_a)
      .def("abort", &TwinRank::abort, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &TwinRank::clear)
      .def_prop_ro("epoch", &TwinRank::epoch);

  nb::class_<Outcome>(module, "Outcome", "What came of a run of explore().")
      .def_ro("wrong", &Outcome::wrong)
      .def_ro("world", &Outcome::world)
      .def_ro("calls", &Outcome::calls)
      .def_ro("failed", &Outcome::failed)
      .def_ro("kinds", &Outcome::kinds)
      .def_ro("points", &Outcome::points)
      .def_ro("switches", &Outcome::switches)
      .def_ro("latency_ns", &Outcome::latency_ns)
      .def_ro("deadline_ns", &Outcome::deadline_ns)
      .def_ro("happened", &Outcome::happened)
      .def_ro("fault", &Outcome::fault);
  module.def(
      "explore",
      [](u64 seed, u32 strategy, u32 scenario) {
        require(strategy < kStrategies, "no such strategy");
        require(scenario < kScenarios, "no such scenario");
        const nb::gil_scoped_release release;
        return explore(seed, static_cast<Strategy>(strategy), static_cast<Scenario>(scenario));
      },
      "seed"_a, "strategy"_a, "scenario"_a,
      "Runs a small random world in an order and with a fault that the seed decides.");
}

}  // namespace moeos::twin
