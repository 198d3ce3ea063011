// SPDX-License-Identifier: Apache-2.0
// The sizes of the one layer that this kernel is compiled for, from the compiler's command line.
//
// A file of its own, because the runtime's headers include it (runtime/geometry_of.hpp). May not
// know: how they are used.
#pragma once

#include "runtime/geometry.hpp"

namespace moeos {

inline constexpr Geometry kGeometry{
    MOEOS_WORLD,
    MOEOS_EXPERTS,
    MOEOS_TOP_K,
    MOEOS_MAX_TOKENS,
    MOEOS_HIDDEN * 2,
    MOEOS_INTERMEDIATE * 2,
    static_cast<RowMap>(MOEOS_ROW_MAP),
    MOEOS_CAPACITY,
    MOEOS_CHUNK_ROWS,
    MOEOS_TILE_ROWS,
    MOEOS_ROUTE_TOKENS,
    MOEOS_ROUTE_SLICES,
    MOEOS_KEPT_BYTES,
    MOEOS_GEMM0_PARTS,
    MOEOS_GEMM1_PARTS,
    MOEOS_NARROW_ROWS,
    MOEOS_GEMM0_NARROW_PARTS,
    MOEOS_GEMM1_NARROW_PARTS,
    MOEOS_SEGMENT_ALIGN,
    MOEOS_LARGE_EXPERTS,
    MOEOS_PROCESSORS,
    MOEOS_PROCESSORS,  // couriers: one in each processor block
    MOEOS_TRANSPORT != 0,
    Geometry::kWindowBytes / (MOEOS_HIDDEN * 2),
    MOEOS_ONCE_ROWS,
    MOEOS_ONCE_AFTER,
    MOEOS_SPREAD_TOKENS,
    MOEOS_WHOLE_ROWS,
    MOEOS_TRACE_EVENTS,
    MOEOS_WEIGHT_ON_INPUT,  // alters_rows
};

}  // namespace moeos
