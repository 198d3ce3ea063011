// SPDX-License-Identifier: Apache-2.0
// kernels/element_formats.hpp against the formats' definitions: every code, and where its scale is,
// and the codes of numbers. Prints the numbers of codes, and from which numbers on a code is the
// nearest, which test_native.py compares with PyTorch's.
//
// Build: g++ -std=c++20 -I. tests/native/test_formats.cpp -o test_formats
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/element_formats.hpp"
#include "tests/native/codes.hpp"
#include "tests/native/expect.hpp"

namespace {

using moeos::u32;
using moeos::u64;
using moeos::u8;
using moeos::WeightFormat;

bool same(float value, double right) {
  return std::isnan(right) ? std::isnan(value)
                           : std::bit_cast<u32>(value) == std::bit_cast<u32>(float(right));
}

void numbers_are_those_of_the_definitions(const char* of_e4m3, const char* of_4_bits) {
  for (unsigned i = 0; i < 256; ++i) {
    const volatile u32 code = i;  // read as it runs, and not as it is compiled
    expect(same(moeos::e4m3(static_cast<u8>(code)), codes::e4m3(i)), of_e4m3);
    expect(same(moeos::e2m1(code), codes::e2m1(i & 15)), of_4_bits);
    expect(same(moeos::int4(code), codes::int4(i & 15)), of_4_bits);
  }
}

/// Numbers with so many mantissa bits as all of 16 bits have, of either kind: their lowest bits.
constexpr unsigned kUnused = 13;

void codes_are_the_nearest(const char* what) {
  for (u32 sign = 0; sign < 2; ++sign) {
    for (unsigned code = 0; code <= 0x7E; ++code) {
      const double number = codes::e4m3(code);
      const double next = code == 0x7E ? 480.0 : codes::e4m3(code + 1);
      // The code's own number, the tie behind it, and their neighbours.
      for (const double middle : {number, (number + next) / 2.0}) {
        const u32 bits = std::bit_cast<u32>(static_cast<float>(middle));
        for (u32 near = bits < 2 ? 0 : bits - 2; near <= bits + 2; ++near) {
          const volatile u32 signed_bits = sign << 31 | near;
          const auto value = std::bit_cast<float>(u32{signed_bits});
          if (std::fpclassify(value) != FP_SUBNORMAL) {
            expect(moeos::to_e4m3(value) == codes::nearest_e4m3(value), what);
          }
        }
      }
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  expect(moeos::to_e4m3(infinity) == 0x7E && moeos::to_e4m3(-infinity) == 0xFE, "infinity's code");
  expect(moeos::to_e4m3(3e38F) == 0x7E, "the code of a number beyond all others");
  expect(moeos::to_e4m3(-std::numeric_limits<float>::quiet_NaN()) == 0x7F, "a NaN's code");
}

/// Prints at each number whose code is not that of the number below.
void print_codes_of_numbers() {
  u32 last = 0x100;
  for (u32 upper = 0; upper <= 0xFFFFFFFFU >> kUnused; ++upper) {
    const u32 code = moeos::to_e4m3(std::bit_cast<float>(upper << kUnused));
    if (code != last) {
      std::printf("to_e4m3 %u %u\n", upper, code);
    }
    last = code;
  }
}

void scales_are_neither_subnormal_nor_infinite() {
  for (const float largest : {0.0F, 1e-45F, 1e-38F, 1e-30F, 1.0F, 448.0F, 3.4e38F}) {
    const moeos::GroupScale scale = moeos::group_scale(largest);
    expect(std::isnormal(scale.scale) && std::isnormal(scale.inverse), "a group's scale");
    expect(moeos::to_e4m3(largest * scale.inverse) == (largest < 1e-30F ? 0 : 0x7E),
           "the largest of a group has the largest code");
  }
  expect(std::isnan(moeos::group_scale(NAN).scale), "the scale of a NaN");
}

void rows_of_codes_are_padded() {
  static_assert(moeos::coded_row_bytes(128, 128) == 144);
  static_assert(moeos::coded_row_bytes(7168, 128) == 7392);
  static_assert(moeos::coded_row_bytes(192, 64) == 208);
  static_assert(moeos::coded_result_bytes(128) == 256);
  static_assert(moeos::coded_result_bytes(7168) == 7424);
}

void exponents_are_powers_of_two() {
  for (unsigned code = 0; code < 256; ++code) {
    expect(same(moeos::e8m0(static_cast<u8>(code)), codes::e8m0(code)), "an e8m0 code's number");
  }
}

/// Kernels may be compiled so, and a process may have asked its processor for it.
void numbers_are_the_same_where_subnormal_ones_are_zero() {
#if defined(__SSE2__)
  constexpr unsigned kSubnormalIsZero = 0x8040;  // both results and operands
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kSubnormalIsZero);
  numbers_are_those_of_the_definitions("an e4m3 code's number without subnormal ones",
                                       "a 4-bit code's number without subnormal ones");
  codes_are_the_nearest("the nearest e4m3 code without subnormal numbers");
  _mm_setcsr(before);
#endif
}

void rounding_to_bf16_takes_the_nearest() {
  for (u32 upper = 0x0080; upper < 0x7F7F; upper += 13) {
    for (const u32 lower : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      for (const u32 sign : {0U, 0x80000000U}) {
        const auto value = std::bit_cast<float>(sign | upper << 16 | lower);
        expect(same(moeos::bf16(moeos::to_bf16(value)), codes::nearest_bf16(value)),
               "the nearest BF16 number");
      }
    }
  }
  expect(std::isnan(moeos::bf16(moeos::to_bf16(std::bit_cast<float>(0x7F800001U)))),
         "a NaN stays one, though its upper half is that of infinity");
}

struct Sizes {
  WeightFormat format;
  u64 code_bits, scale_bytes, scale_rows, scale_columns;
};

void scales_are_as_many_as_the_format_has() {
  for (const u32 rows : {16U, 128U, 144U, 300U}) {
    for (const u32 depth : {32U, 128U, 544U}) {
      const Sizes all[] = {
          {WeightFormat::fp8_block128, 8, 4, (rows + 127) / 128, (depth + 127) / 128},
          {WeightFormat::fp8_channel, 8, 4, rows, 1},
          {WeightFormat::fp8_tensor, 8, 4, 1, 1},
          {WeightFormat::mxfp4, 4, 1, rows, depth / 32},
          {WeightFormat::nvfp4, 4, 1, rows, depth / 16},
          {WeightFormat::int4_group32, 4, 2, rows, depth / 32}};
      for (const Sizes& its : all) {
        expect(moeos::code_bits(its.format) == its.code_bits, "bits of a code");
        expect(moeos::scale_bytes(its.format) == its.scale_bytes, "bytes of a scale");
        expect(moeos::scale_rows(its.format, rows) == its.scale_rows, "rows of scales");
        expect(moeos::scales_of_row(its.format, depth) == its.scale_columns, "scales of a row");
      }
    }
  }
}

void print(const char* kind, u32 code, float number) {
  std::printf("%s %u %u\n", kind, code, std::bit_cast<u32>(number));
}

}  // namespace

int main() {
  numbers_are_those_of_the_definitions("an e4m3 code's number", "a 4-bit code's number");
  exponents_are_powers_of_two();
  numbers_are_the_same_where_subnormal_ones_are_zero();
  rounding_to_bf16_takes_the_nearest();
  codes_are_the_nearest("the nearest e4m3 code");
  scales_are_neither_subnormal_nor_infinite();
  rows_of_codes_are_padded();
  print_codes_of_numbers();
  scales_are_as_many_as_the_format_has();
  for (u32 code = 0; code < 256; ++code) {
    print("float8_e4m3fn", code, moeos::e4m3(static_cast<u8>(code)));
    print("float8_e8m0fnu", code, moeos::e8m0(static_cast<u8>(code)));
  }
  return failed == 0 ? 0 : 1;
}
