// SPDX-License-Identifier: Apache-2.0
// What the runtimes of all machines have in common, as a Python module: sizes of a layer, kinds,
// and records. host/moeos/config/sizes.py gives the fields of Geometry and LayerShape by their
// names, and reads what the runtime derives from them; host/moeos/config/records.py reads the
// layout of records.
//
// Must not depend on: the twin; the GPU's tiles.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/rows_in_table.hpp"
#include "kernels/sizes.hpp"
#include "runtime/memory/layout.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/os_memory.hpp"
#include "runtime/memory/records.hpp"
#include "runtime/memory/slices.hpp"
#include "runtime/memory/watchdog.hpp"
#include "runtime/words/task.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeos {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) {
    throw std::invalid_argument(what);
  }
}

// --- Fields by their names ---

/// A field's value in Python: an enumerator is its number.
template <class T>
auto to_python(T value) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<u32>(value);
  } else {
    return value;
  }
}

/// Takes fields out of a dict; what is left at the end is no field.
class Fields {
 public:
  explicit Fields(const nb::dict& fields) : left_(nb::steal<nb::dict>(PyDict_Copy(fields.ptr()))) {}

  /// A field that is not given is 0.
  template <class T>
  void take(const char* name, T& field) {
    if (left_.contains(name)) {
      using Given = decltype(to_python(field));
      field = static_cast<T>(nb::cast<Given>(left_[name]));
      nb::del(left_[name]);
    }
  }
  void take(const char* name, Activation& field);

  void end() const {
    for (const auto& [name, value] : left_) {
      throw std::invalid_argument("no field of a layer's sizes is " + nb::cast<std::string>(name));
    }
  }

 private:
  nb::dict left_;
};

void Fields::take(const char* name, Activation& activation) {
  Fields fields(nb::cast<nb::dict>(left_[name]));
#define FIELD(type, name) fields.take(#name, activation.name);
#include "kernels/activation.def"
  fields.end();
  nb::del(left_[name]);
}

/// A field's value in C++, which any compiler reads back bit by bit.
std::string text(u32 value) { return std::to_string(value); }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(float value) {
  if (std::isinf(value)) {
    return "moeos::kInfinity";
  }
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%aF", static_cast<double>(value));
  return digits;
}
std::string text(RowMap value) { return "moeos::RowMap{" + text(to_python(value)) + "}"; }
std::string text(Curve value) { return "moeos::Curve{" + text(to_python(value)) + "}"; }
std::string text(Scoring value) { return "moeos::Scoring{" + text(to_python(value)) + "}"; }
std::string text(GroupScore value) { return "moeos::GroupScore{" + text(to_python(value)) + "}"; }
std::string text(GateUp value) { return "moeos::GateUp{" + text(to_python(value)) + "}"; }
std::string text(WeightFormat value) {
  return "moeos::WeightFormat{" + text(to_python(value)) + "}";
}
std::string text(ActivationFormat value) {
  return "moeos::ActivationFormat{" + text(to_python(value)) + "}";
}
std::string text(const Activation& activation) {
  std::string all;
#define FIELD(type, name) all += "." #name "=" + text(activation.name) + ",";
#include "kernels/activation.def"
  return "{" + all + "}";
}

/// Designated initialisers of all fields, for a kernel that has them as constants.
std::string text(const Geometry& geometry) {
  std::string all;
#define FIELD(type, name) all += "." #name "=" + text(geometry.name) + ",";
#include "runtime/words/geometry.def"
  return all;
}
std::string text(const LayerShape& shape) {
  std::string all;
#define FIELD(type, name) all += "." #name "=" + text(shape.name) + ",";
#include "kernels/shape.def"
  return all;
}

// --- Sizes ---

/// Throws where the runtime's words cannot hold a number of this layer.
void check_fits(const Geometry& geometry) {
  const auto limit = [](u64 value, u64 largest, const char* what,
                        const char* lower = "max_tokens or the world's size") {
    require(value <= largest, std::string(what) + " is " + std::to_string(value) +
                                  ", and at most " + std::to_string(largest) + " fit: lower " +
                                  lower);
  };
  const u32 world = geometry.world;
  require(world > 0 && geometry.experts > 0, "a world has a rank, and a layer an expert");
  limit(world, std::numeric_limits<u16>::max(), "the world's size", "it");
  require(!geometry.placed() || geometry.experts % world == 0, "each rank has as many places");
  require(geometry.top_k % geometry.pairs_of_choice() == 0, "each choice has as many pairs");
  require(geometry.pair_slices == 0 || geometry.placed(), "a table says where slices are");
  const u32 local_experts = geometry.local_experts();
  limit(u64{world} * geometry.max_tokens * geometry.rows_of_token(),
        std::numeric_limits<u32>::max() / 2, "the number of rows that a rank can receive");
  limit(u64{local_experts} * geometry.capacity, std::numeric_limits<u32>::max() / 2,
        "the number of rows of a cell");
  limit(u64{world} * geometry.cell_rows(), std::numeric_limits<u32>::max(),
        "the number of rows of all cells");
  limit(u64{geometry.result_rows()} + geometry.shared_results() +
            (geometry.stages_apart() ? u64{world} * geometry.cell_places() : 0),
        std::numeric_limits<u32>::max(), "the number of results, with those for other nodes");
  limit(geometry.tiles_max() + geometry.shared_tiles(geometry.max_tokens), ReadyWord::kTasks,
        "the number of tiles");
  limit(u64{kReturnsSubscribersMax} * geometry.max_tokens, ReadyWord::kTasks,
        "the number of places for tokens that are complete");
  const u32 shared_parts = maximum(geometry.shared0_parts, geometry.shared0_narrow_parts) +
                           maximum(geometry.product1_parts, geometry.product1_narrow_parts);
  constexpr u32 kPartsMax = ReadyWord::kParts - 1;
  limit(geometry.route_blocks(), kPartsMax, "the number of blocks of tokens to route",
        "max_tokens");
  limit(geometry.tile_parts_max(), kPartsMax, "the number of parts of a tile",
        "hidden or intermediate");
  limit(shared_parts, kPartsMax, "the number of parts of a tile of shared experts",
        "hidden, shared_experts or shared_intermediate");
  limit(geometry.parts_max(), std::numeric_limits<u32>::max() / 2, "the number of parts of a call");
  require(geometry.narrow_rows < geometry.tile_rows, "narrow_rows must be below tile_rows");
  require(geometry.chunk_rows < SentChunk::kRows, "chunk_rows must fit a chunk's word");
  require(ceil_div(geometry.tile_rows, geometry.chunk_rows) + 2 * Geometry::kMaxSegments <=
              Geometry::kAwaitedMost,
          "a tile's rows must lie in fewer chunks");
  limit(u64{world} * geometry.chunks(), SentChunk::kNumbers, "the number of chunks of rows");
  static_assert(u64{SentChunk::kNumbers} * Geometry::kQuartersOfChunk * 2 <= ReadyWord::kNumbers);
  limit(geometry.in_place_tokens, Geometry::kInPlaceTokens, "in_place_tokens", "it");
  if (geometry.gathers_own_rows()) {
    limit(u64{geometry.max_tokens} * geometry.row_bytes, std::numeric_limits<u32>::max(),
          "the number of bytes of tokens whose rows are gathered", "max_tokens");
    const u64 between = geometry.between_by_pairs() ? geometry.intermediate_rows_max() : 0;
    limit(between * geometry.hidden_bytes, std::numeric_limits<u32>::max(),
          "the number of bytes between the products, whose rows are gathered", "max_tokens");
  }
  limit(geometry.chunks(), ReadyWord::kTasks, "the number of a peer's chunks");
  if (geometry.sliced()) {
    require(geometry.remote == 0,
            "a rank that holds a slice of an expert has remote peers, and may have none: leave "
            "ranks_per_node out where all ranks are on one node, else take parallel='expert'");
    limit(geometry.ranks(), SumGroup::kOwnersMost, "the world's size", "it");
    limit(geometry.sum_groups_most(), SumGroup::kGroupsMost, "the number of groups of tokens",
          "max_tokens");
  }
  if (geometry.deduplicates_any()) {
    limit(world, ReadyWord::kParts, "the world's size");
  }
}

Sizes make_sizes(const nb::typed<nb::dict, nb::str, nb::int_>& of_geometry,
                 const nb::typed<nb::dict, nb::str, nb::object>& of_shape) {
  Sizes sizes{};
  Fields geometry(of_geometry);
#define FIELD(type, name) geometry.take(#name, sizes.geometry.name);
#include "runtime/words/geometry.def"
  geometry.end();
  Fields shape(of_shape);
#define FIELD(type, name) shape.take(#name, sizes.shape.name);
#include "kernels/shape.def"
  shape.end();
  check_fits(sizes.geometry);
  return sizes;
}

/// Where the host finds what it reads of a rank on the GPU: byte offsets in its heap, in its
/// control ("epoch"), in its tables ("pair_expert", "pair_weight", "pair_row") and in a layer's
/// records.
nb::dict offsets_of(const Sizes& sizes) {
  const Layout layout(sizes.geometry);
  const RankMemory memory(sizes.geometry, MemoryParts<u8*>{});
  const auto offset = [](const auto* array) { return reinterpret_cast<std::uintptr_t>(array); };
  nb::dict offsets;
  offsets["abort_word"] = layout.abort_word();
  offsets["failures"] = layout.failure(0);
  offsets["put_failures"] = layout.put_failure(0);
  offsets["put_failures_end"] = layout.put_failure(sizes.geometry.ranks());
  offsets["epoch"] = offset(memory.epoch);
  offsets["tallies"] = offset(memory.tallies);
  offsets["record"] = offset(memory.record);
  offsets["peer_records"] = offset(memory.peer_records);
  offsets["send_start"] = offset(memory.send_start);
  offsets["receive_start"] = offset(memory.receive_start);
  offsets["trace_counts"] = offset(memory.trace_counts);
  offsets["trace_events"] = offset(memory.trace_events);
  offsets["faults"] = offset(memory.faults);
  offsets["places_from"] = offset(memory.places_from);
  offsets["places"] = offset(memory.places);
  offsets["pair_expert"] = offset(memory.pair_expert);
  offsets["pair_weight"] = offset(memory.pair_weight);
  offsets["pair_row"] = offset(memory.pair_row);
  return offsets;
}

/// A tile: its padded rows, and its segments: (source, the first row among the source's rows for
/// the expert, rows).
using PlannedTile = std::pair<u32, std::vector<std::tuple<u32, u32, u32>>>;

/// The tiles of each expert of a rank, and the parts of all of GEMM0 and of all of GEMM1, of a call
/// that is planned up front. `rows`: for each expert, from each source.
std::tuple<std::vector<std::vector<PlannedTile>>, u32, u32> plan_of(
    const Sizes& sizes, const std::vector<std::vector<u32>>& rows) {
  const Geometry& geometry = sizes.geometry;
  require(rows.size() == geometry.local_experts(), "rows must be those of each expert of a rank");
  for (const std::vector<u32>& of_source : rows) {
    require(of_source.size() == geometry.world, "an expert must have a count of each source");
  }
  const auto count = [&rows](u32 source, u32 expert) { return rows[expert][source]; };
  auto plan = plan_table(geometry, 1, count);
  const auto& table = plan.rows();
  std::vector<std::vector<PlannedTile>> tiles(rows.size());
  for (u32 expert = 0; expert < rows.size(); ++expert) {
    tiles[expert].resize(table.of(expert).tiles);
    for (u32 nth = 0; nth < tiles[expert].size(); ++nth) {
      Task task;
      const TileRows made = table.tile(expert, expert, nth, 0, task);
      tiles[expert][nth].first = made.padded;
      for (u32 s = 0; s < made.segments; ++s) {
        const Segment& segment = task.segments[s];
        tiles[expert][nth].second.emplace_back(segment.source, segment.first_row, segment.rows);
      }
    }
  }
  return {tiles, plan.parts_of(0), plan.parts_of(1)};
}

// --- Kinds and records ---

std::vector<std::string> task_kinds() {
  return {
#define KIND(name) #name,
#include "runtime/words/task_kinds.def"
  };
}

std::vector<std::string> trace_kinds() {
  std::vector<std::string> kinds = task_kinds();
#define KIND(name) kinds.emplace_back(#name);
#include "runtime/record/trace_kinds.def"
  return kinds;
}

std::string upper(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return name;
}

/// A field as numpy has it: its name, its type or another record's name, its offset, and its
/// length; 0: it is no array.
using Field = std::tuple<std::string, std::string, u64, u64>;

template <class T>
std::string format_of(const char* type) {
  if constexpr (std::is_class_v<T>) {
    return type;
  } else {
    return sizeof(T) == sizeof(u64) ? "<u8" : "<u4";
  }
}

/// The fields of a record, and its bytes.
std::pair<std::vector<Field>, u64> record(const std::string& wanted) {
  std::vector<Field> fields;
#define RECORD(name, alignment) \
  if (wanted == #name) {        \
    using Record = name;        \
    constexpr u64 kBytes = sizeof(name);
#define FIELD(type, name) \
  fields.emplace_back(#name, format_of<type>(#type), offsetof(Record, name), 0);
#define FIELDS(type, name, count) \
  fields.emplace_back(#name, format_of<type>(#type), offsetof(Record, name), count);
#define END_RECORD         \
  return {fields, kBytes}; \
  }
#include "runtime/memory/records.def"
  throw std::invalid_argument("no record is called " + wanted);
}

Failure to_failure(const nb::bytes& record) {
  require(record.size() >= sizeof(Failure), "a failure's record is too short");
  Failure failure;
  std::memcpy(&failure, record.data(), sizeof(failure));
  return failure;
}

}  // namespace

NB_MODULE(_runtime, module) {
  // nanobind would end the process at a type that it already has; the package imports this module
  // first.
  static bool made = false;
  if (made) {
    throw nb::import_error(
        "moeos is in this process already, and has left sys.modules since, as at the end of "
        "unittest.mock.patch.dict(sys.modules): its types and operators cannot be made twice. "
        "Import moeos before sys.modules is changed, or leave its modules there");
  }
  made = true;
  module.doc() = "What the device OS is on every machine: sizes, kinds and records.";
  module.attr("SEGMENT_ALIGN") = Geometry::kSegmentAlign;
  module.attr("ROWS_APART") = kRowsApart;
  module.attr("IN_PLACE_TOKENS") = Geometry::kInPlaceTokens;
  module.attr("MAX_SEGMENTS") = Geometry::kMaxSegments;
  module.attr("WINDOW_BYTES") = Geometry::kWindowBytes;
  module.attr("TOKENS_OF_SUMS") = kTokensOfSums;
  module.attr("FAULTS") = u32{kFaultsMost};

  module.def("task_kinds", &task_kinds, "Kinds of tasks, in the order of TaskKind.");
  module.def("trace_kinds", &trace_kinds, "Kinds of events, in the order of TraceKind.");
  module.def("record", &record, "name"_a,
             "A record's fields (name, format or record, offset, count or 0), and its bytes.");

  nb::enum_<FailureKind>(module, "FailureKind", nb::is_arithmetic())
#define KIND(name) .value(upper(#name).c_str(), FailureKind::name)
#include "runtime/memory/failure_kinds.def"
      ;

  nb::class_<Failure>(module, "Failure",
                      "What ended a call; moeos.engines.failure has the sentences.")
      .def(nb::new_(&to_failure), "record"_a)
      .def_prop_ro("kind", [](const Failure& f) { return to_python(f.kind); })
      .def_prop_ro("actor", [](const Failure& f) { return to_python(f.actor); })
      .def_ro("rank", &Failure::rank)
      .def_ro("peer", &Failure::peer)
      .def_ro("expert", &Failure::expert)
      .def_ro("chunk", &Failure::chunk)
      .def_ro("epoch", &Failure::epoch)
      .def_ro("identity", &Failure::identity)
      .def_ro("expected", &Failure::expected)
      .def_ro("seen", &Failure::seen)
      .def_ro("waited_ns", &Failure::waited_ns);

  nb::class_<Sizes>(module, "Sizes", "Buffers and bounds of a layer, as the runtime derives them.")
      .def(nb::new_(&make_sizes), "geometry"_a, "shape"_a)
#define FIELD(type, name) \
  .def_prop_ro(#name, [](const Sizes& s) { return to_python(s.geometry.name); })
#include "runtime/words/geometry.def"
      .def_prop_ro("geometry_text", [](const Sizes& s) { return text(s.geometry); })
      .def_prop_ro("shape_text", [](const Sizes& s) { return text(s.shape); })
      .def_prop_ro("heap_bytes", [](const Sizes& s) { return Layout(s.geometry).bytes(); })
      .def_prop_ro("header_bytes", [](const Sizes& s) { return Layout(s.geometry).header_bytes(); })
      .def_prop_ro("words_bytes", [](const Sizes& s) { return Layout(s.geometry).words_bytes(); })
      .def_prop_ro("sums_bytes", [](const Sizes& s) { return Layout(s.geometry).sums_bytes(); })
      .def_prop_ro("memory_bytes", [](const Sizes& s) { return RankMemory::bytes(s.geometry); })
      .def_prop_ro("control_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).control; })
      .def_prop_ro("tables_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).tables; })
      .def_prop_ro("records_bytes",
                   [](const Sizes& s) { return RankMemory::bytes_of_parts(s.geometry).records; })
      .def_prop_ro("intermediate_bytes", [](const Sizes& s) { return s.geometry.between_bytes(); })
      .def_prop_ro("shared_between_at",
                   [](const Sizes& s) { return s.geometry.shared_between_at(); })
      .def_prop_ro("shared_between_bytes",
                   [](const Sizes& s) { return s.geometry.shared_between_bytes(); })
      .def_prop_ro("os_memory_bytes", [](const Sizes& s) { return OsMemory::bytes(s.geometry); })
      .def_prop_ro("offsets", &offsets_of, nb::sig("def offsets(self) -> dict[str, int]"))
      .def_prop_ro("first_cell", [](const Sizes& s) { return Layout(s.geometry).first_cell(); })
      .def_prop_ro("result_bytes",
                   [](const Sizes& s) { return Layout(s.geometry).results_bytes(); })
      .def_prop_ro("staged_bytes",
                   [](const Sizes& s) {
                     return u64{s.geometry.staged_results()} * s.geometry.returned_bytes;
                   })
      .def(
          "reads_in_place",
          [](const Sizes& s, u32 tokens) { return s.geometry.reads_in_place(tokens); }, "tokens"_a,
          "Whether a call of so many tokens reads them where the caller left them.")
      .def_prop_ro(
          "gathers_own_rows", [](const Sizes& s) { return s.geometry.gathers_own_rows(); },
          "Whether first products read a rank's own tokens where the caller left them, in any "
          "call.")
      .def_prop_ro(
          "between_by_pairs", [](const Sizes& s) { return s.geometry.between_by_pairs(); },
          "Whether rows between the two products lie in the order of tokens and their pairs.")
      .def_prop_ro("cells", [](const Sizes& s) { return Layout(s.geometry).cells(); })
      .def_prop_ro("intermediate_rows",
                   [](const Sizes& s) { return s.geometry.intermediate_rows_max(); })
      .def_prop_ro("cell_rows", [](const Sizes& s) { return s.geometry.cell_rows(); })
      .def_prop_ro("cell_rows_used", [](const Sizes& s) { return s.geometry.cell_rows_used(); })
      .def_prop_ro("cell_places", [](const Sizes& s) { return s.geometry.cell_places(); })
      .def_prop_ro("chunks", [](const Sizes& s) { return s.geometry.chunks(); })
      .def_prop_ro("window", [](const Sizes& s) { return s.geometry.window(); })
      .def(
          "dispatch_parts",
          [](const Sizes& s, u32 chunks, u32 rows) {
            return s.geometry.dispatch_parts(s.geometry.rows_in_quarters(chunks), rows);
          },
          "chunks"_a, "rows"_a)
      .def(
          "route_blocks",
          [](const Sizes& s, u32 tokens) { return s.geometry.route_blocks_of(tokens); }, "tokens"_a)
      .def(
          "route_parts",
          [](const Sizes& s, u32 tokens) {
            return s.geometry.route_blocks_of(tokens) * s.geometry.route_parts_of_block(tokens);
          },
          "tokens"_a)
      .def("plan", &plan_of, "rows"_a)
      .def_prop_ro("tiles_max", [](const Sizes& s) { return s.geometry.tiles_max(); })
      .def_prop_ro("parts_max", [](const Sizes& s) { return s.geometry.parts_max(); })
      .def(
          "dispatches_tokens",
          [](const Sizes& s, u32 tokens) { return s.geometry.dispatches_tokens(tokens); },
          "tokens"_a)
      .def(
          "deduplicates", [](const Sizes& s, u32 rows) { return s.geometry.deduplicates(rows); },
          "rows"_a)
      .def(
          "chunks_replicated",
          [](const Sizes& s, u32 rows) { return s.geometry.chunks_replicated(rows); }, "rows"_a)
      .def(
          "may_await", [](const Sizes& s, u32 tokens) { return s.geometry.may_await(tokens); },
          "tokens"_a)
      .def(
          "combine_tokens",
          [](const Sizes& s, u32 tokens) { return s.geometry.combine_tokens(tokens); }, "tokens"_a)
      .def(
          "sum_groups",
          [](const Sizes& s, u32 tokens, u32 owner) {
            return sum_groups(s.geometry, tokens, owner);
          },
          "tokens"_a, "owner"_a);
}

}  // namespace moeos
