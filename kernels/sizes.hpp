// SPDX-License-Identifier: Apache-2.0
// The numbers of a layer that its machine is made for, as the host passes them on.
//
// One type for both Python modules: `_runtime` makes it, `_twin` takes it. Must not depend on:
// Python.
#pragma once

#include "kernels/shape.hpp"
#include "runtime/words/geometry.hpp"

namespace moeos {

struct Sizes {
  Geometry geometry;
  LayerShape shape;
};

}  // namespace moeos
