// SPDX-License-Identifier: Apache-2.0
// Where code that serves every layer finds the sizes of its own: in an object; and in a kernel that
// is compiled for one layer nowhere, because there they are constants.
//
// Every quotient by a number of experts, ranks or rows in the runtime is then a shift or a
// multiplication, and loops over ranks unroll. A kernel defines MOEOS_FIXED_GEOMETRY as the file
// that says what moeos::kGeometry is. May not know: who asks.
#pragma once

#include "runtime/words/geometry.hpp"

#ifdef MOEOS_FIXED_GEOMETRY
#include MOEOS_FIXED_GEOMETRY
#endif

namespace moeos {

#ifdef MOEOS_FIXED_GEOMETRY

class GeometryOf {
 public:
  /// Of kGeometry.
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
