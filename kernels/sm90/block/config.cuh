// SPDX-License-Identifier: Apache-2.0
// What is fixed when a layer's kernel is compiled: its rules and the tiles, from the compiler's
// command line.
//
// host/moeos/compile/jit.py defines the MOEOS_ macros; only this file and geometry.cuh read them.
#pragma once

#include "kernels/shape.hpp"
#include "kernels/sm90/block/geometry.cuh"
#include "kernels/sm90/ptx/element.cuh"
#include "runtime/health/with_faults.hpp"
#include "runtime/platform/cuda/platform.hpp"
#if MOEOS_TRANSPORT == 1
#include "runtime/platform/cuda/mapped_transport.hpp"
#elif MOEOS_TRANSPORT == 2
#include "runtime/platform/cuda/nvshmem_transport.hpp"
#endif

// Inlined, however long: a kernel that calls a function has a stack, and spills registers to it.
#define MOEOS_INLINED __attribute__((always_inline)) inline

namespace moeos::sm90 {

/// The way to remote peers: none, stores, or NVSHMEM.
#if MOEOS_TRANSPORT == 0
using Transport = cuda::NoTransport;
#elif MOEOS_TRANSPORT == 1
using Transport = cuda::MappedTransport;
#else
using Transport = cuda::NvshmemTransport;
#endif
#if MOEOS_FAULTS
using Machine = WithFaults<cuda::Machine<Transport, kGeometry.ranks()>>;
#else
using Machine = cuda::Machine<Transport, kGeometry.ranks()>;
#endif

inline constexpr LayerShape kShape{MOEOS_SHAPE};
inline constexpr Activation kActivation = kShape.activation;

/// Slots of an expert for each token of a source, MoEConfig.capacity_ratio; 0 / 0 when dropless.
inline constexpr u64 kCapacityNumerator = MOEOS_CAPACITY_NUMERATOR;
inline constexpr u64 kCapacityDenominator = MOEOS_CAPACITY_DENOMINATOR;

/// Whether experts have biases, and whether the expert selection has one.
inline constexpr bool kBias = MOEOS_BIAS != 0;
inline constexpr bool kSelectionBias = MOEOS_SELECTION_BIAS != 0;
/// Whether gate logits have a bias, experts a factor, and whether the gate may weigh a caller's
/// ids.
inline constexpr bool kRouterBias = MOEOS_ROUTER_BIAS != 0;
inline constexpr bool kExpertScale = MOEOS_EXPERT_SCALE != 0;
inline constexpr bool kWeighsGiven = MOEOS_WEIGHS_GIVEN != 0;

/// Virtual ranks in one launch; 1 when each rank has a GPU.
inline constexpr u32 kVirtualRanks = MOEOS_VIRTUAL_RANKS;

/// Whether this is the kernel of a gradient call (backward.cu).
inline constexpr bool kGradients = MOEOS_GRADIENTS != 0;
/// Whether a forward call saves values before the activation, or a gradient call finds them saved
/// (saved_rows.cuh).
inline constexpr bool kSaves = MOEOS_SAVES != 0;

#if MOEOS_FLOAT16
using Element = Float16;
#else
using Element = Bfloat16;
#endif

/// Whether rows and weights are multiplied as codes, W8A8 or W4A8 (coded_products.cuh).
inline constexpr bool kCoded = kShape.codes_rows();
/// Whether such weights have 4 bits (W4A8). Then tokens are the columns of products
/// (token_columns.cuh).
inline constexpr bool kTokensAreColumns = kCoded && !is_fp8(kShape.weight_format);
/// Whether experts' results return quantized.
inline constexpr bool kCodedResults = kShape.codes_results();
static_assert(!kCodedResults || kCoded);

// The tile: 128 rows, 256 columns, 64 deep; each of two consumer warpgroups computes 64 x 256. A
// tile of codes has half as many columns and twice the depth: the sums of one scale group need
// registers, too.
inline constexpr u32 kTileRows = 128;
inline constexpr u32 kStageColumns = 256;  // rows of weights for which a stage has room
inline constexpr u32 kTileColumns = kCoded ? kStageColumns / 2 : kStageColumns;
inline constexpr u32 kTileDepth = 64;
inline constexpr u32 kConsumers = 2;  // warpgroups
inline constexpr u32 kConsumerRows = kTileRows / kConsumers;
inline constexpr u32 kStages = 4;
inline constexpr u32 kSwizzleBytes = 128;  // one row of a stage: 64 elements, or 128 codes
inline constexpr u32 kCodedDepth = kSwizzleBytes;
static_assert(kTileDepth * 2 == kSwizzleBytes && kGeometry.tile_rows == kTileRows);

// The narrow tile, for few rows: 64 rows, 128 columns, and steps of twice the depth in the same
// stages. One warpgroup computes it, and still waits for the weights: a step's products take a
// quarter of the time in which memory brings the step's 32 KB to every processor.
inline constexpr u32 kNarrowRows = kConsumerRows;
inline constexpr u32 kNarrowColumns = kStageColumns / 2;
inline constexpr u32 kNarrowDepth = 2;  // steps of a wide tile in one stage
static_assert(kGeometry.narrow_rows == (kGradients ? 0 : kNarrowRows));

/// Columns of a product's result in one part. A gated part of GEMM0 computes two for each: a gate
/// and an up column.
constexpr u32 product0_columns(u32 tile_columns) {
  return kShape.gated() ? tile_columns / 2 : tile_columns;
}
/// Whether Route makes the rows that are sent (sent_rows.cuh).
inline constexpr bool kAltersRows = kCoded || kShape.weight_on_input || kGradients;
static_assert((kGeometry.alters_rows != 0) == kAltersRows);
/// Bytes of a token's row of the output, and of each unquantized row that is added up for it.
inline constexpr u32 kOutputBytes = kGradients ? kShape.hidden * 2 : kGeometry.row_bytes;
static_assert(!kCodedResults || kGeometry.returned_bytes == coded_result_bytes(kShape.hidden));
inline constexpr bool kShares = kShape.shared_experts > 0;
/// Whether ranks hold slices of experts, so that Combine adds up the partial sums of several ranks.
inline constexpr bool kSliced = kGeometry.sliced();
/// Whether such sums are gradients, which are fp32 until they are complete.
inline constexpr bool kSumsGradients = kSliced && kGradients;
static_assert(!kSliced || kShape.zero_experts == 0, "each slice would add the token itself");
static_assert(!kSliced || !kCodedResults, "each slice would round its part of a result");
/// Where the caller's matrices have gate rows and up rows, and whether a row belongs to an input.
inline constexpr GateUp kGateUp = kShape.gate_up;
inline constexpr bool kTransposed = kShape.transposed;
static_assert(!kShares || (kGateUp == GateUp::concatenated && !kTransposed),
              "a call of moeos.Experts has no shared experts");
/// The formats of w1 and w2 in memory, and whether they are dequantized on their way
/// (stored_weights.cuh); and whether the shared experts' are.
inline constexpr WeightFormat kFormat = kShape.weight_format;
inline constexpr bool kDecodesExperts = kFormat != WeightFormat::plain && !kCoded;
inline constexpr bool kDecodesShared = kShape.shared_weight_format != WeightFormat::plain;
static_assert(!kDecodesShared || (kShares && kShape.shared_weight_format == kFormat));
static_assert(!kTransposed || kFormat == WeightFormat::plain);
/// Whether gate rows and up rows lie apart, so that each have tensor maps of their own; and whether
/// gates and ups alternate in a box of weights.
inline constexpr bool kUpMaps =
    kGateUp == GateUp::separate || (kGateUp == GateUp::interleaved && !kTransposed);
inline constexpr bool kColumnsAlternate = kGateUp == GateUp::interleaved && kTransposed;
static_assert(kGateUp == GateUp::concatenated || kShape.gated());
inline constexpr bool kDecodes = kDecodesExperts || kDecodesShared;
/// Bytes of a row of weights in a stage, as it lands.
inline constexpr u32 kCodeBytes = kDecodes ? kTileDepth * code_bits(kFormat) / 8 : kSwizzleBytes;
/// Whether narrow tiles of few rows dequantize their weights in registers
/// (weights_in_registers.cuh).
inline constexpr bool kWeightsInRegisters = kDecodesExperts && !is_fp8(kFormat);
/// Rows of such a tile, at most. Each warp reads them all: with more rows, shared memory would
/// bound a step: with 64 rows the other loop was 4 % faster.
inline constexpr u32 kWarpTokens = 32;
/// The depth of its steps: codes and so few rows leave room in a stage. A row's codes of a step are
/// in one box: TMA takes 1.6 to 1.7 ns for each row of a narrow box.
inline constexpr u32 kDeepDepth = 4;
static_assert(kDeepDepth * kWarpTokens <= kTileRows);
static_assert(!kWeightsInRegisters || kDeepDepth * kCodeBytes == kSwizzleBytes);
/// Bytes of a step's row of weights that are multiplied by quantized rows.
inline constexpr u32 kCodedRowBytes = kCodedDepth * code_bits(kFormat) / 8;
static_assert(!kCoded || (kFormat != WeightFormat::plain && kShape.hidden % kTokenGroup == 0 &&
                          kShape.intermediate % kHiddenGroup == 0));
static_assert(kGeometry.shares() == kShares);

/// Whether every part has all the columns of a tile. Where there are more columns, but no multiple,
/// the last part overlaps the one before, and both store the same values there.
constexpr bool fills_parts(u32 values) { return values >= product0_columns(kTileColumns); }
/// In a gradient call no parts overlap.
inline constexpr bool kWholeParts =
    kGradients ? kShape.hidden % kTileColumns == 0
               : kShape.hidden >= kTileColumns && fills_parts(kShape.intermediate) &&
                     (!kShares || fills_parts(kShape.shared_intermediate));
inline constexpr bool kPartsOverlap =
    kWholeParts && (kShape.hidden % kTileColumns != 0 ||
                    kShape.intermediate % product0_columns(kTileColumns) != 0 ||
                    (kShares && kShape.shared_intermediate % product0_columns(kTileColumns) != 0));
/// The first of a part's `columns` columns, out of `all`.
constexpr u32 first_column(u32 part, u32 columns, u32 all) {
  return kPartsOverlap ? minimum(part * columns, all - columns) : part * columns;
}

/// Rows of a box of consecutive tokens, and of a box of the shared experts' gate, of which all rows
/// but the first are zeros.
inline constexpr u32 kTokenBoxRows = kNarrowRows;
static_assert(kTokenBoxRows == kTileRows / 2, "Geometry::shared_between_bytes has whole ones");
inline constexpr u32 kSharedGateRows = 8;

// Route: a tile of 64 rows and of a bank of experts; each consumer warpgroup takes half of the
// depth, or half of the experts of an fp32 router (fp32_router.cuh). A block has as many tokens, or
// fewer (the tile's other rows are then unused). All experts are one bank, if a tile has columns
// for them; otherwise each bank fills a tile.
inline constexpr u32 kRouteRows = 64;
inline constexpr u32 kRouteTokens = kGeometry.route_tokens;  // at most
inline constexpr u32 kRouterRows = kGeometry.routed_experts() + kShape.zero_experts;
inline constexpr u32 kRouteColumns = kRouterRows <= 64 ? 64 : (kRouterRows <= 128 ? 128 : 256);
inline constexpr u32 kRouteBanks = ceil_div(kRouterRows, kRouteColumns);
inline constexpr u32 kLogits = kRouteBanks * kRouteColumns;  // of a token, including those of no
                                                             // expert
static_assert(kRouteTokens <= kRouteRows);
/// Entries by which a block's pairs are sorted: at least as many as logits.
constexpr u32 sorted_places() { return maximum(kLogits, kGeometry.experts); }
// Boxes of the router's weights in one stage, along the depth: as many as fit, because Route waits
// for loads, not for products.
inline constexpr u32 kRouteDepth = kRouteColumns <= 128 ? 2 : 1;
inline constexpr u32 kGateBoxColumns = kSwizzleBytes / (kShape.fp32_router ? 4 : 2);
inline constexpr u32 kRouteStepColumns = kRouteDepth * kGateBoxColumns;
inline constexpr u32 kTokenBoxes = ceil_div(kRouteStepColumns, kTileDepth);
// Accumulators of a thread: for 64 tokens and all experts, or for 64 experts and 64 tokens, several
// times.
inline constexpr u32 kTileSums = 32;
inline constexpr u32 kRouteGroups = minimum(kConsumers, kRouteColumns / 64);
inline constexpr u32 kGroupTiles = kRouteColumns / 64 / kRouteGroups;
inline constexpr u32 kRouteSums = kShape.fp32_router ? kGroupTiles * kTileSums : kRouteColumns / 2;

}  // namespace moeos::sm90
