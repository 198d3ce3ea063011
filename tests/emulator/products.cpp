// SPDX-License-Identifier: Apache-2.0
// The emulated GPU's matrix products; see products.hpp. Eight numbers at a time are multiplied and
// added, so a sum has another order than one number after the other would give it.
#include "tests/emulator/products.hpp"

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/element_formats.hpp"

namespace emulator {
namespace {

constexpr unsigned kRowBytes = 128;
constexpr unsigned kPieceBytes = 16;  // that a swizzle moves as a whole

const unsigned char* swizzled(const unsigned char* place) {
  const auto address = reinterpret_cast<std::uintptr_t>(place);
  return reinterpret_cast<const unsigned char*>(address ^ ((address >> 7 & 7) << 4));
}

/// Numbers of a row, eight in each.
template <unsigned kEights>
struct Row {
  __m256 eights[kEights];
};

template <Numbers kNumbers>
__m256 floats_of(__m128i bits) {
  if constexpr (kNumbers == Numbers::float16) {
    return _mm256_cvtph_ps(bits);
  } else {
    const __m128i none = _mm_setzero_si128();
    return _mm256_set_m128(_mm_castsi128_ps(_mm_unpackhi_epi16(none, bits)),
                           _mm_castsi128_ps(_mm_unpacklo_epi16(none, bits)));
  }
}

template <Numbers kNumbers>
Row<2> read_row(Operand matrix, unsigned row) {
  alignas(kPieceBytes) std::uint16_t bits[16];
  if (matrix.columns) {
    const unsigned char* first = matrix.at + row / 64 * kColumnsBoxBytes + row % 64 * 2;
    for (unsigned k = 0; k < 16; ++k) {
      std::memcpy(&bits[k], swizzled(first + k * kRowBytes), 2);
    }
  } else {
    const unsigned char* first = matrix.at + row * kRowBytes;
    std::memcpy(bits, swizzled(first), kPieceBytes);
    std::memcpy(bits + 8, swizzled(first + kPieceBytes), kPieceBytes);
  }
  const auto* pieces = reinterpret_cast<const __m128i*>(bits);
  return {floats_of<kNumbers>(pieces[0]), floats_of<kNumbers>(pieces[1])};
}

Row<4> read_codes(const unsigned char* matrix, unsigned row) {
  static const auto numbers = [] {
    std::array<float, 256> all;
    for (unsigned code = 0; code < all.size(); ++code) {
      all[code] = moeos::e4m3(static_cast<moeos::u8>(code));
    }
    return all;
  }();
  float values[32];
  for (unsigned k = 0; k < 32; ++k) {
    values[k] = numbers[*swizzled(matrix + row * kRowBytes + k)];
  }
  return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8), _mm256_loadu_ps(values + 16),
          _mm256_loadu_ps(values + 24)};
}

template <unsigned kEights>
__m256 products(const Row<kEights>& a, const Row<kEights>& b) {
  __m256 sums = _mm256_mul_ps(a.eights[0], b.eights[0]);
  for (unsigned i = 1; i < kEights; ++i) {
    sums = _mm256_add_ps(sums, _mm256_mul_ps(a.eights[i], b.eights[i]));
  }
  return sums;
}

/// The sums of all eights.
__m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 quarters = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
}

/// `column(n)`: row n of b. A lane's accumulators are fours: two columns of one of its rows, and of
/// the row eight below.
template <unsigned kEights, class Column>
void add_products(float* d, unsigned registers, unsigned thread, bool adds,
                  const Row<kEights>& upper, const Row<kEights>& lower, Column column) {
  for (unsigned j = 0; j < registers / 4; ++j) {
    const Row<kEights> left = column(8 * j + thread % 4 * 2);
    const Row<kEights> right = column(8 * j + thread % 4 * 2 + 1);
    const __m128 sums = sums_of(products(upper, left), products(upper, right),
                                products(lower, left), products(lower, right));
    float* four = d + 4 * j;
    _mm_storeu_ps(four, adds ? _mm_add_ps(_mm_loadu_ps(four), sums) : sums);
  }
}

unsigned upper_row_of(unsigned thread) { return thread / 32 * 16 + thread % 32 / 4; }

template <Numbers kNumbers>
void multiply_numbers(float* d, unsigned registers, unsigned thread, Operand a, Operand b) {
  const unsigned row = upper_row_of(thread);
  add_products(d, registers, thread, true, read_row<kNumbers>(a, row),
               read_row<kNumbers>(a, row + 8),
               [b](unsigned n) { return read_row<kNumbers>(b, n); });
}

template <Numbers kNumbers>
void multiply_numbers_of_rows(float* d, unsigned registers, unsigned thread,
                              const float (&rows)[2][16], Operand b) {
  const auto row = [](const float (&row)[16]) {
    return Row<2>{_mm256_loadu_ps(row), _mm256_loadu_ps(row + 8)};
  };
  add_products(d, registers, thread, true, row(rows[0]), row(rows[1]),
               [b](unsigned n) { return read_row<kNumbers>(b, n); });
}

}  // namespace

void multiply(float* d, unsigned registers, unsigned thread, Numbers numbers, Operand a,
              Operand b) {
  numbers == Numbers::float16 ? multiply_numbers<Numbers::float16>(d, registers, thread, a, b)
                              : multiply_numbers<Numbers::bfloat16>(d, registers, thread, a, b);
}

void multiply_rows(float* d, unsigned registers, unsigned thread, Numbers numbers,
                   const float (&rows)[2][16], Operand b) {
  numbers == Numbers::float16
      ? multiply_numbers_of_rows<Numbers::float16>(d, registers, thread, rows, b)
      : multiply_numbers_of_rows<Numbers::bfloat16>(d, registers, thread, rows, b);
}

void multiply_codes(float* d, unsigned registers, unsigned thread, bool adds,
                    const unsigned char* a, const unsigned char* b) {
  const unsigned row = upper_row_of(thread);
  add_products(d, registers, thread, adds, read_codes(a, row), read_codes(a, row + 8),
               [b](unsigned n) { return read_codes(b, n); });
}

}  // namespace emulator
