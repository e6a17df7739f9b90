// The inner product of attention: C[rows, columns] = A[rows, depth] * B[depth, columns], fp32 out.
//
// Owns: the packed element (Lane) and the register tile. A lane holds one fp32 value, or, with
// AVX512-BF16 and bf16 data, two neighbours of the depth. Each element of C is one chain of
// operations over the depth, the same whatever the tile's height: rows do not feel their company.
#pragma once

#include <type_traits>

#include "simd.h"

namespace trimaran {

constexpr int kColumns = 2 * kLanes;  // of a register tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

template <class T>
struct Packing {
  using Lane = float;
  static constexpr int per_lane = 1;
};

inline Vec multiply_add(Vec acc, float a, Vec b) { return fma(splat(a), b, acc); }

#if defined(__AVX512BF16__)
template <>
struct Packing<bf16> {
  using Lane = uint32_t;
  static constexpr int per_lane = 2;
};

inline Vec multiply_add(Vec acc, uint32_t a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif

// a: lanes, rows `a_stride` apart. b: [depth][kColumns] lanes. c: rows `c_stride` apart.
template <int rows, int a_stride, int c_stride, class Lane>
inline void multiply_tile(const Lane* a, const Lane* b, int64_t depth, float* c) {
  Vec acc[rows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec left, right;
    std::memcpy(&left, b + k * kColumns, sizeof left);
    std::memcpy(&right, b + k * kColumns + kLanes, sizeof right);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      acc[r][0] = multiply_add(acc[r][0], a[r * a_stride + k], left);
      acc[r][1] = multiply_add(acc[r][1], a[r * a_stride + k], right);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + kLanes, acc[r][1]);
  }
}

template <int a_stride, int c_stride, class Lane>
inline void multiply(const Lane* a, const Lane* b, int64_t depth, float* c, int rows) {
  int r = 0;
  auto run = [&](auto height) {
    for (; r + height <= rows; r += height)
      multiply_tile<height, a_stride, c_stride>(a + r * a_stride, b, depth, c + r * c_stride);
  };
  if constexpr (kTileRows >= 8) run(std::integral_constant<int, 8>{});
  run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

// Turns kLanes rows of kLanes 32-bit elements into columns, in registers.
inline void transpose(Vec (&m)[kLanes]) {
  // Stage by stage, swap the off-diagonal quarters of ever smaller squares.
#pragma GCC unroll 4
  for (int size = kLanes / 2; size > 0; size /= 2) {
    Ints low, high;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      low[i] = i & size ? kLanes + (i ^ size) : i;
      high[i] = i & size ? kLanes + i : i ^ size;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & size) continue;
      Vec upper = m[i], lower = m[i | size];
      m[i] = __builtin_shuffle(upper, lower, low);
      m[i | size] = __builtin_shuffle(upper, lower, high);
    }
  }
}

}  // namespace trimaran
