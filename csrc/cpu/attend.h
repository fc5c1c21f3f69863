// Attention of the queries of one KV head over a list of entries: an online softmax over tiles of
// keys. The order of all arithmetic depends on the list alone, never on threads or batch mates.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace bishop {

inline constexpr int kTile = 128;  // keys between two looks at the running maximum
// Keys fetched ahead, since a gather defeats the hardware's prefetching. They go to the second cache
// level: the first has so few fill buffers that it halves the rate. More at a time are slower, too.
inline constexpr int kAhead = 16;
inline constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The keys and values of one head. An entry is K then V, `dim` numbers each; INT8 entries end in
// the scale of K and the scale of V (`sparse_attn.format.Int8Format`).
template <typename T>
struct KeyValues {
  static constexpr bool scaled = std::is_same_v<T, int8_t>;
  const char* data;
  int64_t entry_bytes;
  int dim;

  // `first`: the head's first entry in the arena.
  static KeyValues of(const T* arena, int64_t first, int dim) {
    const int64_t bytes = scaled ? int8_entry_bytes(dim) : 2 * dim * int64_t{sizeof(T)};
    return {reinterpret_cast<const char*>(arena) + first * bytes, bytes, dim};
  }
  const T* key(int entry) const { return reinterpret_cast<const T*>(data + entry * entry_bytes); }
  const T* value(int entry) const { return key(entry) + dim; }
  float key_scale(int entry) const { return scale(entry, 0); }
  float value_scale(int entry) const { return scale(entry, 1); }
  void prefetch(const int32_t* entries, int begin, int end) const {
    for (int i = begin; i < end; ++i) {
      const char* p = data + entries[i] * entry_bytes;
      for (int at = 0; at < entry_bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
    }
  }

 private:
  float scale(int entry, int which) const {
    float result;
    std::memcpy(&result, key(entry) + 2 * dim + 4 * which, sizeof result);
    return result;
  }
};

// Products of Q queries (rows of `q`, dim apart) with one key, lane by lane. D is the head dim
// where the code is compiled for it, else 0 (and so below).
template <int Q, int D, typename T>
inline void multiply(const float* q, const T* key, int any_dim, Vec (&acc)[Q]) {
  const int dim = D ? D : any_dim;
  for (int i = 0; i < Q; ++i) acc[i] = set1(0.f);
  int d = 0;
  for (; d + Vec::width <= dim; d += Vec::width) {
    const Vec k = load(key + d);
    for (int i = 0; i < Q; ++i) acc[i] = fma(load(q + i * dim + d), k, acc[i]);
  }
  const int left = dim - d;
  if (!left) return;
  const Vec k = load(key + d, left);
  for (int i = 0; i < Q; ++i) acc[i] = fma(load(q + i * dim + d, left), k, acc[i]);
}

template <typename T>
inline float dot(const float* q, const T* key, int dim) {
  Vec product[1];
  multiply<1, 0>(q, key, dim, product);
  return sum(product[0]);
}

// Scores of up to Vec::width keys for each query, at scores[i * stride ..].
template <int Q, int D, typename T>
inline void score_block(const KeyValues<T>& kv, const int32_t* entries, int keys, const float* q,
                        float* scores, int stride) {
  Vec products[Q][Vec::width];
  float factors[Vec::width];
  for (int k = 0; k < Vec::width; ++k) {
    const int entry = entries[k < keys ? k : 0];
    Vec one[Q];
    multiply<Q, D>(q, kv.key(entry), kv.dim, one);
    for (int i = 0; i < Q; ++i) products[i][k] = one[i];
    if constexpr (kv.scaled) factors[k] = kv.key_scale(entry);
  }
  for (int i = 0; i < Q; ++i) {
    Vec s = sums(products[i]);
    if constexpr (kv.scaled) s = s * load(factors);
    store(scores + i * stride, s, keys);
  }
}

// Scores of the tile [begin, end) of all `count` entries.
template <int Q, int D, typename T>
void score(const KeyValues<T>& kv, const int32_t* entries, int begin, int end, int count,
           const float* q, float* scores) {
  for (int at = begin; at < end; at += Vec::width) {
    const int next = at + kAhead;
    kv.prefetch(entries, next, std::min(next + Vec::width, count));
    score_block<Q, D>(kv, entries + at, std::min(end - at, Vec::width), q, scores + at, count);
  }
}

// out[Q][N vectors from d on] += sum over the tile of weights * V.
template <int Q, int N, typename T>
inline void mix_block(const KeyValues<T>& kv, const int32_t* entries, int keys, int d,
                      const float (*weights)[kTile], float* out) {
  Vec acc[Q][N];
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) acc[i][n] = load(out + i * kv.dim + d + n * Vec::width);
  for (int k = 0; k < keys; ++k) {
    const T* value = kv.value(entries[k]) + d;
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = load(value + n * Vec::width);
    for (int i = 0; i < Q; ++i)
      for (int n = 0; n < N; ++n) acc[i][n] = fma(set1(weights[i][k]), v[n], acc[i][n]);
  }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) store(out + i * kv.dim + d + n * Vec::width, acc[i][n]);
}

// The same for the last `left` < Vec::width components of one query.
template <typename T>
inline void mix_tail(const KeyValues<T>& kv, const int32_t* entries, int keys, int d, int left,
                     const float* weights, float* out) {
  Vec acc = load(out + d, left);
  for (int k = 0; k < keys; ++k)
    acc = fma(set1(weights[k]), load(kv.value(entries[k]) + d, left), acc);
  store(out + d, acc, left);
}

template <int Q, int D, typename T>
void mix(const KeyValues<T>& kv, const int32_t* entries, int keys, float (*weights)[kTile],
         float* out) {
  if constexpr (kv.scaled)
    for (int k = 0; k < keys; ++k)
      for (int i = 0; i < Q; ++i) weights[i][k] *= kv.value_scale(entries[k]);
  const int dim = D ? D : kv.dim;
  int d = 0;
  for (; d + 4 * Vec::width <= dim; d += 4 * Vec::width)
    mix_block<Q, 4>(kv, entries, keys, d, weights, out);
  for (; d + Vec::width <= dim; d += Vec::width)
    mix_block<Q, 1>(kv, entries, keys, d, weights, out);
  for (int i = 0; i < Q && d < dim; ++i)
    mix_tail(kv, entries, keys, d, dim - d, weights[i], out + i * dim);
}

inline float highest(const float* x, int n) {
  Vec m = set1(kLowest);
  int i = 0;
  for (; i + Vec::width <= n; i += Vec::width) m = max(load(x + i), m);
  float result = highest(m);
  for (; i < n; ++i) result = result < x[i] ? x[i] : result;
  return result;
}

// out[i] = e^(x[i] - shift); returns their sum.
inline float exponentials(const float* x, int n, float shift, float* out) {
  Vec total = set1(0.f);
  for (int i = 0; i < n; i += Vec::width) {
    const int left = std::min(n - i, Vec::width);
    store(out + i, exp(load(x + i, left) - set1(shift)), left);
    total = total + load(out + i, left);
  }
  return sum(total);
}

inline void scale(float* x, int n, float factor) {
  for (int i = 0; i < n; i += Vec::width) {
    const int left = std::min(n - i, Vec::width);
    store(x + i, load(x + i, left) * set1(factor), left);
  }
}

inline float exp(float x) {
  float lane[Vec::width];
  store(lane, exp(set1(x)));
  return lane[0];
}

// Running softmax of one query.
struct Running {
  float max = kLowest;
  float sum = 0.f;

  // Takes in a tile of scores: weights relative to the new maximum; `out` is rescaled to it.
  void absorb(const float* scores, int n, float* weights, float* out, int dim) {
    const float top = std::max(max, highest(scores, n));
    if (top > max && sum > 0.f) {
      const float shrink = exp(max - top);
      scale(out, dim, shrink);
      sum *= shrink;
    }
    max = top;
    sum += exponentials(scores, n, top, weights);
  }
};

// Starts to fetch what `attend` needs first; it fetches the rest itself.
template <typename T>
void prefetch_first(const KeyValues<T>& kv, const std::vector<int32_t>& entries) {
  kv.prefetch(entries.data(), 0, std::min(kAhead, static_cast<int>(entries.size())));
}

// Q queries over all entries. `scores` [Q][count] keeps the raw scores for the arg-min.
template <int Q, int D, typename T>
void attend(const KeyValues<T>& kv, const std::vector<int32_t>& entries, const float* q,
            float* scores, Running* running, float* out) {
  const int count = static_cast<int>(entries.size());
  float weights[Q][kTile];
  std::fill(out, out + Q * kv.dim, 0.f);
  for (int begin = 0; begin < count; begin += kTile) {
    const int end = std::min(begin + kTile, count);
    score<Q, D>(kv, entries.data(), begin, end, count, q, scores);
    for (int i = 0; i < Q; ++i)
      running[i].absorb(scores + i * count + begin, end - begin, weights[i], out + i * kv.dim,
                        kv.dim);
    mix<Q, D>(kv, entries.data() + begin, end - begin, weights, out);
  }
  for (int i = 0; i < Q && count > 0; ++i) scale(out + i * kv.dim, kv.dim, 1.f / running[i].sum);
}

// Any number of queries, four at a time where possible.
template <int D, typename T>
void attend_group(const KeyValues<T>& kv, const std::vector<int32_t>& entries, int queries,
                  const float* q, float* scores, Running* running, float* out) {
  const int64_t count = static_cast<int64_t>(entries.size());
  for (int i = 0; i < queries;) {
    const int step = queries - i >= 4 ? 4 : queries - i >= 2 ? 2 : 1;
    const auto run = step == 4 ? attend<4, D, T> : step == 2 ? attend<2, D, T> : attend<1, D, T>;
    run(kv, entries, q + i * kv.dim, scores + i * count, running + i, out + i * kv.dim);
    i += step;
  }
}

// Heads of 64, 100 and 128 are compiled for; any other size runs the same arithmetic in loops.
template <typename T>
void attend(const KeyValues<T>& kv, const std::vector<int32_t>& entries, int queries,
            const float* q, float* scores, Running* running, float* out) {
  const auto run = kv.dim == 64    ? attend_group<64, T>
                   : kv.dim == 100 ? attend_group<100, T>
                   : kv.dim == 128 ? attend_group<128, T>
                                   : attend_group<0, T>;
  run(kv, entries, queries, q, scores, running, out);
}

}  // namespace bishop
