// SPDX-License-Identifier: Apache-2.0
// The twin as a Python module: one rank of a layer (for host/moeos/engines/twin/engine.py), and
// runs in an order that a seed decides (for host/moeos/engines/explore.py). Sizes of a layer are
// those of kernels/runtime_module.cpp.
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

#include "kernels/sizes.hpp"
#include "kernels/twin/explore/explore.hpp"
#include "kernels/twin/forward.hpp"
#include "kernels/twin/gradient_rows.hpp"
#include "runtime/memory/layout.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeos::twin {
namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(what);
  }
}

FaultPlan to_fault_plan(const nb::bytes& packed) {
  require(packed.size() == sizeof(FaultPlan), "a fault plan is as long as its record");
  FaultPlan plan;
  std::memcpy(&plan, packed.data(), sizeof(plan));
  return plan;
}

PlaceTable to_table(const Geometry& geometry, const std::vector<u32>& from,
                    const std::vector<u32>& places) {
  const u32 experts = geometry.placed_experts;
  require(from.size() == (geometry.placed() ? experts + 1 : 0), "each expert has its places");
  require(places.size() <= (geometry.placed() ? geometry.experts : 0), "there are as many places");
  for (u32 expert = 0; expert < experts; ++expert) {
    require(from[expert] < from[expert + 1] && from[expert + 1] <= places.size(),
            "each expert has a place");
  }
  for (const u32 place : places) {
    require(place < geometry.experts, "a place is one of a rank's");
  }
  return {from, places};
}

/// Runs the handlers of signals that have come, as Python does between two instructions, and keeps
/// an exception that one raises. Only the process's first thread runs handlers.
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

/// Runs a call of a rank; raises an exception that a signal's handler has raised meanwhile.
Failure run_call(TwinRank& rank, TwinRecords& records, const Operands& operands, u32 tokens,
                 u32 pair_limit, u32 identity, u32 inputs) {
  Signals signals;
  std::function<bool()> must_leave;
  if (Signals::come_to_this_thread()) {
    must_leave = [&signals] { return signals.raised(); };
  }
  Failure failure;
  {
    const nb::gil_scoped_release release;
    failure = rank.forward(records, operands, tokens, pair_limit, identity, inputs, must_leave);
  }
  signals.raise_again();
  return failure;
}

std::vector<u8*> to_pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<u8*> pointers;
  for (const std::uintptr_t address : addresses) {
    pointers.push_back(reinterpret_cast<u8*>(address));
  }
  return pointers;
}

/// What a layer noted of its last call: tallies, the call's record, the peers'
/// (host/moeos/engines/counters.py).
nb::tuple counters_of(const TwinRecords& records) {
  const RankMemory memory = records.memory();
  const Geometry& geometry = records.geometry();
  return nb::make_tuple(nb::bytes(memory.tallies, geometry.tallies() * sizeof(Tally)),
                        nb::bytes(memory.record, sizeof(CallRecord)),
                        nb::bytes(memory.peer_records, geometry.world * sizeof(PeerRecord)));
}

/// What the layer's actors noted of the last call: the number of events of each, and the events.
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
      // what() is what was tried, then the message of the code, which Python has as well.
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
  nb::module_::import_("moeos._runtime");  // which has the types used here
  module.attr("GATED_COLUMNS") = kGatedColumns;
  module.attr("PLAIN_COLUMNS") = kPlainColumns;

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
          [](TwinRecords* self, const Sizes& sizes, const nb::bytes& faults,
             const std::vector<u32>& places_from, const std::vector<u32>& places) {
            PlaceTable table = to_table(sizes.geometry, places_from, places);
            new (self) TwinRecords(sizes.geometry, to_fault_plan(faults), std::move(table));
          },
          nb::kw_only(), "sizes"_a, "faults"_a, "places_from"_a, "places"_a)
      .def(
          "clear",
          [](TwinRecords& self, const nb::bytes& faults) { self.clear(to_fault_plan(faults)); },
          "faults"_a)
      .def(
          "place",
          [](TwinRecords& self, const std::vector<u32>& places_from,
             const std::vector<u32>& places) {
            self.place(to_table(self.geometry(), places_from, places));
          },
          nb::kw_only(), "places_from"_a, "places"_a)
      .def("counters", &counters_of, nb::sig("def counters(self) -> tuple[bytes, bytes, bytes]"))
      .def("trace", &trace_of, nb::sig("def trace(self) -> tuple[bytes, bytes]"))
      .def("rows_sent", &TwinRecords::rows_sent)
      .def("rows_received", &TwinRecords::rows_received, "source"_a);

  nb::class_<TwinRank>(module, "Rank",
                       "One rank of the layers of one shape: its threads and calls.")
      .def(
          "__init__",
          [](TwinRank* self, const Sizes& sizes, u32 rank, std::shared_ptr<TwinShared> shared,
             u64 words_at, u64 rows_at, u64 results_at, u32 stride_rows, double deadline,
             bool split_os, double jitter_us, u64 jitter_seed, u32 ranks_per_node, bool gradients,
             u32 slice_number, const std::vector<u32>& peers) {
            require(rank < sizes.geometry.world && stride_rows >= sizes.geometry.cell_places(),
                    "the cells of a heap are too small");
            require(peers.size() == (sizes.geometry.sliced() ? sizes.geometry.ranks() : 0) &&
                        slice_number < maximum(1U, sizes.geometry.slices),
                    "where experts are sliced a rank has a slice, and each peer a heap");
            new (self)
                TwinRank(sizes.geometry, sizes.shape, rank,
                         HeapPlace{words_at, rows_at, results_at, stride_rows}, std::move(shared),
                         TwinSettings{static_cast<u64>(deadline * 1e9), split_os, jitter_us,
                                      jitter_seed, ranks_per_node, FaultPlan{}, PlaceTable{},
                                      gradients, slice_number, peers});
          },
          nb::kw_only(), "sizes"_a, "rank"_a, "shared"_a, "words_at"_a, "rows_at"_a, "results_at"_a,
          "stride_rows"_a, "deadline"_a, "split_os"_a, "jitter_us"_a, "jitter_seed"_a,
          "ranks_per_node"_a, "gradients"_a, "slice_number"_a, "peers"_a)
      .def(
          "forward",
          [](TwinRank& self, TwinRecords& records, u32 identity, u32 inputs, bool bfloat16,
             u32 tokens, u32 pair_limit, std::uintptr_t x, std::uintptr_t x_scale,
             std::uintptr_t gate, std::uintptr_t selection_bias, std::uintptr_t router_bias,
             std::uintptr_t expert_scale, std::uintptr_t topk_ids, std::uintptr_t topk_weights,
             std::uintptr_t w1, std::uintptr_t b1, std::uintptr_t w2, std::uintptr_t b2,
             std::uintptr_t w3, std::uintptr_t w1_scale, std::uintptr_t w2_scale,
             std::uintptr_t w1_scale_2, std::uintptr_t w2_scale_2, std::uintptr_t shared_w1,
             std::uintptr_t shared_w2, std::uintptr_t shared_gate, std::uintptr_t shared_w1_scale,
             std::uintptr_t shared_w2_scale, std::uintptr_t shared_w1_scale_2,
             std::uintptr_t shared_w2_scale_2, std::uintptr_t out, std::uintptr_t chosen_ids,
             std::uintptr_t chosen_weights, std::uintptr_t saved, u32 saved_of_source,
             bool leaves_partials) {
            const Operands operands{bfloat16 ? Element::kBfloat16 : Element::kFloat32,
                                    reinterpret_cast<const void*>(x),
                                    reinterpret_cast<const float*>(x_scale),
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
                                    reinterpret_cast<const void*>(w3),
                                    reinterpret_cast<const void*>(w1_scale),
                                    reinterpret_cast<const void*>(w2_scale),
                                    reinterpret_cast<const float*>(w1_scale_2),
                                    reinterpret_cast<const float*>(w2_scale_2),
                                    reinterpret_cast<const void*>(shared_w1),
                                    reinterpret_cast<const void*>(shared_w2),
                                    reinterpret_cast<const void*>(shared_gate),
                                    reinterpret_cast<const void*>(shared_w1_scale),
                                    reinterpret_cast<const void*>(shared_w2_scale),
                                    reinterpret_cast<const float*>(shared_w1_scale_2),
                                    reinterpret_cast<const float*>(shared_w2_scale_2),
                                    reinterpret_cast<void*>(out),
                                    reinterpret_cast<i32*>(chosen_ids),
                                    reinterpret_cast<float*>(chosen_weights),
                                    reinterpret_cast<void*>(saved),
                                    saved_of_source,
                                    leaves_partials};
            return run_call(self, records, operands, tokens, pair_limit, identity, inputs);
          },
          nb::kw_only(), "records"_a, "identity"_a, "inputs"_a, "bfloat16"_a, "tokens"_a,
          "pair_limit"_a, "x"_a, "x_scale"_a, "gate"_a, "selection_bias"_a, "router_bias"_a,
          "expert_scale"_a, "topk_ids"_a, "topk_weights"_a, "w1"_a, "b1"_a, "w2"_a, "b2"_a, "w3"_a,
          "w1_scale"_a, "w2_scale"_a, "w1_scale_2"_a, "w2_scale_2"_a, "shared_w1"_a, "shared_w2"_a,
          "shared_gate"_a, "shared_w1_scale"_a, "shared_w2_scale"_a, "shared_w1_scale_2"_a,
          "shared_w2_scale_2"_a, "out"_a, "chosen_ids"_a, "chosen_weights"_a, "saved"_a,
          "saved_of_source"_a, "leaves_partials"_a)
      .def(
          "backward",
          [](TwinRank& self, TwinRecords& records, u32 identity, u32 inputs, bool bfloat16,
             u32 tokens, u32 pair_limit, std::uintptr_t x, std::uintptr_t d_out,
             std::uintptr_t topk_ids, std::uintptr_t topk_weights, std::uintptr_t w1,
             std::uintptr_t b1, std::uintptr_t w2, std::uintptr_t b2, std::uintptr_t w3,
             std::uintptr_t saved, u32 saved_of_source, std::uintptr_t d_x,
             std::uintptr_t d_topk_weights, std::uintptr_t d_w1, std::uintptr_t d_b1,
             std::uintptr_t d_w2, std::uintptr_t d_b2, std::uintptr_t d_w3,
             std::uintptr_t d_x_added, std::uintptr_t d_shared) {
            const GradientOperands gradients{
                reinterpret_cast<const void*>(d_out), reinterpret_cast<float*>(d_topk_weights),
                reinterpret_cast<float*>(d_w1),       reinterpret_cast<float*>(d_b1),
                reinterpret_cast<float*>(d_w2),       reinterpret_cast<float*>(d_b2),
                reinterpret_cast<float*>(d_w3),       reinterpret_cast<const float*>(d_x_added),
                reinterpret_cast<float*>(d_shared)};
            Operands operands{};
            operands.element = bfloat16 ? Element::kBfloat16 : Element::kFloat32;
            operands.x = reinterpret_cast<const void*>(x);
            operands.topk_ids = reinterpret_cast<const i32*>(topk_ids);
            operands.topk_weights = reinterpret_cast<const float*>(topk_weights);
            operands.w1 = reinterpret_cast<const void*>(w1);
            operands.b1 = reinterpret_cast<const void*>(b1);
            operands.w2 = reinterpret_cast<const void*>(w2);
            operands.b2 = reinterpret_cast<const void*>(b2);
            operands.w3 = reinterpret_cast<const void*>(w3);
            operands.out = reinterpret_cast<void*>(d_x);
            operands.saved = reinterpret_cast<void*>(saved);
            operands.saved_of_source = saved_of_source;
            operands.gradients = &gradients;
            return run_call(self, records, operands, tokens, pair_limit, identity, inputs);
          },
          nb::kw_only(), "records"_a, "identity"_a, "inputs"_a, "bfloat16"_a, "tokens"_a,
          "pair_limit"_a, "x"_a, "d_out"_a, "topk_ids"_a, "topk_weights"_a, "w1"_a, "b1"_a, "w2"_a,
          "b2"_a, "w3"_a, "saved"_a, "saved_of_source"_a, "d_x"_a, "d_topk_weights"_a, "d_w1"_a,
          "d_b1"_a, "d_w2"_a, "d_b2"_a, "d_w3"_a, "d_x_added"_a, "d_shared"_a)
      .def("abort", &TwinRank::abort, nb::call_guard<nb::gil_scoped_release>(),
           "interrupted"_a = false)
      .def("failure", &TwinRank::failure)
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
      "gradient_row_bytes",
      [](const Sizes& forward, bool bfloat16) {
        const GradientRows rows(forward.geometry, forward.shape,
                                bfloat16 ? Element::kBfloat16 : Element::kFloat32);
        return nb::make_tuple(rows.sent_bytes(), rows.kept_bytes());
      },
      nb::sig("def gradient_row_bytes(forward: moeos._runtime.Sizes, bfloat16: bool) -> "
              "tuple[int, int]"),
      "forward"_a, "bfloat16"_a,
      "Bytes of a row in a call of gradients: as it is sent, and as it is kept.");
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
