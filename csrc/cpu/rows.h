// Row-wise arithmetic of a decoder layer, on raw pointers. A row never depends on another.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace bishop {

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int n, float eps) {
  Vec total = set1(0.f);
  int i = 0;
  for (; i + Vec::width <= n; i += Vec::width) total = fma(load(x + i), load(x + i), total);
  if (i < n) total = fma(load(x + i, n - i), load(x + i, n - i), total);
  return 1.f / std::sqrt(sum(total) / static_cast<float>(n) + eps);
}

inline void rms_norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  const Vec factor = set1(inverse_rms(x, n, eps));
  for (int i = 0; i < n; i += Vec::width) {
    const int left = std::min(n - i, Vec::width);
    store(out + i, load(x + i, left) * factor * load(weight + i, left), left);
  }
}

// silu(gate) * up, for a row [gate | up] of n values each.
inline void swiglu_row(const float* gate_up, int n, float* out) {
  for (int i = 0; i < n; i += Vec::width) {
    const int left = std::min(n - i, Vec::width);
    const Vec gate = load(gate_up + i, left);
    const Vec silu = gate / (set1(1.f) + exp(set1(0.f) - gate));
    store(out + i, silu * load(gate_up + n + i, left), left);
  }
}

// Rotates the halves of a head by the angles whose cosines and sines are given, in place.
inline void rotate_head(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i += Vec::width) {
    const int left = std::min(half - i, Vec::width);
    const Vec c = load(cosine + i, left), s = load(sine + i, left);
    const Vec a = load(x + i, left), b = load(x + half + i, left);
    store(x + i, fma(a, c, set1(0.f) - b * s), left);
    store(x + half + i, fma(a, s, b * c), left);
  }
}

}  // namespace bishop
