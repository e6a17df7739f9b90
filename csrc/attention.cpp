// Causal attention over the paged cache, prefill chunks and decode alike. Semantics:
// model/kernels/base.py.
//
// The rows of one request and KV head are its (token, query head of the group) pairs, tokens first;
// a tile is up to kRows of them, so that each K and V block is read once for the whole tile. Keys
// are cut into splits at fixed absolute positions. Within a split a row's scores, maximum, weights
// and weighted sum are computed outright; splits are then joined in ascending order. That order is
// the same whether one thread walks a tile's splits or several share them, and what a tile adds for
// its other rows (masked keys) enters a row as exact zeros. So a row's result depends on nothing
// but the row.
//
// Memory: keys outside what the tile's rows may see are not read: their blocks may be freed, their
// slots unwritten.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "multiply.h"

namespace trimaran {
namespace {

constexpr int kSplit = 256;  // keys; splits start at its multiples
constexpr int kRows = 64;    // of a tile
constexpr int kMaxHeadDim = 256;
constexpr int kStride = 256 + 16;  // of rows in the workspace; the 16 keep them off one cache set
constexpr int64_t kMaxPartials = 8 << 20;  // floats of unjoined splits (32 MiB)
// The stages of a tile stay apart: compiled as one, they would spill each other's registers.
#define TRIMARAN_STAGE __attribute__((noinline))
constexpr float kNothing = -std::numeric_limits<float>::infinity();

template <class T>
struct Problem {
  T* out;
  const T* q;
  const T* cache;
  const int32_t *query_start, *seq_lens, *block_table;
  int64_t requests, heads, kv_heads, block_size, head_dim, table_stride, window;
  float scale;
  int64_t group() const { return heads / kv_heads; }
};

struct Tile {
  int32_t request, kv_head;
  int64_t first_row;  // among the request's (token, head of group) pairs
  int rows;
  int64_t first_position;      // of the request's first token in this step
  int64_t first_key, end_key;  // what the tile's rows may see together
  int64_t first_split() const { return first_key / kSplit; }
  int64_t end_split() const { return (end_key + kSplit - 1) / kSplit; }
  int64_t splits() const { return end_split() - first_split(); }
  int64_t cost() const { return (rows + 16) * (end_key - first_key); }
};

// What one or more joined splits say about a row: sum of weights relative to e^maximum, and the
// weighted sum of values.
struct Softmax {
  float maximum, total;
};

template <class T>
struct alignas(64) Workspace {
  using Lane = typename Packing<T>::Lane;
  static constexpr int kDepth = kSplit / Packing<T>::per_lane;
  Lane queries[kRows * kStride];
  Lane keys[kDepth * kColumns];
  Lane values[kMaxHeadDim / kColumns * (kDepth + 1) * kColumns];  // + 1: see kStride
  float scores[kRows * kStride];  // then, in place, the weights as lanes
  float part[kRows * kStride];
  float joined[kRows * kStride];
  Softmax part_softmax[kRows], joined_softmax[kRows];
  const T* key_at[kSplit];
};

template <class T>
class TileWorker {
  using Lane = typename Packing<T>::Lane;
  static constexpr int kPerLane = Packing<T>::per_lane;

 public:
  TileWorker(const Problem<T>& problem, const Tile& tile, Workspace<T>& work)
      : p(problem), tile(tile), w(work) {}

  void load_queries() {
    for (int r = 0; r < tile.rows; ++r)
      sweep_lanes(p.head_dim, [&](int64_t d, int count) {
        Vec lanes = load_lanes(p.q + row_offset(r) + d, count);
        std::memcpy(w.queries + r * kStride + d / kPerLane, &lanes, sizeof lanes);
      });
  }

  // Fills w.part and w.part_softmax for the keys of one split.
  void attend(int64_t split) {
    const int64_t base = split * kSplit;
    begin = static_cast<int>(std::max(tile.first_key - base, int64_t{0}));
    end = static_cast<int>(std::min(tile.end_key - base, int64_t{kSplit}));
    find_keys(base);
    for (int n = begin / kColumns * kColumns; n < end; n += kColumns) {
      pack_keys(n);
      multiply<kStride, kStride>(w.queries, w.keys, p.head_dim / kPerLane, w.scores + n, tile.rows);
    }
    for (int r = 0; r < tile.rows; ++r) weigh(r, base);
    pack_values();
    const int first = begin / kPerLane, depth = (end + kPerLane - 1) / kPerLane - first;
    for (int64_t d = 0; d < p.head_dim; d += kColumns)
      multiply<kStride, kStride>(reinterpret_cast<const Lane*>(w.scores) + first,
                                 value_columns(d) + first * kColumns, depth, w.part + d, tile.rows);
  }

  void start() {
    for (int r = 0; r < tile.rows; ++r) w.joined_softmax[r] = {kNothing, 0.0f};
  }

  // Joins the next split's result to what was joined before.
  void join(const float* part, int64_t stride, const Softmax* softmax) {
    for (int r = 0; r < tile.rows; ++r, part += stride) {
      const Softmax next = softmax[r];
      Softmax& now = w.joined_softmax[r];
      float* onto = w.joined + r * kStride;
      if (next.total == 0.0f) continue;  // the row sees nothing of this split
      if (now.total == 0.0f) {
        now = next;
        std::memcpy(onto, part, p.head_dim * sizeof(float));
        continue;
      }
      const float maximum = now.maximum > next.maximum ? now.maximum : next.maximum;
      const float keep = std::exp(now.maximum - maximum), add = std::exp(next.maximum - maximum);
      now = {maximum, now.total * keep + next.total * add};
      sweep(p.head_dim, [&](int64_t d, int count) {
        store(onto + d, fma(load(onto + d, count), splat(keep), load(part + d, count) * add),
              count);
      });
    }
  }

  void finish() {
    for (int r = 0; r < tile.rows; ++r) {
      const float inverse = 1.0f / w.joined_softmax[r].total;
      sweep(p.head_dim, [&](int64_t d, int count) {
        store(p.out + row_offset(r) + d, load(w.joined + r * kStride + d, count) * inverse, count);
      });
    }
  }

 private:
  const Problem<T>& p;
  const Tile& tile;
  Workspace<T>& w;
  int begin = 0, end = 0;  // keys of this split that are read

  int64_t position(int row) const {
    return tile.first_position + (tile.first_row + row) / p.group();
  }

  int64_t row_offset(int row) const {
    const int64_t pair = tile.first_row + row;
    const int64_t token = p.query_start[tile.request] + pair / p.group();
    return (token * p.heads + tile.kv_head * p.group() + pair % p.group()) * p.head_dim;
  }

  void find_keys(int64_t base) {
    const int32_t* table = p.block_table + tile.request * p.table_stride;
    int key = begin;
    while (key < end) {
      const int64_t offset = (base + key) % p.block_size;
      const int64_t block = table[(base + key) / p.block_size];
      const T* at =
          p.cache + ((block * 2 * p.kv_heads + tile.kv_head) * p.block_size + offset) * p.head_dim;
      for (int64_t left = p.block_size - offset; left > 0 && key < end;
           --left, ++key, at += p.head_dim)
        w.key_at[key] = at;
    }
  }

  // kLanes lanes from memory: raw pairs of bf16, or values widened to fp32.
  static Vec load_lanes(const T* from, int count) {
    if constexpr (kPerLane == 2) {
      Vec lanes{};
      std::memcpy(&lanes, from, count * sizeof(T));
      return lanes;
    } else {
      return load(from, count);
    }
  }

  template <class Body>
  static void sweep_lanes(int64_t n, Body body) {
    constexpr int step = kLanes * kPerLane;
    int64_t i = 0;
    for (; i + step <= n; i += step) body(i, step);
    if (i < n) body(i, static_cast<int>(n - i));
  }

  // w.keys[depth][column] = lane `depth` of key n + column. Columns of keys that are not read keep
  // what they held; weigh() masks their scores.
  TRIMARAN_STAGE void pack_keys(int n) {
    for (int first = n; first < n + kColumns; first += kLanes) {
      if (first + kLanes <= begin || first >= end) continue;
      const T* at[kLanes];
      const T* ahead[kLanes];
      const int64_t to_value = p.kv_heads * p.block_size * p.head_dim;
      for (int i = 0; i < kLanes; ++i) {
        at[i] = w.key_at[std::clamp(first + i, begin, end - 1)];
        ahead[i] = w.key_at[std::clamp(first + i + kColumns, begin, end - 1)];
      }
      sweep_lanes(p.head_dim, [&](int64_t d, int count) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          square[i] = load_lanes(at[i] + d, count);
          __builtin_prefetch(ahead[i] + d, 0, 2);          // wanted by the next call
          __builtin_prefetch(at[i] + to_value + d, 0, 2);  // and by pack_values()
        }
        transpose(square);
        // A last, part-filled square writes lanes beyond the depth: zeros that nobody reads.
        Lane* to = w.keys + d / kPerLane * kColumns + first - n;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * kColumns, &square[i], sizeof(Vec));
      });
    }
  }

  Lane* value_columns(int64_t d) {
    return w.values + d / kColumns * (Workspace<T>::kDepth + 1) * kColumns;
  }

  // value_columns(d)[depth][column] = lane `depth` of value dimension d + column. A lane of two
  // keys of which one is not read holds zero for it: its weight is zero, and so must its value be.
  TRIMARAN_STAGE void pack_values() {
    const int64_t to_value = p.kv_heads * p.block_size * p.head_dim;
    static const T zeros[kMaxHeadDim] = {};
    for (int key = begin / kPerLane * kPerLane; key < end; key += kPerLane) {
      const T* low = key >= begin ? w.key_at[key] + to_value : zeros;
      const T* high = key + 1 < end ? w.key_at[key + 1] + to_value : zeros;
      for (int64_t d = 0; d < p.head_dim; d += kLanes) {
        Bits lane = (Bits)load(low + d);
        if constexpr (kPerLane == 2) lane = lane >> 16 | (Bits)load(high + d);
        std::memcpy(value_columns(d) + key / kPerLane * kColumns + d % kColumns, &lane,
                    sizeof lane);
      }
    }
  }

  // Turns a row's scores into weights e^(score - maximum), zero where the row must not see. (One
  // that sees nothing of the split gets NaN, which join() passes over.)
  TRIMARAN_STAGE void weigh(int row, int64_t base) {
    const int64_t last = position(row);
    const int64_t oldest = p.window ? std::max(last - p.window + 1, int64_t{0}) : 0;
    const int from = static_cast<int>(std::clamp(oldest - base, int64_t{0}, int64_t{kSplit}));
    const int to = static_cast<int>(std::clamp(last + 1 - base, int64_t{0}, int64_t{kSplit}));
    const int first = begin / (kLanes * kPerLane) * (kLanes * kPerLane);
    float* scores = w.scores + row * kStride;
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;

    Vec highest = splat(kNothing);
    for (int key = first; key < end; key += kLanes) {
      Ints at = lane + key;
      Vec score = (at >= from) & (at < to) ? load(scores + key) * p.scale : splat(kNothing);
      store(scores + key, score);
      highest = vmax(highest, score);
    }
    const float maximum = max(highest);
    Vec total{};
    auto weight = [&](int key) {
      Vec e = exp(load(scores + key) - maximum);
      if constexpr (kPerLane == 2) e = rounded(e, static_cast<const T*>(nullptr));
      total += e;
      return e;
    };
    for (int key = first; key < end; key += kLanes * kPerLane) {
      if constexpr (kPerLane == 2) {
        Vec low = weight(key), high = key + kLanes < end ? weight(key + kLanes) : Vec{};
        T* lanes = reinterpret_cast<T*>(scores) + key;
        store(lanes, low);
        store(lanes + kLanes, high);
      } else {
        store(scores + key, weight(key));
      }
    }
    w.part_softmax[row] = from < to ? Softmax{maximum, sum(total)} : Softmax{kNothing, 0.0f};
  }
};

template <class T>
std::vector<Tile> make_tiles(const Problem<T>& p) {
  std::vector<Tile> tiles;
  for (int32_t r = 0; r < p.requests; ++r) {
    const int64_t tokens = p.query_start[r + 1] - p.query_start[r];
    const int64_t first_position = p.seq_lens[r] - tokens;
    const int64_t rows = tokens * p.group();
    // The longest first: what is handed out last should be small.
    for (int64_t row = (rows - 1) / kRows * kRows; row >= 0; row -= kRows)
      for (int32_t head = 0; head < p.kv_heads; ++head) {
        Tile tile{
            r, head, row, static_cast<int>(std::min<int64_t>(rows - row, kRows)), first_position,
            0, 0};
        tile.end_key = first_position + (row + tile.rows - 1) / p.group() + 1;
        if (p.window)
          tile.first_key = std::max(first_position + row / p.group() - p.window + 1, int64_t{0});
        tiles.push_back(tile);
      }
  }
  return tiles;
}

template <class T>
Workspace<T>& workspace() {
  static thread_local Workspace<T> work;
  return work;
}

template <class T>
void attend_by_tile(const Problem<T>& p, const std::vector<Tile>& tiles, bool serial) {
#pragma omp parallel for schedule(dynamic, 1) if (!serial)
  for (size_t i = 0; i < tiles.size(); ++i) {
    Workspace<T>& work = workspace<T>();
    TileWorker<T> worker(p, tiles[i], work);
    worker.load_queries();
    worker.start();
    for (int64_t split = tiles[i].first_split(); split < tiles[i].end_split(); ++split) {
      worker.attend(split);
      worker.join(work.part, kStride, work.part_softmax);
    }
    worker.finish();
  }
}

// The same with a tile's splits shared among the threads, joined once all are there.
template <class T>
void attend_by_split(const Problem<T>& p, const std::vector<Tile>& tiles, int64_t row_splits) {
  struct Piece {
    size_t tile;
    int64_t split, offset;  // offset: of its rows in `softmax`, and times head_dim in `parts`
  };
  static thread_local std::vector<float> part_store;
  static thread_local std::vector<Softmax> softmax_store;
  part_store.resize(std::max<size_t>(part_store.size(), row_splits * p.head_dim));
  softmax_store.resize(std::max<size_t>(softmax_store.size(), row_splits));
  float* parts = part_store.data();
  Softmax* softmax = softmax_store.data();
  std::vector<Piece> pieces;
  std::vector<size_t> first_piece;
  int64_t offset = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    first_piece.push_back(pieces.size());
    for (int64_t split = tiles[i].first_split(); split < tiles[i].end_split(); ++split) {
      pieces.push_back({i, split, offset});
      offset += tiles[i].rows;
    }
  }
#pragma omp parallel
  {
    Workspace<T>& work = workspace<T>();
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      TileWorker<T> worker(p, tiles[piece.tile], work);
      worker.load_queries();
      worker.attend(piece.split);
      for (int r = 0; r < tiles[piece.tile].rows; ++r) {
        softmax[piece.offset + r] = work.part_softmax[r];
        std::memcpy(parts + (piece.offset + r) * p.head_dim, work.part + r * kStride,
                    p.head_dim * sizeof(float));
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tiles.size(); ++i) {
      TileWorker<T> worker(p, tiles[i], work);
      worker.start();
      for (int64_t s = 0; s < tiles[i].splits(); ++s) {
        const Piece& piece = pieces[first_piece[i] + s];
        worker.join(parts + piece.offset * p.head_dim, p.head_dim, softmax + piece.offset);
      }
      worker.finish();
    }
  }
}

template <class T>
void paged_attention(const Problem<T>& p) {
  const std::vector<Tile> tiles = make_tiles(p);
  int64_t total = 0, largest = 0, row_splits = 0;
  size_t pieces = 0;
  for (const Tile& tile : tiles) {
    total += tile.cost();
    largest = std::max(largest, tile.cost());
    row_splits += tile.rows * tile.splits();
    pieces += tile.splits();
  }
  // One tile that outweighs the others would keep one thread busy while the rest wait.
  const bool lopsided = largest * 8 > total && pieces > tiles.size();
  const bool serial = pieces == 1 || total * p.head_dim < kSerialWork * 16;
  if (lopsided && !serial && row_splits * p.head_dim <= kMaxPartials)
    attend_by_split(p, tiles, row_splits);
  else
    attend_by_tile(p, tiles, serial);
}

}  // namespace
}  // namespace trimaran

#define TRIMARAN_EXPORT(T, suffix)                                                               \
  TRIMARAN_API void paged_attention_##suffix(                                                    \
      T* out, const T* q, const T* cache, const int32_t* query_start, const int32_t* seq_lens,   \
      const int32_t* block_table, int64_t requests, int64_t heads, int64_t kv_heads,             \
      int64_t block_size, int64_t head_dim, int64_t table_stride, int64_t window, float scale) { \
    trimaran::paged_attention<T>({out, q, cache, query_start, seq_lens, block_table, requests,   \
                                  heads, kv_heads, block_size, head_dim, table_stride, window,   \
                                  scale});                                                       \
  }
TRIMARAN_EXPORT(trimaran::bf16, bf16)
TRIMARAN_EXPORT(float, f32)
