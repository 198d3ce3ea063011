// SPDX-License-Identifier: Apache-2.0
// Checks the twin's matrix product in every build that this processor runs. Knows only gemm.hpp,
// and codes from their definitions.
//
// From the root of the repository (add -fsanitize=address,undefined to check the buffers' bounds):
//   g++ -std=c++20 -O3 -Wall -Wextra -Werror -I. tests/native/test_gemm.cpp
//       kernels/twin/gemm.cpp kernels/twin/gemm_portable.cpp kernels/twin/gemm_avx2.cpp
//       kernels/twin/gemm_avx512.cpp -o test_gemm && ./test_gemm
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/twin/gemm.hpp"
#include "tests/native/codes.hpp"

namespace {

using moeos::WeightFormat;
using moeos::twin::Element;
using moeos::twin::GemmKernels;
using moeos::twin::kPanelRows;
using moeos::twin::panel_floats;
using moeos::twin::Weights;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string checking;  // what is being checked, for the message

void require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "test_gemm: %s: not true that %s\n", checking.c_str(), claim);
  std::exit(1);
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// A row-major matrix in its storage type. Between its rows lie `gap` elements that are NaN, and
// the allocation ends with the last row's last element.
class Matrix {
 public:
  Matrix(Element element, unsigned rows, unsigned columns, unsigned gap)
      : element_(element),
        rows_(rows),
        columns_(columns),
        stride_(columns + gap),
        bytes_(((rows - 1) * stride_ + columns) * element_bytes()) {
    for (std::size_t i = 0; i < bytes_.size() / element_bytes(); ++i) put(i, kNan);
  }

  Element element() const { return element_; }
  unsigned rows() const { return rows_; }
  unsigned columns() const { return columns_; }
  std::size_t stride() const { return stride_; }
  std::size_t element_bytes() const { return element_ == Element::kFloat32 ? 4 : 2; }
  const void* row(unsigned r) const { return bytes_.data() + r * stride_ * element_bytes(); }
  Weights weights() const { return {element_, bytes_.data(), stride_}; }

  void set(unsigned r, unsigned c, float value) { put(r * stride_ + c, value); }

  float get(unsigned r, unsigned c) const {
    std::uint32_t bits = 0;
    const unsigned char* from = bytes_.data() + (r * stride_ + c) * element_bytes();
    if (element_ == Element::kFloat32) {
      std::memcpy(&bits, from, 4);
    } else {
      std::uint16_t upper;
      std::memcpy(&upper, from, 2);
      bits = std::uint32_t{upper} << 16;
    }
    return std::bit_cast<float>(bits);
  }

 private:
  // bfloat16 by truncation: the tests compare with what was stored, not with what was meant.
  void put(std::size_t index, float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto upper = static_cast<std::uint16_t>(bits >> 16);
    unsigned char* to = bytes_.data() + index * element_bytes();
    if (element_ == Element::kFloat32)
      std::memcpy(to, &bits, 4);
    else
      std::memcpy(to, &upper, 2);
  }

  Element element_;
  unsigned rows_;
  unsigned columns_;
  std::size_t stride_;
  std::vector<unsigned char> bytes_;
};

// Integers from -4 to 4: every sum in these tests is exact in fp32, in whatever order it is taken.
void fill_integers(Matrix& matrix, unsigned seed) {
  std::mt19937 random(seed);
  for (unsigned r = 0; r < matrix.rows(); ++r)
    for (unsigned c = 0; c < matrix.columns(); ++c)
      matrix.set(r, c, static_cast<float>(random() % 9) - 4);
}

// Reals between -1 and 1: sums round, so that their bits show the order of summation.
void fill_reals(Matrix& matrix, unsigned seed) {
  std::mt19937 random(seed);
  for (unsigned r = 0; r < matrix.rows(); ++r)
    for (unsigned c = 0; c < matrix.columns(); ++c)
      matrix.set(r, c, static_cast<float>(random() % 65536) / 32768 - 1);
}

// Panels of rows first, first + step, first + 2 * step, ... of `rows`.
std::vector<float> pack(const GemmKernels& kernels, const Matrix& rows, unsigned first,
                        unsigned count, unsigned step = 1) {
  const std::size_t panel = panel_floats(rows.columns());
  std::vector<float> panels((count + kPanelRows - 1) / kPanelRows * panel, kNan);
  for (unsigned r = 0; r < count; r += kPanelRows)
    kernels.pack_rows(rows.element(), rows.row(first + r * step),
                      step * rows.stride() * rows.element_bytes(), std::min(kPanelRows, count - r),
                      rows.columns(), panels.data() + r / kPanelRows * panel);
  return panels;
}

struct Product {
  unsigned columns;
  std::vector<float> values;
  float at(unsigned r, unsigned n) const { return values[std::size_t{r} * columns + n]; }
};

// The product with weights first_column, ... Its output is poisoned before, and has gaps between
// rows that must not be written.
Product multiply(const GemmKernels& kernels, const std::vector<float>& panels,
                 const Weights& weights, unsigned depth, unsigned first_column, unsigned columns) {
  constexpr unsigned kGap = 5;
  constexpr float kUntouched = -12345;
  const auto panel_count = static_cast<unsigned>(panels.size() / panel_floats(depth));
  const std::size_t rows = std::size_t{panel_count} * kPanelRows;
  const std::size_t stride = columns + kGap;
  std::vector<float> out(rows * stride - kGap, kUntouched);
  for (std::size_t r = 0; r < rows; ++r)
    std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(r * stride), columns, kNan);
  kernels.multiply(panels.data(), panel_count, depth, weights, first_column, columns, out.data(),
                   stride);
  Product product{columns, {}};
  for (std::size_t r = 0; r < rows; ++r) {
    for (unsigned n = 0; n < columns; ++n) product.values.push_back(out[r * stride + n]);
    for (unsigned n = columns; n < stride && r + 1 < rows; ++n)
      require(out[r * stride + n] == kUntouched, "only `columns` columns are written");
  }
  return product;
}

Product multiply(const GemmKernels& kernels, const std::vector<float>& panels, const Matrix& weight,
                 unsigned first_column, unsigned columns) {
  return multiply(kernels, panels, weight.weights(), weight.columns(), first_column, columns);
}

void packing_transposes_and_fills_with_zero(const GemmKernels& kernels, Element element) {
  for (unsigned rows = 1; rows <= kPanelRows; ++rows) {
    Matrix source(element, rows, 24, 3);
    fill_reals(source, rows);
    const std::vector<float> panel = pack(kernels, source, 0, rows);
    for (unsigned k = 0; k < 24; ++k)
      for (unsigned r = 0; r < kPanelRows; ++r)
        require(same_bits(panel[k * kPanelRows + r], r < rows ? source.get(r, k) : 0.0f),
                "a panel is the transpose of its rows, then zeros");
  }
}

void every_bfloat16_is_widened_exactly(const GemmKernels& kernels) {
  constexpr unsigned kDepth = 65536 / kPanelRows;
  std::vector<std::uint16_t> all(65536);
  for (unsigned i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> panel(panel_floats(kDepth));
  kernels.pack_rows(Element::kBfloat16, all.data(), kDepth * 2, kPanelRows, kDepth, panel.data());
  for (unsigned i = 0; i < all.size(); ++i) {
    const float value = panel[std::size_t{i % kDepth} * kPanelRows + i / kDepth];
    require(std::bit_cast<std::uint32_t>(value) == i << 16, "widening appends zero bits");
  }
}

void integers_are_multiplied_exactly(const GemmKernels& kernels, Element element) {
  for (const unsigned depth : {8u, 24u, 256u, 264u, 520u}) {
    Matrix rows(element, 128, depth, 8);
    Matrix weight(element, 256, depth, 16);
    fill_integers(rows, depth);
    fill_integers(weight, depth + 1);
    std::vector<float> expected;
    for (unsigned r = 0; r < rows.rows(); ++r)
      for (unsigned n = 0; n < weight.rows(); ++n) {
        float sum = 0;
        for (unsigned k = 0; k < depth; ++k) sum += rows.get(r, k) * weight.get(n, k);
        expected.push_back(sum);
      }
    for (const unsigned columns : {8u, 40u, 256u}) {
      for (const unsigned count : {1u, 8u, 9u, 24u, 33u, 48u, 57u, 128u}) {
        const Product product =
            multiply(kernels, pack(kernels, rows, 0, count), weight, 0, columns);
        for (unsigned r = 0; r < count; ++r)
          for (unsigned n = 0; n < columns; ++n)
            require(product.at(r, n) == expected[r * weight.rows() + n],
                    "the product of integers is exact");
      }
    }
  }
}

// |error| <= depth * u / (1 - depth * u) * sum |a| |w| for any order of summation (Higham, Accuracy
// and Stability of Numerical Algorithms, section 3.1), with u = 2^-24.
void reals_are_within_the_rounding_bound(const GemmKernels& kernels, Element element) {
  for (const unsigned depth : {264u, 1024u}) {
    Matrix rows(element, 17, depth, 0);
    Matrix weight(element, 40, depth, 0);
    fill_reals(rows, depth);
    fill_reals(weight, depth + 1);
    const double roundoff = depth * std::ldexp(1.0, -24);
    const Product product = multiply(kernels, pack(kernels, rows, 0, 17), weight, 0, 40);
    for (unsigned r = 0; r < 17; ++r)
      for (unsigned n = 0; n < 40; ++n) {
        double sum = 0;
        double magnitude = 0;
        for (unsigned k = 0; k < depth; ++k) {
          const double term = double{rows.get(r, k)} * weight.get(n, k);
          sum += term;
          magnitude += std::abs(term);
        }
        require(std::abs(product.at(r, n) - sum) <= roundoff / (1 - roundoff) * magnitude,
                "the error is within the bound of fp32 summation");
      }
  }
}

// Each row alone and each 8 columns alone, against all calls that put them in other company.
void bits_depend_on_row_and_column_alone(const GemmKernels& kernels, Element element) {
  constexpr unsigned kRows = 104;  // 13 panels: full tiles and a remainder in every build
  constexpr unsigned kColumns = 72;
  for (const unsigned depth : {8u, 24u, 520u}) {
    Matrix rows(element, kRows, depth, 0);
    Matrix weight(element, kColumns, depth, 24);
    fill_reals(rows, depth);
    fill_reals(weight, depth + 1);
    Product alone{kColumns, std::vector<float>(kRows * kColumns)};
    for (unsigned r = 0; r < kRows; ++r) {
      const std::vector<float> panel = pack(kernels, rows, r, 1);
      for (unsigned n = 0; n < kColumns; n += 8) {
        const Product part = multiply(kernels, panel, weight, n, 8);
        for (unsigned i = 0; i < 8; ++i) alone.values[r * kColumns + n + i] = part.at(0, i);
      }
    }
    const auto require_same = [&](const Product& product, unsigned count, unsigned first,
                                  unsigned step, unsigned first_column, const char* claim) {
      for (unsigned r = 0; r < count; ++r)
        for (unsigned n = 0; n < product.columns; ++n)
          require(same_bits(product.at(r, n), alone.at(first + r * step, first_column + n)), claim);
    };
    for (unsigned count = 8; count <= kRows; count += 8)
      require_same(multiply(kernels, pack(kernels, rows, 0, count), weight, 0, kColumns), count, 0,
                   1, 0, "a row's bits do not depend on the number of panels");
    for (unsigned first = 1; first < 8; ++first)
      require_same(multiply(kernels, pack(kernels, rows, first, kRows - 8), weight, 0, kColumns),
                   kRows - 8, first, 1, 0, "a row's bits do not depend on its place in a panel");
    require_same(multiply(kernels, pack(kernels, rows, 1, 34, 3), weight, 0, kColumns), 34, 1, 3, 0,
                 "a row's bits do not depend on its neighbours");
    for (unsigned first = 0; first < kColumns; first += 8)
      for (unsigned columns = 8; first + columns <= kColumns; columns += 8)
        require_same(multiply(kernels, pack(kernels, rows, 0, 56), weight, first, columns), 56, 0,
                     1, first, "bits do not depend on the division of columns among calls");
  }
}

// The same numbers, with each row's elements one below the other.
void weights_that_lie_depth_first_give_the_same_bits(const GemmKernels& kernels, Element element) {
  constexpr unsigned kRows = 24;
  constexpr unsigned kColumns = 72;
  for (const unsigned depth : {8u, 24u, 256u, 520u}) {
    Matrix rows(element, kRows, depth, 0);
    Matrix weight(element, kColumns, depth, 0);
    Matrix across(element, depth, kColumns, 16);
    fill_reals(rows, depth);
    fill_reals(weight, depth + 1);
    for (unsigned n = 0; n < kColumns; ++n)
      for (unsigned k = 0; k < depth; ++k) across.set(k, n, weight.get(n, k));
    Weights lying = across.weights();
    std::swap(lying.stride, lying.step);
    const std::vector<float> panels = pack(kernels, rows, 0, kRows);
    for (const unsigned first : {0u, 8u, 40u}) {
      const unsigned columns = kColumns - first;
      const Product expected = multiply(kernels, panels, weight, first, columns);
      const Product product = multiply(kernels, panels, lying, depth, first, columns);
      for (unsigned r = 0; r < kRows; ++r)
        for (unsigned n = 0; n < columns; ++n)
          require(same_bits(product.at(r, n), expected.at(r, n)),
                  "weights that lie depth first give the bits of those that do not");
    }
  }
}

void non_finite_values_stay_in_their_row_and_column(const GemmKernels& kernels, Element element) {
  constexpr unsigned kRows = 56;
  constexpr unsigned kColumns = 40;
  constexpr unsigned kDepth = 264;
  Matrix rows(element, kRows, kDepth, 0);
  Matrix weight(element, kColumns, kDepth, 0);
  fill_reals(rows, 1);
  fill_reals(weight, 2);
  const Product before = multiply(kernels, pack(kernels, rows, 0, kRows), weight, 0, kColumns);
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    for (unsigned i = 0; i < kColumns; ++i) {
      Matrix bad_rows = rows;
      Matrix bad_weight = weight;
      bad_rows.set((i + 16) % kRows, i * 6, value);
      bad_weight.set(i, kDepth - 1 - i, value);
      const Product in_row =
          multiply(kernels, pack(kernels, bad_rows, 0, kRows), weight, 0, kColumns);
      const Product in_column =
          multiply(kernels, pack(kernels, rows, 0, kRows), bad_weight, 0, kColumns);
      for (unsigned r = 0; r < kRows; ++r)
        for (unsigned n = 0; n < kColumns; ++n) {
          if (r == (i + 16) % kRows)
            require(!std::isfinite(in_row.at(r, n)), "a non-finite element reaches all of its row");
          else
            require(same_bits(in_row.at(r, n), before.at(r, n)), "other rows are not touched");
          if (n == i)
            require(!std::isfinite(in_column.at(r, n)), "a non-finite weight reaches its column");
          else
            require(same_bits(in_column.at(r, n), before.at(r, n)),
                    "other columns are not touched");
        }
    }
  }
}

// A matrix of codes with random scales, beside the plain weights that it stands for.
class CodedMatrix {
 public:
  CodedMatrix(WeightFormat format, Element element, unsigned rows, unsigned depth)
      : plain(element, rows, depth, 0), format_(format), random_(rows + depth) {
    const Format its = format_of();
    const unsigned scale_columns = (depth + its.columns - 1) / its.columns;
    const unsigned scale_rows = (rows + its.rows - 1) / its.rows;
    std::vector<float> scales(std::size_t{scale_rows} * scale_columns);
    for (float& scale : scales) scale = draw_scale();
    scale_2_ = format == WeightFormat::nvfp4 ? 0.3F : 1.0F;
    codes_.resize(std::size_t{rows} * depth * its.bits / 8);
    for (unsigned r = 0; r < rows; ++r)
      for (unsigned k = 0; k < depth; ++k) {
        const unsigned code = draw_code(its.bits, std::size_t{r} * depth + k);
        const float scale = scales[std::size_t{r / its.rows} * scale_columns + k / its.columns];
        const float value = static_cast<float>(its.number(code)) * scale * scale_2_;
        plain.set(
            r, k,
            element == Element::kFloat32 ? value : static_cast<float>(codes::nearest_bf16(value)));
      }
  }

  Weights weights() const {
    return {plain.element(), codes_.data(), plain.columns(), format_, scales_.data(), scale_2_};
  }

 private:
  struct Format {
    unsigned bits, rows, columns;  // of a code; of a block
    double (*number)(unsigned);
  };
  Format format_of() const {
    constexpr unsigned kAll = 1U << 30;
    switch (format_) {
      case WeightFormat::fp8_block128:
        return {8, 128, 128, codes::e4m3};
      case WeightFormat::fp8_channel:
        return {8, 1, kAll, codes::e4m3};
      case WeightFormat::fp8_tensor:
        return {8, kAll, kAll, codes::e4m3};
      case WeightFormat::mxfp4:
        return {4, 1, 32, codes::e2m1};
      case WeightFormat::nvfp4:
        return {4, 1, 16, codes::e2m1};
      default:
        return {4, 1, 32, codes::int4};
    }
  }

  unsigned draw_code(unsigned bits, std::size_t place) {
    unsigned code = random_() % (1U << bits);
    if (bits == 4) {
      codes_[place / 2] |= static_cast<std::uint8_t>(place % 2 == 0 ? code : code << 4);
    } else {
      code -= code % 128 == 127 ? 1 : 0;  // no NaN
      codes_[place] = static_cast<std::uint8_t>(code);
    }
    return code;
  }

  // Stores one of between 1/2 and 2, or so, and says what it is.
  float draw_scale() {
    std::uint32_t code = 0;
    float scale = 0;
    unsigned bytes = 1;
    if (format_ == WeightFormat::mxfp4) {
      code = 126 + random_() % 3;
      scale = static_cast<float>(codes::e8m0(code));
    } else if (format_ == WeightFormat::nvfp4) {
      code = 48 + random_() % 17;
      scale = static_cast<float>(codes::e4m3(code));
    } else {
      bytes = format_ == WeightFormat::int4_group32 ? 2 : 4;
      const auto bits =
          std::bit_cast<std::uint32_t>(static_cast<float>(random_() % 65536) / 65536 + 0.5F);
      code = bytes == 2 ? bits >> 16 : bits;
      scale = std::bit_cast<float>(bytes == 2 ? code << 16 : code);
    }
    for (unsigned i = 0; i < bytes; ++i)
      scales_.push_back(static_cast<std::uint8_t>(code >> 8 * i));
    return scale;
  }

 public:
  Matrix plain;

 private:
  WeightFormat format_;
  std::mt19937 random_;
  std::vector<std::uint8_t> codes_, scales_;
  float scale_2_;
};

void codes_are_multiplied_as_the_weights_that_they_stand_for(const GemmKernels& kernels,
                                                             Element element) {
  for (unsigned format = 1; format <= 6; ++format)
    for (const unsigned depth : {32u, 544u}) {
      const CodedMatrix coded(static_cast<WeightFormat>(format), element, 272, depth);
      Matrix rows(element, 56, depth, 0);
      fill_reals(rows, depth);
      for (const unsigned count : {8u, 56u}) {
        const std::vector<float> panels = pack(kernels, rows, 0, count);
        for (const unsigned first : {0u, 8u, 120u, 256u}) {
          const unsigned columns = std::min(40u, 272 - first);
          require(multiply(kernels, panels, coded.weights(), depth, first, columns).values ==
                      multiply(kernels, panels, coded.plain, first, columns).values,
                  "codes are multiplied as the weights that they stand for");
        }
      }
    }
}

}  // namespace

int main() {
  // The free functions are the first of the builds, reached in another way.
  const GemmKernels chosen = {"chosen", moeos::twin::pack_rows, moeos::twin::multiply};
  checking = "chosen";
  integers_are_multiplied_exactly(chosen, Element::kBfloat16);

  for (const GemmKernels* kernels : moeos::twin::supported_gemm_kernels()) {
    checking = std::string(kernels->instruction_set) + ", bfloat16";
    every_bfloat16_is_widened_exactly(*kernels);
    for (const Element element : {Element::kFloat32, Element::kBfloat16}) {
      checking = std::string(kernels->instruction_set) +
                 (element == Element::kFloat32 ? ", float32" : ", bfloat16");
      packing_transposes_and_fills_with_zero(*kernels, element);
      integers_are_multiplied_exactly(*kernels, element);
      reals_are_within_the_rounding_bound(*kernels, element);
      bits_depend_on_row_and_column_alone(*kernels, element);
      weights_that_lie_depth_first_give_the_same_bits(*kernels, element);
      non_finite_values_stay_in_their_row_and_column(*kernels, element);
      codes_are_multiplied_as_the_weights_that_they_stand_for(*kernels, element);
    }
    std::printf("test_gemm: %s passed\n", kernels->instruction_set);
  }
  return 0;
}
