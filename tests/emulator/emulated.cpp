// SPDX-License-Identifier: Apache-2.0
// The real kernel of one configuration on the emulated GPU, as a shared library: one call of all
// virtual ranks. tests/emulator/emulated.py compiles it with the configuration's macros and calls
// it.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#if MOEOS_GRADIENTS
#include "kernels/sm90/backward.cu"
#else
#include "kernels/sm90/forward.cu"
#endif
#include "runtime/words/planted.hpp"
#include "tests/emulator/gpu.hpp"

namespace {

using namespace moeos;
using namespace moeos::sm90;
using moeos::sm90::Gemm;

/// What a rank's launch is told, as the host has it.
struct RankTensors {
  u8 *heap, *control, *tables, *records, *intermediate, *host_failure;
  const u8 *x, *gate, *w1, *w2, *b1, *b2, *w1_scale, *w2_scale;
  const float *w1_scale_2, *w2_scale_2;
  const float *selection_bias, *router_bias, *expert_scale;
  const u8 *shared_w1, *shared_w2, *shared_gate, *shared_w1_scale, *shared_w2_scale;
  const float *shared_w1_scale_2, *shared_w2_scale_2;
  const void *ids, *weights;
  const i32* token_count;
  const void* x_scale;
  u8* out;
  // Of a call of gradients.
  const u8* d_out;
  u8 *d_x, *d_topk_weights, *d_w1, *d_w2, *d_b1, *d_b2, *d_x_added, *d_shared;
  u8* saved;
  const u8* w3;
  u8* d_w3;
  u64 experts;
  u64 saved_of_source;
  u64 rows;
  u64 any_ids;
  u64 leaves_partials;
  u64 identity, words_at, rows_at, results_at, stride_rows;  // of its own heap: stride_rows is 0
};

TensorMap map_of(const u8* base, u64 rows, u64 columns, u32 box_rows, u32 element_bytes = 2,
                 u32 box_bytes = kSwizzleBytes, u64 row_bytes = 0) {
  TensorMap map{};
  map.base = base;
  map.rows = rows;
  map.columns = columns;
  map.box_rows = box_rows;
  map.element_bytes = element_bytes;
  map.box_bytes = box_bytes;
  map.row_bytes = row_bytes == 0 ? columns * element_bytes : row_bytes;
  return map;
}

/// Of rows that experts multiply, whose elements may be codes.
TensorMap rows_map_of(const u8* base, u64 rows, const Gemm& product, u32 box_rows, u32 row_bytes) {
  return map_of(base, rows, product.depth, box_rows, kCoded ? 1 : 2, kSwizzleBytes, row_bytes);
}

/// `stored`: weights are codes, of which kernels decode some; `decoded`: these.
WeightMaps maps_of(const Gemm& first, const Gemm& second, u64 mlps, bool stored, bool decoded,
                   const u8* w1, const u8* w2) {
  const auto map = [&](const u8* base, const Gemm& product, u32 box_rows, u32 deep = 1) {
    if (kTransposed) {
      const bool apart = kGateUp == GateUp::separate && product.activated;
      TensorMap made = map_of(base, mlps * product.depth,
                              apart ? product.columns : weight_rows(product), kTileDepth);
      made.sizes[0] = product.depth;
      return made;
    }
    const bool own = kUpMaps && product.activated;
    const u64 rows = mlps * (own ? product.columns : weight_rows(product));
    const u64 bytes = u64{product.depth} * code_bits(kFormat) / 8;
    const u64 apart = own && kGateUp == GateUp::interleaved ? 2 : 1;  // rows of one kind
    return stored ? map_of(base, rows, bytes, box_rows, 1,
                           decoded ? deep * kCodeBytes : kCodedRowBytes, apart * bytes)
                  : map_of(base, rows, product.depth, box_rows, 2, kSwizzleBytes,
                           apart * product.depth * 2);
  };
  const u32 box_rows = MOEOS_PLANTED(weight_boxes_end_beyond_the_matrix) ? 128 : kWeightBoxRows;
  const u32 deep = kWeightsInRegisters ? kDeepDepth : 1;
  return {map(w1, first, box_rows), map(w1, first, kNarrowBoxRows), map(w2, second, box_rows),
          map(w1, first, kNarrowBoxRows, deep), map(w2, second, box_rows, deep)};
}

RankArguments rank_arguments_of(const RankTensors& t, u8* const* peers, u32 rank, u64 deadline_ns) {
  const HeapPlace shared{t.words_at, t.rows_at, t.results_at, static_cast<u32>(t.stride_rows)};
  const HeapPlace place = t.stride_rows == 0 ? Layout::alone(kGeometry) : shared;
  const Layout layout(kGeometry, place);
  const u32 holder = rank / maximum(1U, kGeometry.slices) % kGeometry.world;
  const u64 experts = kGeometry.first_expert(holder + 1) - kGeometry.first_expert(holder);
  RankArguments a{};
  if (t.rows > 0) {
    a.x = map_of(t.x, t.rows, kShape.hidden, kRouteRows);
    a.x_row = map_of(t.x, t.rows, kShape.hidden, 1);
  }
  a.gate = map_of(t.gate, kRouterRows, kShape.hidden, kRouteColumns, 128 / kGateBoxColumns);
  for (u32 box = 0; box < kCellBoxes; ++box) {
    a.cells[box] = rows_map_of(t.heap + layout.first_cell(), layout.rows(), kFirst,
                               box_height(kCellBoxes, box), kGeometry.sent_bytes);
  }
  for (u32 box = 0; box < kIntermediateBoxes; ++box) {
    a.intermediate[box] = rows_map_of(t.intermediate, kGeometry.intermediate_rows_max(), kSecond,
                                      box_height(kIntermediateBoxes, box), kGeometry.hidden_bytes);
  }
  a.experts = maps_of(kFirst, kSecond, experts, kFormat != WeightFormat::plain, kDecodesExperts,
                      t.w1, t.w2);
  if (kUpMaps) {
    const u64 row_bytes =
        u64{kFirst.depth} * (kFormat == WeightFormat::plain ? 16 : code_bits(kFormat)) / 8;
    const u8* const ups = kGateUp == GateUp::separate ? t.w3 : t.w1 + row_bytes;
    a.ups = maps_of(kFirst, kSecond, experts, kFormat != WeightFormat::plain, kDecodesExperts, ups,
                    t.w2);
  }
  if (kShares) {
    a.shared = maps_of(kSharedFirst, kSharedSecond, kSharedFirst.mlps, kDecodesShared,
                       kDecodesShared, t.shared_w1, t.shared_w2);
    a.shared_gate = map_of(t.shared_gate, 1, kShape.hidden, kSharedGateRows);
    a.shared_between = map_of(t.intermediate + kGeometry.shared_between_at(),
                              kGeometry.shared_between_bytes() / kGeometry.shared_bytes,
                              u64{kSharedFirst.mlps} * kSharedFirst.columns, kTokenBoxRows);
  }
  a.heap = t.heap;
  a.memory = {t.control, t.tables, t.records};
  a.place = place;
  a.identity = static_cast<u32>(t.identity);
  a.leaves_partials = static_cast<u32>(t.leaves_partials);
  a.peers = peers;
  a.intermediate_rows = t.intermediate;
  a.host_failure = reinterpret_cast<Failure*>(t.host_failure);
  a.deadline_ns = deadline_ns;
  a.selection_bias = t.selection_bias;
  a.router_bias = t.router_bias;
  a.expert_scale = t.expert_scale;
  a.b1 = t.b1;
  a.b2 = t.b2;
  a.w1_scale = t.w1_scale;
  a.w2_scale = t.w2_scale;
  a.w1_scale_2 = t.w1_scale_2;
  a.w2_scale_2 = t.w2_scale_2;
  a.shared_w1_scale = t.shared_w1_scale;
  a.shared_w2_scale = t.shared_w2_scale;
  a.shared_w1_scale_2 = t.shared_w1_scale_2;
  a.shared_w2_scale_2 = t.shared_w2_scale_2;
  a.x_rows = t.x;
  a.out = t.out;
  a.topk_ids = t.ids;
  a.topk_weights = t.weights;
  a.token_count = t.token_count;
  a.x_scale = t.x_scale;
  a.rank = rank;
  a.rows = static_cast<u32>(t.rows);
  a.ids_wide = 1;
  a.weight_type = WeightType::float32;
  a.any_ids = static_cast<u32>(t.any_ids);
  return a;
}

/// Of a kernel that saves, or finds what was saved.
void place_saved(SavingArguments& a, const RankTensors& t) {
  a.saved = t.saved;
  a.saved_of_source = static_cast<u32>(t.saved_of_source);
}
void place_saved(RankArguments&, const RankTensors&) {}

#if MOEOS_GRADIENTS
using Launch = GradientLaunch;

constexpr u32 kGradientBlocks = 3;

struct Dimension {
  u64 size;
  u64 stride;  // in rows
  u32 box;
};
TensorMap stored_map_of(const u8* base, u64 columns, const Dimension (&dimensions)[4]) {
  TensorMap map = map_of(base, 0, columns, 0);
  for (u32 d = 0; d < 4; ++d) {
    map.sizes[d] = dimensions[d].size;
    map.strides[d] = dimensions[d].stride;
    map.box[d] = dimensions[d].box;
  }
  return map;
}

GradientArguments arguments_of(const RankTensors& t, u8* const* peers, u32 rank, u64 deadline_ns) {
  GradientArguments a{};
  static_cast<RankArguments&>(a) = rank_arguments_of(t, peers, rank, deadline_ns);
  place_saved(a, t);
  const Layout layout(kGeometry, a.place);
  const u64 experts = t.experts;
  const u32 columns = 2 * kShape.hidden;
  GradientMaps& maps = a.gradients;
  for (u32 box = 0; box < kCellBoxes; ++box) {
    maps.rows[box] = map_of(t.heap + layout.first_cell(), layout.rows(), columns,
                            box_height(kCellBoxes, box), 2, kSwizzleBytes, kGeometry.sent_bytes);
    maps.d_hidden[box] = map_of(t.intermediate + kDHiddenAt, kKeptRows, kFactorColumns,
                                box_height(kCellBoxes, box), 2, kSwizzleBytes, kKeptRowBytes);
  }
  maps.values =
      map_of(t.intermediate, kKeptRows, kKeptColumns, kDepthRows, 2, kSwizzleBytes, kKeptRowBytes);
  maps.inputs = kCopies ? map_of(t.intermediate + kCopiesAt, kKeptRows, columns, kDepthRows, 2,
                                 kSwizzleBytes, kKeptRowBytes)
                        : maps.rows[kCellBoxes - 2];
  constexpr u64 kHidden = kShape.hidden;
  constexpr u64 kInner = kShape.intermediate;
  constexpr bool kSeparate = kGateUp == GateUp::separate;
  // Rows of w1 from one of a kind to the next, and columns of a transposed one.
  constexpr u64 kApart = kUpMaps && !kSeparate ? 2 : 1;
  constexpr u64 kRowColumns = kSeparate ? kInner : kShape.w1_rows();
  const auto gradient_of_w1 = [&](const u8* base) {
    if (kTransposed) {
      TensorMap map =
          stored_map_of(base, kUpGradientMaps ? kInner : kRowColumns,
                        {{4, 2, 4}, {2, 1, 2}, {kHidden / 8, 8, 2}, {experts, kHidden, 1}});
      map.row_bytes = kRowColumns * 2;
      return map;
    }
    TensorMap map = stored_map_of(base, kHidden,
                                  {{kInner / 8, 8, 4},
                                   {2, 1, 2},
                                   {4, 2, 2},
                                   {kUpMaps ? experts : experts * kHalves, kInner, 1}});
    map.row_bytes *= kApart;
    return map;
  };
  const auto rows_of_w1 = [&](const u8* base, u32 box_rows) {
    return map_of(base, experts * (kUpMaps ? kInner : u64{kShape.w1_rows()}), kHidden, box_rows, 2,
                  kSwizzleBytes, kApart * kHidden * 2);
  };
  const u8* const w3 = kSeparate ? t.w3 : t.w1 + (kTransposed ? kInner : kHidden) * 2;
  const u8* const d_w3 =
      kSeparate ? t.d_w3
                : (t.d_w1 == nullptr ? nullptr : t.d_w1 + (kTransposed ? kInner : kHidden) * 2);
  if (kTransposed) {
    maps.w1 = map_of(t.w1, experts * kHidden, kRowColumns, kRowsOfBox);
    a.up_gradients.w1 = map_of(t.w3, experts * kHidden, kRowColumns, kRowsOfBox);
    const Dimension natural[4] = {{2, 1, 2}, {4, 2, 4}, {kInner / 8, 8, 16}, {experts, kInner, 1}};
    const Dimension pairs[4] = {{2, 4, 2}, {4, 1, 4}, {kInner / 8, 8, 16}, {experts, kInner, 1}};
    maps.w2 = stored_map_of(t.w2, kHidden, kColumnsAlternate ? pairs : natural);
    maps.d_w2 = stored_map_of(t.d_w2, kHidden,
                              {{4, 2, 4}, {2, 1, 2}, {kInner / 8, 8, 2}, {experts, kInner, 1}});
  } else {
    maps.w1 = rows_of_w1(t.w1, kValueColumns);
    maps.w1_ordered = rows_of_w1(t.w1, kDepthBoxRows);
    a.up_gradients.w1 = rows_of_w1(w3, kValueColumns);
    a.up_gradients.w1_ordered = rows_of_w1(w3, kDepthBoxRows);
    maps.w2 = map_of(t.w2, experts * kHidden, kInner, kDepthRows);
    maps.d_w2 = stored_map_of(t.d_w2, kInner,
                              {{4, 2, 4}, {2, 1, 2}, {kHidden / 8, 8, 2}, {experts, kHidden, 1}});
  }
  maps.d_w1 = gradient_of_w1(t.d_w1);
  a.up_gradients.d_w1 = gradient_of_w1(d_w3);
  a.d_out = t.d_out;
  a.d_x = t.d_x;
  a.d_topk_weights = reinterpret_cast<float*>(t.d_topk_weights);
  a.d_w1 = t.d_w1;
  a.d_w2 = t.d_w2;
  a.d_w3 = t.d_w3;
  a.d_b1 = t.d_b1;
  a.d_b2 = t.d_b2;
  a.d_x_added = reinterpret_cast<const float*>(t.d_x_added);
  a.d_shared = reinterpret_cast<float*>(t.d_shared);
  a.blocks = kGradientBlocks;
  a.experts = static_cast<u32>(t.experts);
  return a;
}
#else
using Launch = Arguments;

using Given = ForwardArguments<kSaves>::Of;

Given arguments_of(const RankTensors& t, u8* const* peers, u32 rank, u64 deadline_ns) {
  Given a{};
  static_cast<RankArguments&>(a) = rank_arguments_of(t, peers, rank, deadline_ns);
  place_saved(a, t);
  return a;
}
#endif

void launch_call(const Launch& arguments) {
#if MOEOS_GRADIENTS
  moeos_backward(arguments);
#else
  moeos_forward(arguments);
#endif
}

}  // namespace

extern "C" {

u64 emulated_heap_bytes() { return Layout(kGeometry).bytes(); }
/// Makes a rank's control that of one whose next call has this number, as if it had made all
/// before.
void emulated_set_epoch(u8* control, u32 epoch) {
  const RankMemory its(kGeometry, {control, nullptr, nullptr});
  *its.epoch = epoch;
  *its.blocks_ended = u64{epoch - 1} * kBlocks;
  std::fill_n(its.blocks_begun, kBlocks, epoch - 1);
}
u64 emulated_control_bytes() { return RankMemory::bytes_of_parts(kGeometry).control; }
u64 emulated_tables_bytes() { return RankMemory::bytes_of_parts(kGeometry).tables; }
u64 emulated_records_bytes() { return RankMemory::bytes_of_parts(kGeometry).records; }
/// Where a fault plan lies in a layer's records.
u64 emulated_faults_at() {
  return reinterpret_cast<u64>(RankMemory(kGeometry, MemoryParts<u8*>{}).faults);
}
/// Says in a layer's records where its experts are; of one without a table none.
void emulated_place(u8* records, const u32* from, const u32* places) {
  const RankMemory its(kGeometry, {nullptr, nullptr, records});
  std::copy_n(from, kGeometry.placed_experts + 1, its.places_from);
  std::copy_n(places, from[kGeometry.placed_experts], its.places);
}
u64 emulated_intermediate_bytes() { return kGeometry.between_bytes(); }

/// Offset in shared memory of a processor's barriers, by name; for reports.
const char* emulated_barriers() {
  static const std::string text = [] {
    const auto at = [](const char* name, std::size_t offset, u32 count) {
      return std::string(name) + " " + std::to_string(offset) + " " + std::to_string(count) + "\n";
    };
    return at("stage_full", offsetof(Shared, stage_full), kStages) +
           at("stage_empty", offsetof(Shared, stage_empty), kStages) +
           at("slot_full", offsetof(Shared, slot_full), kSlots) +
           at("slot_done", offsetof(Shared, slot_done), kSlots) +
           at("slot_empty", offsetof(Shared, slot_empty), kSlots) +
           at("claim", offsetof(Shared, claim), 1);
  }();
  return text.c_str();
}

/// Runs `launches` launches, launch i from `i * apart_ns` on, as on streams of their own. Returns
/// 0, or 1 with what went wrong in `said`. `ranks`: [launch][rank], see RankTensors. `starved`: a
/// warp that is, or null.
int emulated_call(const RankTensors* ranks, u64 launches, u64 apart_ns, u64 seed, u64 deadline_ns,
                  u64 limit_ns, const emulator::Starved* starved, char* said, u64 said_bytes) {
  // Of each rank, as it counts its peers: from the first with its slice on (Rank::everywhere).
  std::vector<u8*> heaps[kVirtualRanks];
  for (u32 rank = 0; rank < kVirtualRanks; ++rank) {
    // Behind them: where puts go. With remote peers each rank is a node.
    for (u32 peer = 0; peer < 2 * kVirtualRanks; ++peer) {
      u32 number = peer;
      if constexpr (kSliced) {
        number = peer % kGeometry.world * kGeometry.slices +
                 (rank + peer / kGeometry.world) % kGeometry.slices;
      }
      const bool remote = kGeometry.remote != 0 && peer < kVirtualRanks && peer != rank;
      heaps[rank].push_back(remote ? nullptr : ranks[number % kVirtualRanks].heap);
    }
  }
  const auto arguments = std::make_unique<Launch[]>(launches);
  std::vector<std::function<void()>> kernels;
  const u64 begin_ns = emulator::kBeginNs;
  for (u64 launch = 0; launch < launches; ++launch) {
    for (u32 rank = 0; rank < kVirtualRanks; ++rank) {
      arguments[launch].ranks[rank] =
          arguments_of(ranks[launch * kVirtualRanks + rank], heaps[rank].data(), rank, deadline_ns);
    }
    kernels.emplace_back([&arguments, launch, begin_ns, apart_ns] {
      while (emulator::now_ns() < begin_ns + launch * apart_ns) {
        emulator::yield();
      }
      launch_call(arguments[launch]);
    });
  }
  const std::size_t os_bytes = sizeof(OsShared) + OsMemory::bytes(kGeometry);
  try {
    emulator::run({(kGeometry.processors + 1) * kVirtualRanks, kThreads,
                   std::max(sizeof(Shared), os_bytes), kernels, seed, limit_ns,
                   starved == nullptr ? std::nullopt : std::optional(*starved)});
#if MOEOS_GRADIENTS
    for (u32 rank = 0; rank < kVirtualRanks; ++rank) {
      const GradientArguments& its = arguments[launches - 1].ranks[rank];
      emulator::run({kGradientBlocks,
                     kThreads,
                     sizeof(Shared),
                     {[&its] { moeos_weight_gradients(its); }},
                     seed,
                     limit_ns});
    }
#endif
  } catch (const emulator::Fault& fault) {
    std::snprintf(said, said_bytes, "%s", fault.what());
    return 1;
  }
  return 0;
}

}  // extern "C"
