// SPDX-License-Identifier: Apache-2.0
// The body of gemm.hpp's two functions, compiled once for each instruction set.
//
// Knows vectors, registers and caches. Included only by gemm_{portable,avx2,avx512}.cpp, after they
// have chosen the instruction set and defined
//   MOEOS_GEMM_TABLE            the name of the table to export,
//   MOEOS_GEMM_INSTRUCTION_SET  its name for people,
//   MOEOS_GEMM_LANES            floats in a vector: 4, 8 or 16.
// All but the table has internal linkage, and no inline function of the standard library is called:
// the linker would be free to keep this instruction set's copy of it for the whole program. What
// gemm.hpp includes, such as element_formats.hpp, was compiled before the choice.
//
// Vectors run along rows: a panel [depth][8] gives the rows of one k in one load, and weights are
// broadcast one by one. So weights are read along k. fp32 weights that lie along k are read in
// place; others are first converted, a slab at a time. A tile of panels x columns of sums stays in
// registers over kDepthBlock steps of k, then is transposed and added to `out`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/twin/gemm.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bfloat16 is widened by interleaving");

namespace moeos::twin::kernel {
namespace {

constexpr unsigned kLanes = MOEOS_GEMM_LANES;

// Summands that are added up on their own before they join the total. Over this many k, the rows of
// a tile share the first-level cache with a slab of weights.
constexpr unsigned kDepthBlock = 256;

// Columns that are finished for all rows before the next columns begin.
constexpr unsigned kSlabColumns = 16;

// Panels of a full tile. Its sums take 8, 8 and 24 vector registers for 4, 8 and 16 lanes. (With 3
// panels of 8 lanes the tile needs all 16 registers: no faster under gcc, and clang spills.)
constexpr unsigned kTilePanels = kLanes == 4 ? 1 : kLanes == 8 ? 2 : 6;

typedef float Vector __attribute__((vector_size(sizeof(float) * kLanes)));
typedef float Float4 __attribute__((vector_size(16)));
typedef std::uint32_t Bits4 __attribute__((vector_size(16)));
typedef std::uint16_t Half4 __attribute__((vector_size(8)));

template <typename Value>
[[gnu::always_inline]] inline Value load(const void* from) {
  Value value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename Value>
[[gnu::always_inline]] inline void store(void* to, Value value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// Four elements as binary32.
[[gnu::always_inline]] inline Float4 widen(const float* from) { return load<Float4>(from); }
[[gnu::always_inline]] inline Float4 widen(const std::uint16_t* from) {
  const Half4 zero = {};
  return reinterpret_cast<Float4>(
      __builtin_shufflevector(zero, load<Half4>(from), 0, 4, 1, 5, 2, 6, 3, 7));
}

[[gnu::always_inline]] inline void transpose(Float4 (&m)[4]) {
  const Float4 low01 = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5);
  const Float4 high01 = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7);
  const Float4 low23 = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5);
  const Float4 high23 = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
  m[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  m[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  m[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  m[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

template <typename Storage>
void pack_rows_of(const void* first_row, std::size_t row_stride_bytes, unsigned rows,
                  unsigned depth, float* panel) {
  const char* const first = static_cast<const char*>(first_row);
  const Storage* row[kPanelRows];
  Bits4 present[kPanelRows];  // all ones, or zero: then the first row is read instead and masked
  for (unsigned r = 0; r < kPanelRows; ++r) {
    row[r] = reinterpret_cast<const Storage*>(first + (r < rows ? r * row_stride_bytes : 0));
    const std::uint32_t bits = r < rows ? 0xffffffffu : 0u;
    present[r] = Bits4{bits, bits, bits, bits};
  }
  for (unsigned k = 0; k < depth; k += 4) {
#pragma GCC unroll 2
    for (unsigned r = 0; r < kPanelRows; r += 4) {
      Float4 block[4];
#pragma GCC unroll 4
      for (unsigned i = 0; i < 4; ++i)
        block[i] = reinterpret_cast<Float4>(reinterpret_cast<Bits4>(widen(row[r + i] + k)) &
                                            present[r + i]);
      transpose(block);
#pragma GCC unroll 4
      for (unsigned i = 0; i < 4; ++i) store(panel + std::size_t{k + i} * kPanelRows + r, block[i]);
    }
  }
}

void pack_rows(Element element, const void* first_row, std::size_t row_stride_bytes, unsigned rows,
               unsigned depth, float* panel) {
  if (element == Element::kFloat32)
    pack_rows_of<float>(first_row, row_stride_bytes, rows, depth, panel);
  else
    pack_rows_of<std::uint16_t>(first_row, row_stride_bytes, rows, depth, panel);
}

// Vectors that hold one k of a tile's rows.
constexpr unsigned tile_vectors(unsigned panels) {
  return (panels * kPanelRows + kLanes - 1) / kLanes;
}

// Columns of a tile: enough for 8 independent vectors of sums, which hide the latency of a
// multiply-add (4 cycles, with 2 begun in each).
constexpr unsigned tile_columns(unsigned panels) {
  return kLanes < 16 && tile_vectors(panels) > 1 ? 4 : 8;
}

// Vector `v` of the tile's rows at the k that `at` points to in the first panel.
template <unsigned kPanels>
[[gnu::always_inline]] inline Vector load_rows(const float* at, std::size_t panel_stride,
                                               unsigned v) {
#if MOEOS_GEMM_LANES == 16
  // Two panels. An odd tile's last panel is taken twice, and the second result is dropped.
  typedef float Float8 __attribute__((vector_size(32)));
  const unsigned second = 2 * v + 1 < kPanels ? 2 * v + 1 : 2 * v;
  return __builtin_shufflevector(load<Float8>(at + 2 * v * panel_stride),
                                 load<Float8>(at + second * panel_stride), 0, 1, 2, 3, 4, 5, 6, 7,
                                 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const unsigned row = v * kLanes;
  return load<Vector>(at + row / kPanelRows * panel_stride + row % kPanelRows);
#endif
}

// Sums `depth` steps for kPanels panels and tile_columns(kPanels) columns, and stores them to
// `out` (first) or adds them to it.
template <unsigned kPanels>
void compute_tile(const float* panels, std::size_t panel_stride, const float* weight,
                  std::size_t weight_stride, unsigned depth, bool first, float* out,
                  std::size_t out_stride) {
  constexpr unsigned kVectors = tile_vectors(kPanels);
  constexpr unsigned kColumns = tile_columns(kPanels);
  Vector sums[kColumns][kVectors] = {};
  for (unsigned k = 0; k < depth; ++k) {
    Vector rows[kVectors];
#pragma GCC unroll 3
    for (unsigned v = 0; v < kVectors; ++v)
      rows[v] = load_rows<kPanels>(panels + std::size_t{k} * kPanelRows, panel_stride, v);
#pragma GCC unroll 8
    for (unsigned n = 0; n < kColumns; ++n) {
      const float w = weight[n * weight_stride + k];
#pragma GCC unroll 3
      for (unsigned v = 0; v < kVectors; ++v) sums[n][v] += rows[v] * w;
    }
  }

  float tile[kColumns][kVectors * kLanes];
#pragma GCC unroll 8
  for (unsigned n = 0; n < kColumns; ++n)
#pragma GCC unroll 3
    for (unsigned v = 0; v < kVectors; ++v) store(&tile[n][v * kLanes], sums[n][v]);
  for (unsigned r = 0; r < kPanels * kPanelRows; r += 4) {
    for (unsigned n = 0; n < kColumns; n += 4) {
      Float4 block[4];
      for (unsigned i = 0; i < 4; ++i) block[i] = load<Float4>(&tile[n + i][r]);
      transpose(block);
      for (unsigned i = 0; i < 4; ++i) {
        float* const to = out + (r + i) * out_stride + n;
        store(to, first ? block[i] : load<Float4>(to) + block[i]);
      }
    }
  }
}

// Computes kPanels panels by `columns` columns, or fewer panels if only panel_count are left.
template <unsigned kPanels>
void compute_tiles(unsigned panel_count, const float* panels, std::size_t panel_stride,
                   const float* weight, std::size_t weight_stride, unsigned columns, unsigned depth,
                   bool first, float* out, std::size_t out_stride) {
  if constexpr (kPanels > 1) {
    if (panel_count < kPanels)
      return compute_tiles<kPanels - 1>(panel_count, panels, panel_stride, weight, weight_stride,
                                        columns, depth, first, out, out_stride);
  }
  for (unsigned n = 0; n < columns; n += tile_columns(kPanels))
    compute_tile<kPanels>(panels, panel_stride, weight + n * weight_stride, weight_stride, depth,
                          first, out + n, out_stride);
}

struct Slab {
  const float* weight;
  std::size_t stride;
};

template <typename Storage>
const Storage* first_of(const Weights& weights, unsigned n, unsigned k) {
  return static_cast<const Storage*>(weights.data) + n * weights.stride + k * weights.step;
}

// The weights of a slab as float: in place, or in `buffer`. The first is row n, column k.
Slab widen_floats(const Weights& weights, unsigned n, unsigned k, unsigned, unsigned, float*) {
  return {first_of<float>(weights, n, k), weights.stride};
}
// widen_floats where a row's elements are neighbours.
template <typename Storage>
Slab widen_along(const Weights& weights, unsigned n, unsigned k, unsigned columns, unsigned depth,
                 float* buffer) {
  const Storage* const first = first_of<Storage>(weights, n, k);
  for (unsigned c = 0; c < columns; ++c) {
    const Storage* const row = first + c * weights.stride;
#pragma GCC unroll 8
    for (unsigned i = 0; i < depth; i += 4) store(buffer + c * kDepthBlock + i, widen(row + i));
  }
  return {buffer, kDepthBlock};
}
// widen_floats where elements of neighbouring rows are neighbours.
template <typename Storage>
Slab widen_across(const Weights& weights, unsigned n, unsigned k, unsigned columns, unsigned depth,
                  float* buffer) {
  const Storage* const first = first_of<Storage>(weights, n, k);
  for (unsigned i = 0; i < depth; i += 4)
    for (unsigned c = 0; c < columns; c += 4) {
      Float4 block[4];
#pragma GCC unroll 4
      for (unsigned j = 0; j < 4; ++j) block[j] = widen(first + (i + j) * weights.step + c);
      transpose(block);
#pragma GCC unroll 4
      for (unsigned j = 0; j < 4; ++j) store(buffer + (c + j) * kDepthBlock + i, block[j]);
    }
  return {buffer, kDepthBlock};
}

// widen_floats where no elements are neighbours.
template <typename Storage>
Slab widen_apart(const Weights& weights, unsigned n, unsigned k, unsigned columns, unsigned depth,
                 float* buffer) {
  const Storage* const first = first_of<Storage>(weights, n, k);
  for (unsigned i = 0; i < depth; ++i)
    for (unsigned c = 0; c < columns; ++c) {
      const Storage weight = first[c * weights.stride + i * weights.step];
      if constexpr (sizeof(Storage) == sizeof(float))
        buffer[c * kDepthBlock + i] = weight;
      else
        buffer[c * kDepthBlock + i] = bf16(weight);
    }
  return {buffer, kDepthBlock};
}

float scale_at(const Weights& weights, std::size_t index) {
  const char* const at =
      static_cast<const char*>(weights.scales) + index * scale_bytes(weights.format);
  switch (weights.format) {
    case WeightFormat::mxfp4:
      return e8m0(load<std::uint8_t>(at));
    case WeightFormat::nvfp4:
      return e4m3(load<std::uint8_t>(at));
    case WeightFormat::int4_group32:
      return bf16(load<std::uint16_t>(at));
    default:
      return load<float>(at);
  }
}

// Dequantizes codes. kNumbers: converts a number of codes to floats, without scales.
template <void (*kNumbers)(const std::uint8_t*, unsigned, float*)>
Slab widen_codes(const Weights& weights, unsigned n, unsigned k, unsigned columns, unsigned depth,
                 float* buffer) {
  const auto* const codes = static_cast<const std::uint8_t*>(weights.data);
  const unsigned length = static_cast<unsigned>(weights.stride) / weights.apart;
  const unsigned span = scale_columns(weights.format, length);
  const unsigned scales = scales_of_row(weights.format, length) * weights.apart;
  for (unsigned c = 0; c < columns; ++c) {
    float* const to = buffer + c * kDepthBlock;
    kNumbers(codes + ((n + c) * weights.stride + k) * code_bits(weights.format) / 8, depth, to);
    const std::size_t first = std::size_t{scale_row(weights.format, n + c)} * scales;
    for (unsigned i = 0; i < depth;) {
      const unsigned left = span - (k + i) % span;
      const unsigned end = depth - i < left ? depth : i + left;
      const float scale = scale_at(weights, first + (k + i) / span);
      for (; i < end; ++i) to[i] = to[i] * scale * weights.scale_2;
    }
    if (weights.element == Element::kBfloat16)
      for (unsigned i = 0; i < depth; ++i) to[i] = bf16(to_bf16(to[i]));
  }
  return {buffer, kDepthBlock};
}

void numbers_of_e4m3(const std::uint8_t* codes, unsigned count, float* to) {
  for (unsigned i = 0; i < count; ++i) to[i] = e4m3(codes[i]);
}
template <float (*kNumber)(u32)>
void numbers_of_halves(const std::uint8_t* codes, unsigned count, float* to) {
  for (unsigned i = 0; i < count / 2; ++i) {
    to[2 * i] = kNumber(codes[i]);
    to[2 * i + 1] = kNumber(u32{codes[i]} >> 4);
  }
}

template <typename Storage>
decltype(&widen_floats) widen_plain(const Weights& weights) {
  return weights.step == 1     ? widen_along<Storage>
         : weights.stride == 1 ? widen_across<Storage>
                               : widen_apart<Storage>;
}

decltype(&widen_floats) widen_of(const Weights& weights) {
  switch (weights.format) {
    case WeightFormat::plain:
      if (weights.element == Element::kBfloat16) return widen_plain<std::uint16_t>(weights);
      return weights.step == 1 && weights.rest == nullptr ? widen_floats
                                                          : widen_plain<float>(weights);
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
      return widen_codes<numbers_of_halves<e2m1>>;
    case WeightFormat::int4_group32:
      return widen_codes<numbers_of_halves<int4>>;
    default:
      return widen_codes<numbers_of_e4m3>;
  }
}

void multiply(const float* panels, unsigned panel_count, unsigned depth, const Weights& weights,
              unsigned first_row, unsigned columns, float* out, std::size_t out_stride) {
  alignas(64) float buffer[kSlabColumns * kDepthBlock];
  const auto widen_slab = widen_of(weights);
  Weights rest = weights;
  rest.data = weights.rest;
  const unsigned rest_from = weights.rest == nullptr ? depth : weights.rest_from;
  const std::size_t panel_stride = panel_floats(depth);
  for (unsigned n = 0; n < columns; n += kSlabColumns) {
    const unsigned slab_columns = columns - n < kSlabColumns ? columns - n : kSlabColumns;
    for (unsigned k = 0; k < depth; k += kDepthBlock) {
      const unsigned slab_depth = depth - k < kDepthBlock ? depth - k : kDepthBlock;
      const unsigned left = k < rest_from ? rest_from - k : 0;
      const unsigned before = left < slab_depth ? left : slab_depth;
      Slab slab = {buffer, kDepthBlock};
      if (before > 0) slab = widen_slab(weights, first_row + n, k, slab_columns, before, buffer);
      if (before < slab_depth)
        widen_slab(rest, first_row + n, k + before - rest_from, slab_columns, slab_depth - before,
                   buffer + before);
      for (unsigned panel = 0; panel < panel_count; panel += kTilePanels)
        compute_tiles<kTilePanels>(
            panel_count - panel, panels + panel * panel_stride + std::size_t{k} * kPanelRows,
            panel_stride, slab.weight, slab.stride, slab_columns, slab_depth, k == 0,
            out + std::size_t{panel} * kPanelRows * out_stride + n, out_stride);
    }
  }
}

}  // namespace
}  // namespace moeos::twin::kernel

namespace moeos::twin {

extern const GemmKernels MOEOS_GEMM_TABLE;
const GemmKernels MOEOS_GEMM_TABLE = {MOEOS_GEMM_INSTRUCTION_SET, kernel::pack_rows,
                                      kernel::multiply};

}  // namespace moeos::twin
