// SPDX-License-Identifier: Apache-2.0
// The sizes of the one layer that this kernel is compiled for. The host passes each by its name
// (Sizes::geometry_text), on the compiler's command line.
//
// A file of its own, because the runtime's headers include it (runtime/words/geometry_of.hpp). Must
// not depend on: the use of sizes.
#pragma once

#include "runtime/words/geometry.hpp"

namespace moeos {

// Designators name members of the innermost base, Dimensions.
inline constexpr Geometry kGeometry{{{MOEOS_GEOMETRY}}};

}  // namespace moeos
