// Matrix products with constant weights: out[T, N] = x[T, K] * weight[N, K]^T + bias.
//
// Owns: the packed layout of a weight and the loops around the register tile. A weight is packed
// once into panels of kColumns outputs, [panel][depth lane][column], which a product streams from
// one end to the other. Each output is one chain of multiply-adds over K in fp32, begun at zero and
// rounded once at the end, whatever T, the tile's height or the number of threads: rows do not feel
// their company, so products are batch-invariant at no cost.
#include <algorithm>

#include "multiply.h"

namespace trimaran {
namespace {

// How a weight is held: as lanes where the dot product of pairs is in hardware, else as it is and
// widened on its way to the registers (so that bf16 stays half the memory).
template <class T>
struct Held {
  using Element = std::conditional_t<Packing<T>::per_lane == 2, uint32_t, T>;
  static constexpr int per_lane = Packing<T>::per_lane;
};

inline Vec load_column(const uint32_t* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load_column(const float* p) { return load(p); }
inline Vec load_column(const bf16* p) { return load(p); }

inline uint32_t lane_at(const bf16* x, int64_t k, uint32_t) {
  uint32_t pair;
  std::memcpy(&pair, x + 2 * k, sizeof pair);
  return pair;
}
inline float lane_at(const float* x, int64_t k, float) { return x[k]; }
inline float lane_at(const bf16* x, int64_t k, bf16) {
  uint32_t bits = static_cast<uint32_t>(x[k].bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class T, class Out, int rows>
inline void product_tile(const T* x, const typename Held<T>::Element* panel, int64_t k_size,
                         const float* bias, Out* out, int64_t n_size, int columns) {
  using Element = typename Held<T>::Element;
  const int64_t lanes = k_size / Held<T>::per_lane;
  Vec acc[rows][2] = {};
  for (int64_t k = 0; k < lanes; ++k) {
    Vec left = load_column(panel + k * kColumns);
    Vec right = load_column(panel + k * kColumns + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      auto lane = lane_at(x + r * k_size, k, Element{});
      acc[r][0] = multiply_add(acc[r][0], lane, left);
      acc[r][1] = multiply_add(acc[r][1], lane, right);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    Out* row = out + r * n_size;
    Vec left = acc[r][0], right = acc[r][1];
    if (bias) {
      left += load(bias, columns);
      if (columns > kLanes) right += load(bias + kLanes, columns - kLanes);
    }
    store(row, left, columns);
    if (columns > kLanes) store(row + kLanes, right, columns - kLanes);
  }
}

template <class T, class Out>
void product(Out* out, const T* x, const typename Held<T>::Element* packed, const float* bias,
             int64_t rows, int64_t n_size, int64_t k_size) {
  const int64_t panels = padded(n_size, kColumns) / kColumns;
  const int64_t panel_size = k_size / Held<T>::per_lane * kColumns;
#pragma omp parallel for schedule(static) if (n_size * k_size > kSerialWork)
  for (int64_t p = 0; p < panels; ++p) {
    const auto* panel = packed + p * panel_size;
    const int64_t first = p * kColumns;
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, n_size - first));
    const float* panel_bias = bias ? bias + first : nullptr;
    int64_t r = 0;
    auto run = [&](auto height) {
      for (; r + height <= rows; r += height)
        product_tile<T, Out, height>(x + r * k_size, panel, k_size, panel_bias,
                                     out + r * n_size + first, n_size, columns);
    };
    if constexpr (kTileRows >= 8) run(std::integral_constant<int, 8>{});
    run(std::integral_constant<int, 4>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
  }
}

// Rows of `weight` beyond n_size are zeros in the last panel. k_size is a multiple of per_lane.
template <class T>
void pack(typename Held<T>::Element* packed, const T* weight, int64_t n_size, int64_t k_size) {
  constexpr int per_lane = Held<T>::per_lane;
  const int64_t panels = padded(n_size, kColumns) / kColumns, lanes = k_size / per_lane;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    auto* panel = packed + p * lanes * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t n = p * kColumns + c;
      for (int64_t k = 0; k < lanes; ++k) {
        auto* to = panel + k * kColumns + c;
        if (n < n_size)
          std::memcpy(to, weight + n * k_size + k * per_lane, sizeof *to);
        else
          std::memset(to, 0, sizeof *to);
      }
    }
  }
}

}  // namespace
}  // namespace trimaran

// Elements of the weight's type that a packed weight takes.
TRIMARAN_API int64_t packed_linear_size(int64_t n_size, int64_t k_size) {
  return trimaran::padded(n_size, trimaran::kColumns) * k_size;
}

#define TRIMARAN_EXPORT(T, suffix)                                                           \
  TRIMARAN_API void pack_linear_##suffix(void* packed, const T* weight, int64_t n, int64_t k) {    \
    trimaran::pack<T>(static_cast<trimaran::Held<T>::Element*>(packed), weight, n, k);            \
  }                                                                                               \
  TRIMARAN_API void linear_##suffix(T* out, const T* x, const void* packed, const float* bias,     \
                                    int64_t rows, int64_t n, int64_t k) {                         \
    trimaran::product<T, T>(out, x, static_cast<const trimaran::Held<T>::Element*>(packed), bias, \
                            rows, n, k);                                                          \
  }                                                                                               \
  TRIMARAN_API void linear_wide_##suffix(float* out, const T* x, const void* packed,               \
                                         const float* bias, int64_t rows, int64_t n, int64_t k) { \
    trimaran::product<T, float>(out, x, static_cast<const trimaran::Held<T>::Element*>(packed),   \
                                bias, rows, n, k);                                                \
  }
TRIMARAN_EXPORT(trimaran::bf16, bf16)
TRIMARAN_EXPORT(float, f32)
