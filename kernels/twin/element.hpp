// SPDX-License-Identifier: Apache-2.0
// Storage types of the twin and their conversion to and from fp32.
#pragma once

#include <cstddef>

#include "kernels/element_formats.hpp"
#include "kernels/twin/gemm.hpp"
#include "runtime/words/base.hpp"

namespace moeos::twin {

constexpr std::size_t size_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

/// A read-only row-major array in its storage type.
class ConstElements {
 public:
  ConstElements(Element element, const void* data)
      : element_(element), data_(static_cast<const u8*>(data)) {}

  explicit operator bool() const { return data_ != nullptr; }
  const void* at(u64 index) const { return data_ + index * size_of(element_); }
  float operator[](u64 index) const {
    return element_ == Element::kFloat32 ? reinterpret_cast<const float*>(data_)[index]
                                         : bf16(reinterpret_cast<const u16*>(data_)[index]);
  }

 private:
  Element element_;
  const u8* data_;
};

/// Writes `count` fp32 values in the storage type.
inline void store(Element element, const float* values, u32 count, void* destination) {
  if (element == Element::kFloat32) {
    auto* out = static_cast<float*>(destination);
    for (u32 i = 0; i < count; ++i) {
      out[i] = values[i];
    }
  } else {
    auto* out = static_cast<u16*>(destination);
    for (u32 i = 0; i < count; ++i) {
      out[i] = to_bf16(values[i]);
    }
  }
}

}  // namespace moeos::twin
