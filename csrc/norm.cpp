// RMS norms, alone or joined with the residual stream. Semantics: model/kernels/base.py.
#include <cmath>

#include "simd.h"

namespace trimaran {
namespace {

float norm_scale(Vec squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
}

template <class T>
Vec sum_squares(const T* x, int64_t n) {
  Vec squares{};
  sweep(n, [&](int64_t i, int count) {
    Vec v = load(x + i, count);
    squares = fma(v, v, squares);
  });
  return squares;
}

template <class T, class From>
void scale_row(T* out, const From* x, const float* weight, float scale, int64_t n) {
  sweep(n, [&](int64_t i, int count) {
    store(out + i, load(x + i, count) * splat(scale) * load(weight + i, count), count);
  });
}

template <class T>
void rms_norm(T* out, const T* x, const float* weight, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > kSerialWork)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * n;
    scale_row(out + row * n, from, weight, norm_scale(sum_squares(from, n), n, eps), n);
  }
}

// residual += x, normed with post_weight first where that is given; then the norm of residual.
template <class T>
void add_rms_norm(T* out, const T* x, float* residual, const float* post_weight, const float* weight,
                  int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > kSerialWork)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * n;
    float* onto = residual + row * n;
    Vec squares{};
    auto add = [&](int64_t i, int count, Vec addend) {
      Vec total = load(onto + i, count) + addend;
      store(onto + i, total, count);
      squares = fma(total, total, squares);
    };
    if (post_weight) {
      Vec scale = splat(norm_scale(sum_squares(from, n), n, eps));
      sweep(n, [&](int64_t i, int count) {
        add(i, count, load(from + i, count) * scale * load(post_weight + i, count));
      });
    } else {
      sweep(n, [&](int64_t i, int count) { add(i, count, load(from + i, count)); });
    }
    scale_row(out + row * n, onto, weight, norm_scale(squares, n, eps), n);
  }
}

}  // namespace
}  // namespace trimaran

TRIMARAN_API int interface_version() { return trimaran::kInterfaceVersion; }

#define TRIMARAN_EXPORT(T, suffix)                                                           \
  TRIMARAN_API void rms_norm_##suffix(T* out, const T* x, const float* weight, int64_t rows, \
                                      int64_t n, float eps) {                                \
    trimaran::rms_norm(out, x, weight, rows, n, eps);                                        \
  }                                                                                          \
  TRIMARAN_API void add_rms_norm_##suffix(T* out, const T* x, float* residual,               \
                                          const float* post_weight, const float* weight,     \
                                          int64_t rows, int64_t n, float eps) {              \
    trimaran::add_rms_norm(out, x, residual, post_weight, weight, rows, n, eps);             \
  }
TRIMARAN_EXPORT(trimaran::bf16, bf16)
TRIMARAN_EXPORT(float, f32)
