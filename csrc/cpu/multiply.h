// x W^T for a handful of rows: the linear layers of a decode step.
//
// Weights are packed in panels of 64 outputs, [N / 64][K][64], zero-padded, so that one step of k
// is one run of memory (an INT8 panel reads one cache line). Every output is a single chain of FMAs
// over k = 0, 1, .. K - 1, whatever the number of rows and the tile they fall in: a row's result
// is the same bits for every batch it is in.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace bishop {

inline constexpr int kPanel = 64;

#if BISHOP_AVX512
inline constexpr int kTileRows = 8;
inline constexpr int tile_vectors(int rows) { return rows <= 6 ? 4 : 2; }  // of 32 registers
#else
inline constexpr int kTileRows = 6;
inline constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }  // of 16
#endif

// Rows of x side by side by k: [K][rows], so that a tile reads them as one stream.
inline void interleave(const float* x, int rows, int64_t depth, float* out) {
  for (int r = 0; r < rows; ++r)
    for (int64_t k = 0; k < depth; ++k) out[k * rows + r] = x[r * depth + k];
}

// M rows times N vectors of outputs. `x` is interleaved; `w` points at the first output's column.
template <int M, int N, typename W>
inline void multiply_block(const float* x, const W* w, int64_t depth, Vec (&acc)[M][N]) {
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) acc[m][n] = set1(0.f);
  for (int64_t k = 0; k < depth; ++k, x += M, w += kPanel) {
    Vec b[N];
    for (int n = 0; n < N; ++n) b[n] = load(w + n * Vec::width);
    for (int m = 0; m < M; ++m) {
      const Vec a = set1(x[m]);
      for (int n = 0; n < N; ++n) acc[m][n] = fma(a, b[n], acc[m][n]);
    }
  }
}

// Outputs of one panel: where they go and how many of its 64 columns exist.
struct PanelOut {
  float* out;          // first row, first column of the panel
  int64_t row_stride;  // outputs per row
  const float* scale;  // of the panel's columns, or null
  int columns;
};

template <int M, int N>
inline void store_block(const Vec (&acc)[M][N], const PanelOut& p, int column) {
  for (int n = 0; n < N; ++n) {
    const int at = column + n * Vec::width;
    const int left = std::min(p.columns - at, Vec::width);
    if (left <= 0) return;
    const Vec factor = p.scale ? load(p.scale + at, left) : set1(1.f);
    for (int m = 0; m < M; ++m) store(p.out + m * p.row_stride + at, acc[m][n] * factor, left);
  }
}

template <int M, typename W>
void multiply_panel(const float* x, const W* panel, int64_t depth, const PanelOut& p) {
  constexpr int N = tile_vectors(M);
  for (int column = 0; column < p.columns; column += N * Vec::width) {
    Vec acc[M][N];
    multiply_block<M, N>(x, panel + column, depth, acc);
    store_block(acc, p, column);
  }
}

template <typename W>
using MultiplyPanel = void (*)(const float*, const W*, int64_t, const PanelOut&);

template <typename W>
MultiplyPanel<W> multiply_panel_of(int rows) {
  static constexpr MultiplyPanel<W> table[] = {
      multiply_panel<1, W>, multiply_panel<2, W>, multiply_panel<3, W>, multiply_panel<4, W>,
      multiply_panel<5, W>, multiply_panel<6, W>,
#if BISHOP_AVX512
      multiply_panel<7, W>, multiply_panel<8, W>,
#endif
  };
  return table[rows - 1];
}

// The rows of x in tiles of nearly equal size, each interleaved.
class RowTiles {
 public:
  RowTiles(const float* x, int64_t rows, int64_t depth, std::vector<float>& buffer)
      : rows_(rows), depth_(depth), count_((rows + kTileRows - 1) / kTileRows), data_(x) {
    if (rows == 1) return;
    buffer.resize(rows * depth);
    for (int64_t i = 0; i < count_; ++i)
      interleave(x + first(i) * depth, size(i), depth, buffer.data() + first(i) * depth);
    data_ = buffer.data();
  }
  int64_t count() const { return count_; }
  int64_t first(int64_t i) const { return rows_ * i / count_; }
  int size(int64_t i) const { return static_cast<int>(first(i + 1) - first(i)); }
  const float* data(int64_t i) const { return data_ + first(i) * depth_; }

 private:
  int64_t rows_, depth_, count_;
  const float* data_;
};

}  // namespace bishop
