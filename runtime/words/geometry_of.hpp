// SPDX-License-Identifier: Apache-2.0
// The sizes of a layer for code that serves every layer: in an object; a kernel that is compiled
// for one layer has them as constants instead.
//
// Every quotient by a number of experts, ranks or rows in the runtime is then a shift or a
// multiplication, and loops over ranks unroll. A kernel defines MOEOS_FIXED_GEOMETRY as the file
// that defines moeos::kGeometry. Must not depend on: its callers.
#pragma once

#include "runtime/words/geometry.hpp"

#ifdef MOEOS_FIXED_GEOMETRY
#include MOEOS_FIXED_GEOMETRY
#endif

namespace moeos {

#ifdef MOEOS_FIXED_GEOMETRY

class GeometryOf {
 public:
  /// Takes kGeometry, whatever is passed.
  explicit constexpr GeometryOf(const Geometry&) {}
  static constexpr const Geometry& get() { return kGeometry; }
};

#else

class GeometryOf {
 public:
  /// `geometry` must outlive this object.
  explicit constexpr GeometryOf(const Geometry& geometry) : geometry_(&geometry) {}
  constexpr const Geometry& get() const { return *geometry_; }

 private:
  const Geometry* geometry_;
};

#endif

}  // namespace moeos
