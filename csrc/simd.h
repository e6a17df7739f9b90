// Vectors of fp32 as wide as the build's instruction set, and what the kernels need of them.
//
// Owns: loads and stores of bf16 and fp32, exp, reductions. GCC's vector extensions carry the
// arithmetic, so one source gives AVX-512, AVX2, SSE2 and NEON code; intrinsics appear only where
// the language has no word (fused multiply-add, bf16 dot product). Contraction is off (see
// setup.py): whether a multiply and an add fuse is written here, never chosen by the compiler, so
// that a row gets the same operations in every instantiation.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Of a function that native.py calls; everything else stays hidden.
#define TRIMARAN_API extern "C" __attribute__((visibility("default")))

namespace trimaran {

// Raised with every change of a function's signature; native.py refuses any other.
constexpr int kInterfaceVersion = 5;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};

// Elements below which a loop is not worth waking the other threads for.
constexpr int64_t kSerialWork = 16384;

inline Vec splat(float x) { return Vec{} + x; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }

// The first `count` elements at p; lanes beyond are zero and their memory is not touched.
template <class Raw, class T>
inline Raw load_raw(const T* p, int count) {
  Raw raw{};
  if (count >= kLanes)
    std::memcpy(&raw, p, sizeof raw);
  else
    std::memcpy(&raw, p, count * sizeof(T));
  return raw;
}

inline Vec load(const float* p, int count = kLanes) { return load_raw<Vec>(p, count); }

inline Vec load(const bf16* p, int count = kLanes) {
  return (Vec)(__builtin_convertvector(load_raw<Halves>(p, count), Bits) << 16);
}

inline void store(float* p, Vec x, int count = kLanes) {
  std::memcpy(p, &x, (count >= kLanes ? kLanes : count) * sizeof(float));
}

// Round to nearest even; a NaN stays one.
inline Halves round_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  Bits bits = (Bits)x;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = x == x ? rounded : Bits{} + 0x7fc0;
  return __builtin_convertvector(rounded, Halves);
#endif
}

inline void store(bf16* p, Vec x, int count = kLanes) {
  Halves halves = round_bf16(x);
  std::memcpy(p, &halves, (count >= kLanes ? kLanes : count) * sizeof(bf16));
}

// x as it reads back after a store as T.
inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const bf16*) {
  return (Vec)(__builtin_convertvector(round_bf16(x), Bits) << 16);
}

inline float sum(Vec x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max(Vec x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// e^x to about 1 unit in the last place: 0 below -87.7, infinity above 88.4, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes' expf, 2^n by its exponent.
inline Vec exp(Vec x) {
  x = x < -88.0f ? splat(-88.0f) : x;
  x = x > 89.0f ? splat(89.0f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = fma(x, splat(1.44269504088896341f), magic);
  Ints n = (Ints)shifted - (Ints)magic;
  Vec whole = shifted - magic;
  Vec r = fma(whole, splat(-0.693359375f), x);
  r = fma(whole, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return p * (Vec)((n + 127) << 23);
}

// body(offset, count) over n elements, a vector at a time; count is a constant but at the end.
template <class Body>
inline void sweep(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

}  // namespace trimaran
