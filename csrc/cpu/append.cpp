// `append` on the CPU: the key and value of each sequence's position into its ring or anchors.
#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops.h"
#include "parallel.h"
#include "simd.h"
#include "storage.h"
#include "values.h"

namespace bishop::cpu {
namespace {

template <typename T>
void convert(const float* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(from[i], to[i]);
}

// Codes and their scale as `sparse_attn.format.quantize` makes them.
float quantize(const float* from, int8_t* to, int64_t n) {
  float most = 0.f;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(from[i]));
  const float scale = most / 127.f;
  const float divisor = std::max(scale, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < n; ++i)
    to[i] = static_cast<int8_t>(std::clamp(std::nearbyint(from[i] / divisor), -127.f, 127.f));
  return scale;
}

template <typename T>
void write_entry(T* arena, int64_t entry, const float* k, const float* v, int64_t dim) {
  convert(k, arena + 2 * entry * dim, dim);
  convert(v, arena + (2 * entry + 1) * dim, dim);
}

void write_entry(int8_t* arena, int64_t entry, const float* k, const float* v, int64_t dim) {
  int8_t* to = arena + entry * int8_entry_bytes(dim);
  const float scales[2] = {quantize(k, to, dim), quantize(v, to + dim, dim)};
  std::memcpy(to + 2 * dim, scales, sizeof scales);
  std::memset(to + 2 * dim + sizeof scales, 0, int8_entry_bytes(dim) - 2 * dim - sizeof scales);
}

struct Append {
  const float *k, *v;
  int64_t k_stride, v_stride;
  const int64_t *head_offsets, *slots;
  const int32_t* positions;
};

template <typename T>
void append_head(const CacheArgs& c, const Append& a, T* arena, int64_t b, int64_t h) {
  const int64_t dim = c.dim();
  const int64_t entry = a.slots[b] + a.head_offsets[h] + region_of(c, h).visual(a.positions[b]);
  write_entry(arena, entry, a.k + b * a.k_stride + h * dim, a.v + b * a.v_stride + h * dim, dim);
}

}  // namespace

void append(const Tensor& k, const Tensor& v, Tensor arena, const Tensor& head_offsets,
            const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
            const Tensor& slots, const Tensor& positions) {
  const CacheArgs cache{arena, head_offsets, rings, prompt_capacity, cache_anchors, k.size(-1)};
  check_append(k, v, cache, slots, positions);
  check_values(cache, slots, positions);
  const Append a{k.const_data_ptr<float>(), v.const_data_ptr<float>(), k.stride(0), v.stride(0),
                 head_offsets.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                 positions.const_data_ptr<int32_t>()};
  with_storage(arena, [&](auto* data) {
    for (int64_t b = 0; b < k.size(0); ++b)
      for (int64_t h = 0; h < cache.heads(); ++h) append_head(cache, a, data, b, h);
  });
}

}  // namespace bishop::cpu
