// Attention of the queries of one KV head over a list of entries: an online softmax over tiles of
// keys. The order of all arithmetic depends on the list alone, never on threads or batch mates.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

namespace bishop {

inline constexpr int kTile = 32;        // keys between two looks at the running maximum
inline constexpr int kPrefetch = 12;    // keys fetched ahead; a gather defeats the hardware's
inline constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The keys and values of one head: entry e holds K at `data + 2 * e * dim` and V right behind.
template <typename T>
struct KeyValues {
  static constexpr bool scaled = false;
  const T* data;
  int dim;

  KeyValues from(int64_t entry) const { return {data + 2 * entry * dim, dim}; }
  const T* key(int entry) const { return data + int64_t{2} * entry * dim; }
  const T* value(int entry) const { return key(entry) + dim; }
  void prefetch(int entry) const {
    const char* p = reinterpret_cast<const char*>(key(entry));
    const int bytes = 2 * dim * static_cast<int>(sizeof(T));
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
  }
};

// The same in 8 bits: an entry is [K | V | scale of K | scale of V | padding], see
// `sparse_attn.format.Int8Format`.
template <>
struct KeyValues<int8_t> {
  static constexpr bool scaled = true;
  const int8_t* data;
  int dim;

  KeyValues from(int64_t entry) const { return {data + entry * int8_entry_bytes(dim), dim}; }
  const int8_t* key(int entry) const { return data + entry * int8_entry_bytes(dim); }
  const int8_t* value(int entry) const { return key(entry) + dim; }
  float key_scale(int entry) const { return scale_at(key(entry) + 2 * dim); }
  float value_scale(int entry) const { return scale_at(key(entry) + 2 * dim + 4); }
  void prefetch(int entry) const {
    const char* p = reinterpret_cast<const char*>(key(entry));
    for (int at = 0; at < 2 * dim + 8; at += 64) __builtin_prefetch(p + at);
  }

 private:
  static float scale_at(const int8_t* p) {
    float scale;
    std::memcpy(&scale, p, sizeof scale);
    return scale;
  }
};

// Dot products of Q queries (rows of `q`, dim apart) with one key.
template <int Q, typename T>
inline void dot(const float* q, const T* key, int dim, float* scores, int stride) {
  Vec acc[Q];
  for (int i = 0; i < Q; ++i) acc[i] = set1(0.f);
  int d = 0;
  for (; d + Vec::width <= dim; d += Vec::width) {
    const Vec k = load(key + d);
    for (int i = 0; i < Q; ++i) acc[i] = fma(load(q + i * dim + d), k, acc[i]);
  }
  if (d < dim) {
    const Vec k = load(key + d, dim - d);
    for (int i = 0; i < Q; ++i) acc[i] = fma(load(q + i * dim + d, dim - d), k, acc[i]);
  }
  for (int i = 0; i < Q; ++i) scores[i * stride] = sum(acc[i]);
}

template <int Q, typename T>
void score(const KeyValues<T>& kv, const int32_t* entries, int begin, int end, int count,
           const float* q, float* scores, int stride) {
  for (int i = begin; i < end; ++i) {
    if (i + kPrefetch < count) kv.prefetch(entries[i + kPrefetch]);
    dot<Q>(q, kv.key(entries[i]), kv.dim, scores + i, stride);
    if constexpr (KeyValues<T>::scaled)
      for (int g = 0; g < Q; ++g) scores[g * stride + i] *= kv.key_scale(entries[i]);
  }
}

// Weights of a tile times what its values' codes are to be multiplied with.
template <typename T>
inline void scale_weights(const KeyValues<T>& kv, const int32_t* entries, int keys, float* weights) {
  if constexpr (KeyValues<T>::scaled)
    for (int k = 0; k < keys; ++k) weights[k] *= kv.value_scale(entries[k]);
}

// out[Q][N vectors from d on] += sum over the tile of weights * V.
template <int Q, int N, typename T>
inline void accumulate(const KeyValues<T>& kv, const int32_t* entries, int keys, int d,
                       const float* weights, int stride, float* out) {
  Vec acc[Q][N];
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) acc[i][n] = load(out + i * kv.dim + d + n * Vec::width);
  for (int k = 0; k < keys; ++k) {
    const T* value = kv.value(entries[k]) + d;
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = load(value + n * Vec::width);
    for (int i = 0; i < Q; ++i) {
      const Vec w = set1(weights[i * stride + k]);
      for (int n = 0; n < N; ++n) acc[i][n] = fma(w, v[n], acc[i][n]);
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) store(out + i * kv.dim + d + n * Vec::width, acc[i][n]);
}

// The same for the last `left` < Vec::width components.
template <typename T>
inline void accumulate_tail(const KeyValues<T>& kv, const int32_t* entries, int keys, int d,
                            int left, const float* weights, float* out) {
  Vec acc = load(out + d, left);
  for (int k = 0; k < keys; ++k)
    acc = fma(set1(weights[k]), load(kv.value(entries[k]) + d, left), acc);
  store(out + d, acc, left);
}

template <int Q, typename T>
void mix(const KeyValues<T>& kv, const int32_t* entries, int keys, const float* weights,
         int stride, float* out) {
  int d = 0;
  for (; d + 4 * Vec::width <= kv.dim; d += 4 * Vec::width)
    accumulate<Q, 4>(kv, entries, keys, d, weights, stride, out);
  for (; d + Vec::width <= kv.dim; d += Vec::width)
    accumulate<Q, 1>(kv, entries, keys, d, weights, stride, out);
  for (int i = 0; i < Q && d < kv.dim; ++i)
    accumulate_tail(kv, entries, keys, d, kv.dim - d, weights + i * stride, out + i * kv.dim);
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

// Q queries over all entries. `scores` [Q][count] keeps the raw scores for the arg-min.
template <int Q, typename T>
void attend(const KeyValues<T>& kv, const std::vector<int32_t>& entries, const float* q,
            float* scores, Running* running, float* out) {
  const int count = static_cast<int>(entries.size());
  float weights[Q][kTile];
  std::fill(out, out + Q * kv.dim, 0.f);
  for (int i = 0; i < std::min(kPrefetch, count); ++i) kv.prefetch(entries[i]);
  for (int begin = 0; begin < count; begin += kTile) {
    const int end = std::min(begin + kTile, count);
    score<Q>(kv, entries.data(), begin, end, count, q, scores, count);
    for (int i = 0; i < Q; ++i) {
      running[i].absorb(scores + i * count + begin, end - begin, weights[i], out + i * kv.dim,
                        kv.dim);
      scale_weights(kv, entries.data() + begin, end - begin, weights[i]);
    }
    mix<Q>(kv, entries.data() + begin, end - begin, weights[0], kTile, out);
  }
  for (int i = 0; i < Q && count > 0; ++i) scale(out + i * kv.dim, kv.dim, 1.f / running[i].sum);
}

// Any number of queries, four at a time where possible.
template <typename T>
void attend(const KeyValues<T>& kv, const std::vector<int32_t>& entries, int queries,
            const float* q, float* scores, Running* running, float* out) {
  const int64_t count = static_cast<int64_t>(entries.size());
  for (int i = 0; i < queries;) {
    const int step = queries - i >= 4 ? 4 : queries - i >= 2 ? 2 : 1;
    const auto run = step == 4 ? attend<4, T> : step == 2 ? attend<2, T> : attend<1, T>;
    run(kv, entries, q + i * kv.dim, scores + i * count, running + i, out + i * kv.dim);
    i += step;
  }
}

}  // namespace bishop
