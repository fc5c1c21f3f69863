// The index of keys and the choice of the best, see sparse_attn/index.py. No torch.
//
// A key before rotary embedding is projected onto R directions and stored as R codes of 4 bits. A
// query scores a key by the inner product with the key rebuilt from its codes. Where a pair of
// dimensions turns with the row alone or with the column alone, that product is
//   sum_d (u[row][d] + w[column][d]) * code[d] + (u[row][R] + w[column][R])
// with one projection u of the query per row and one w per column.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../reads.h"
#include "attend.h"

namespace bishop {

inline constexpr int kLevels = 16;
inline constexpr int kMostDims = 64;  // directions of an index

// What one head's index is made with; `half` is head_dim / 2, and pair i is (i, i + half).
struct IndexTables {
  const float *mean, *basis, *step;  // [D], [D][R], [R]
  const float *cos, *sin;            // [positions][half]
  int half, dims, row_pairs, stride;

  const float* cosines(int position) const { return cos + int64_t{position} * half; }
  const float* sines(int position) const { return sin + int64_t{position} * half; }
  int bytes() const { return dims / 2; }
};

// In what follows R is the number of directions where the code is compiled for it, else 0.

// Index of a key (after rotary embedding) at a position: two codes a byte, the even one low.
template <int R>
void encode_key(const IndexTables& x, const float* key, int position, float* projected,
                       uint8_t* out) {
  const int dims = R ? R : x.dims;
  const float *c = x.cosines(position), *s = x.sines(position);
  std::fill(projected, projected + dims, 0.f);
  for (int i = 0; i < x.half; ++i) {
    const float a = key[i] * c[i] + key[i + x.half] * s[i] - x.mean[i];
    const float b = key[i + x.half] * c[i] - key[i] * s[i] - x.mean[i + x.half];
    const float *ea = x.basis + i * dims, *eb = x.basis + (i + x.half) * dims;
    for (int d = 0; d < dims; ++d) projected[d] += a * ea[d] + b * eb[d];
  }
  for (int d = 0; d < dims; d += 2) {
    uint8_t code[2];
    for (int e = 0; e < 2; ++e) {
      const float level = std::floor(projected[d + e] / x.step[d + e]) + kLevels / 2;
      code[e] = static_cast<uint8_t>(std::clamp(level, 0.f, kLevels - 1.f));
    }
    out[d / 2] = static_cast<uint8_t>(code[0] | code[1] << 4);
  }
}

// What pairs [begin, end) of a query contribute at a position: R factors of the codes and the rest.
template <int R>
void project_query(const IndexTables& x, const float* q, int position, int begin, int end,
                   float* out) {
  const int dims = R ? R : x.dims;
  const float *c = x.cosines(position), *s = x.sines(position);
  float sum[R ? R : kMostDims] = {}, rest = 0.f;
  for (int i = begin; i < end; ++i) {
    const float a = q[i] * c[i] + q[i + x.half] * s[i];
    const float b = q[i + x.half] * c[i] - q[i] * s[i];
    const float *ea = x.basis + i * dims, *eb = x.basis + (i + x.half) * dims;
    for (int d = 0; d < dims; ++d) sum[d] += a * ea[d] + b * eb[d];
    rest += a * x.mean[i] + b * x.mean[i + x.half];
  }
  for (int d = 0; d < dims; ++d) {
    out[d] = sum[d] * x.step[d];
    rest -= out[d] * (0.5f * (kLevels - 1));
  }
  out[dims] = rest;
}

// Projections of one query, [rows][R + 1] and [columns][R + 1].
struct QueryTables {
  std::vector<float> rows, columns;

  template <int R>
  void fill(const IndexTables& x, const float* q, int position) {
    const int width = (R ? R : x.dims) + 1, last = position / x.stride;
    rows.resize(static_cast<size_t>(last + 1) * width);
    columns.resize(static_cast<size_t>(x.stride) * width);
    for (int r = 0; r <= last; ++r)
      project_query<R>(x, q, r * x.stride, 0, x.row_pairs, rows.data() + r * width);
    for (int c = 0; c < x.stride; ++c)
      project_query<R>(x, q, c, x.row_pairs, x.half, columns.data() + c * width);
  }

  template <int R>
  float score(const IndexTables& x, int row, int column, const uint8_t* code) const {
    const int dims = R ? R : x.dims;
    const float* u = rows.data() + static_cast<size_t>(row) * (dims + 1);
    const float* w = columns.data() + static_cast<size_t>(column) * (dims + 1);
    float even = u[dims] + w[dims], odd = 0.f;
    for (int d = 0; d < dims; d += 2) {
      even += (u[d] + w[d]) * static_cast<float>(code[d / 2] & 15);
      odd += (u[d + 1] + w[d + 1]) * static_cast<float>(code[d / 2] >> 4);
    }
    return even + odd;
  }
};

// Follows ascending keys through the picture and through a head's ring, without a division for
// each: where a key stands, and which place its index has.
struct Walk {
  HeadRegion region;
  int stride;
  int key = -2, row = 0, column = 0, place = 0;

  void to(int next) {
    if (next == key + 1 && next != region.anchors) {
      if (++column == stride) column = 0, ++row;
      if (++place == region.anchors + region.ring) place = region.anchors;
    } else {
      row = next / stride;
      column = next - row * stride;
      place = region.visual(next) - region.prompt;
    }
    key = next;
  }
};

struct Scored {
  float score;
  int32_t key;
};

// The `count` best, best first; among equals the newest. What is not a number comes last.
inline void keep_best(std::vector<Scored>& keys, size_t count) {
  const auto better = [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.key > b.key;
  };
  for (Scored& k : keys)
    if (std::isnan(k.score)) k.score = -std::numeric_limits<float>::infinity();
  if (count < keys.size()) {
    std::nth_element(keys.begin(), keys.begin() + static_cast<int64_t>(count), keys.end(), better);
    keys.resize(count);
  }
  std::sort(keys.begin(), keys.end(), better);
}

// One score per key for the queries that share a selection: a single query's own, else the sum of
// their softmax weights. `raw` is [queries][keys] and is overwritten.
inline void share_scores(float* raw, int queries, std::vector<Scored>& keys) {
  const int n = static_cast<int>(keys.size());
  for (int i = 0; i < n && queries == 1; ++i) keys[i].score = raw[i];
  if (queries == 1) return;
  for (Scored& k : keys) k.score = 0.f;
  for (int q = 0; q < queries; ++q) {
    float* row = raw + static_cast<int64_t>(q) * n;
    const float total = exponentials(row, n, highest(row, n), row);
    for (int i = 0; i < n; ++i) keys[i].score += row[i] / total;
  }
}

}  // namespace bishop
