// act(gate) * up. Semantics: model/kernels/base.py.
#include "simd.h"

namespace trimaran {
namespace {

// Both activations are x * sigmoid(u): silu with u = x, and gelu by its tanh approximation with
// u = 2 sqrt(2/pi) (x + 0.044715 x^3), because (1 + tanh(v)) / 2 = sigmoid(2 v).
template <bool gelu, class T>
void activation_mul(T* out, const T* gate_up, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n * 4 > kSerialWork)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * n;
    const T* up = gate + n;
    sweep(n, [&](int64_t i, int count) {
      Vec x = load(gate + i, count);
      Vec u = x;
      if (gelu) u = 1.5957691216057308f * fma(x * x * x, splat(0.044715f), x);
      store(out + row * n + i, x / (1.0f + exp(-u)) * load(up + i, count), count);
    });
  }
}

}  // namespace
}  // namespace trimaran

#define TRIMARAN_EXPORT(T, suffix)                                                              \
  TRIMARAN_API void silu_mul_##suffix(T* out, const T* gate_up, int64_t rows, int64_t n) {      \
    trimaran::activation_mul<false>(out, gate_up, rows, n);                                     \
  }                                                                                             \
  TRIMARAN_API void gelu_tanh_mul_##suffix(T* out, const T* gate_up, int64_t rows, int64_t n) { \
    trimaran::activation_mul<true>(out, gate_up, rows, n);                                      \
  }
TRIMARAN_EXPORT(trimaran::bf16, bf16)
TRIMARAN_EXPORT(float, f32)
