// Norm and rotary embedding of q and k, and the write of k and v into the paged cache.
// Semantics: model/kernels/base.py.
#include <cmath>

#include "simd.h"

namespace trimaran {
namespace {

// One head of one token: norm where weight is given, then rotation of (i, i + dim/2).
template <class T>
void norm_rotate(T* out, const T* x, const float* weight, float eps, const float* cosines,
                 int64_t dim) {
  const int64_t half = dim / 2;
  const float* sines = cosines + half;
  float scale = 1.0f;
  if (weight) {
    Vec squares{};
    sweep(dim, [&](int64_t i, int count) {
      Vec v = load(x + i, count);
      squares = fma(v, v, squares);
    });
    scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps);
  }
  sweep(half, [&](int64_t i, int count) {
    Vec first = load(x + i, count), second = load(x + half + i, count);
    if (weight) {
      first = first * scale * load(weight + i, count);
      second = second * scale * load(weight + half + i, count);
    }
    Vec cosine = load(cosines + i, count), sine = load(sines + i, count);
    store(out + i, fma(first, cosine, -(second * sine)), count);
    store(out + half + i, fma(second, cosine, first * sine), count);
  });
}

template <class T>
void qk_norm_rope_cache(T* q_out, const T* qkv, const float* q_weight, const float* k_weight,
                        float eps, const float* cos_sin, const int64_t* positions, T* kv_cache,
                        const int64_t* slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                        int64_t block_size, int64_t dim) {
  const int64_t width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens * width > kSerialWork)
  for (int64_t token = 0; token < tokens; ++token) {
    const T* from = qkv + token * width;
    const float* rotation = cos_sin + positions[token] * dim;
    for (int64_t h = 0; h < heads; ++h)
      norm_rotate(q_out + (token * heads + h) * dim, from + h * dim, q_weight, eps, rotation, dim);
    const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
    for (int64_t h = 0; h < kv_heads; ++h) {
      T* key = kv_cache + ((block * 2 * kv_heads + h) * block_size + offset) * dim;
      T* value = key + kv_heads * block_size * dim;
      norm_rotate(key, from + (heads + h) * dim, k_weight, eps, rotation, dim);
      std::memcpy(value, from + (heads + kv_heads + h) * dim, dim * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace trimaran

#define TRIMARAN_EXPORT(T, suffix)                                                           \
  TRIMARAN_API void qk_norm_rope_cache_##suffix(                                             \
      T* q_out, const T* qkv, const float* q_weight, const float* k_weight, float eps,       \
      const float* cos_sin, const int64_t* positions, T* kv_cache, const int64_t* slots,     \
      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t dim) {    \
    trimaran::qk_norm_rope_cache(q_out, qkv, q_weight, k_weight, eps, cos_sin, positions,    \
                                 kv_cache, slots, tokens, heads, kv_heads, block_size, dim); \
  }
TRIMARAN_EXPORT(trimaran::bf16, bf16)
TRIMARAN_EXPORT(float, f32)
