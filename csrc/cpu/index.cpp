// `index_select` on the CPU: one task per sequence and group of heads that share a selection.
#include <ATen/core/Tensor.h>

#include <array>
#include <type_traits>

#include "attend.h"
#include "index.h"
#include "ops.h"
#include "parallel.h"
#include "storage.h"
#include "values.h"

namespace bishop::cpu {
namespace {

// What one launch needs, as raw pointers and numbers.
struct Select {
  const CacheArgs& cache;
  const float* q;
  int64_t q_stride;
  uint8_t* memory;
  const int64_t *index_offsets, *slots, *rows;
  const int32_t *positions, *window;
  Offset* offsets;
  int64_t row_stride, head_stride;
  int places;
  const float *mean, *basis, *step, *cos, *sin;
  int dims, row_pairs, stride;
  int picks, candidates, share;
  float scale;
  int64_t group, entry_bytes;

  int dim() const { return static_cast<int>(cache.dim()); }
  IndexTables tables(int64_t h) const {
    return {mean + h * dim(), basis + h * dim() * dims, step + h * dims, cos, sin,
            dim() / 2, dims, row_pairs, stride};
  }
  HeadRegion region(int64_t h) const { return region_of(cache, h); }
  int64_t first_entry(int64_t b, int64_t h) const {
    return slots[b] + cache.head_offsets.const_data_ptr<int64_t>()[h];
  }
  // The index of a head: beside the entries, in their order, without the prompt.
  uint8_t* index(int64_t b, int64_t h) const {
    return memory + slots[b] * entry_bytes + index_offsets[h];
  }
};

struct Scratch {
  std::vector<float> raw, key, projected;
  std::vector<Scored> keys;
  QueryTables tables;
};

template <typename T>
void load_key(const KeyValues<T>& kv, int entry, float* out) {
  for (int d = 0; d < kv.dim; ++d) out[d] = to_float(kv.key(entry)[d]);
  if constexpr (KeyValues<T>::scaled) scale(out, kv.dim, kv.key_scale(entry));
}

// Writes the index of the query's own key, as it is stored.
template <int R, typename T>
void index_own_key(const Select& s, const T* arena, int64_t b, int64_t h, Scratch& x) {
  const auto kv = KeyValues<T>::of(arena, s.first_entry(b, h), s.dim());
  x.key.resize(s.dim());
  x.projected.resize(s.dims);
  const int t = s.positions[b];
  load_key(kv, s.region(h).visual(t), x.key.data());
  const int64_t place = s.region(h).visual(t) - s.cache.prompt;
  encode_key<R>(s.tables(h), x.key.data(), t, x.projected.data(),
                s.index(b, h) + place * (s.dims / 2));
}

// Keys older than the recent ones that all heads of the group still store.
void list_keys(const Select& s, int64_t b, int64_t first, std::vector<Scored>& keys) {
  const int t = s.positions[b];
  int ring = s.region(first).ring;
  for (int64_t h = first; h < first + s.share; ++h) ring = std::min(ring, s.region(h).ring);
  const int anchors = static_cast<int>(s.cache.anchors), newest = t - s.window[first];
  keys.clear();
  for (int j = 0; j < std::min(anchors, newest + 1); ++j) keys.push_back({0.f, j});
  for (int j = std::max(anchors, t - ring + 1); j <= newest; ++j) keys.push_back({0.f, j});
}

// Scores of `x.keys` by the index, for every query of the group.
template <int R>
void score_by_index(const Select& s, int64_t b, int64_t first, Scratch& x) {
  float* raw = x.raw.data();
  for (int64_t h = first; h < first + s.share; ++h) {
    const IndexTables tables = s.tables(h);
    for (int64_t g = 0; g < s.group; ++g) {
      const float* q = s.q + b * s.q_stride + (h * s.group + g) * s.dim();
      x.tables.fill<R>(tables, q, s.positions[b]);
      const uint8_t* index = s.index(b, h);
      Walk at{s.region(h), s.stride};
      for (const Scored& k : x.keys) {
        at.to(k.key);
        const uint8_t* code = index + int64_t{at.place} * tables.bytes();
        *raw++ = x.tables.score<R>(tables, at.row, at.column, code) * s.scale;
      }
    }
  }
}

// Scores of `x.keys` by the keys themselves.
template <typename T>
void score_exactly(const Select& s, const T* arena, int64_t b, int64_t first, Scratch& x) {
  float* raw = x.raw.data();
  for (int64_t h = first; h < first + s.share; ++h) {
    const auto kv = KeyValues<T>::of(arena, s.first_entry(b, h), s.dim());
    for (int64_t g = 0; g < s.group; ++g) {
      const float* q = s.q + b * s.q_stride + (h * s.group + g) * s.dim();
      for (const Scored& k : x.keys) {
        const int entry = s.region(h).visual(k.key);
        float score = dot(q, kv.key(entry), kv.dim);
        if constexpr (KeyValues<T>::scaled) score *= kv.key_scale(entry);
        *raw++ = score * s.scale;
      }
    }
  }
}

// Puts the chosen keys into the offset tables of the group's heads, the rest stays unused.
void write_offsets(const Select& s, int64_t b, int64_t first, const std::vector<Scored>& keys) {
  for (int64_t h = first; h < first + s.share; ++h) {
    Offset* table = s.offsets + s.rows[b] * s.row_stride + h * s.head_stride;
    for (int i = 0; i < s.places; ++i) {
      const bool used = i < static_cast<int>(keys.size());
      table[i] = {used ? static_cast<int16_t>(s.positions[b] - keys[i].key) : int16_t{32767}, 0};
    }
  }
}

template <int R, typename T>
void select_group(const Select& s, const T* arena, int64_t b, int64_t first) {
  thread_local Scratch x;
  const int queries = static_cast<int>(s.group) * s.share;
  for (int64_t h = first; h < first + s.share; ++h) index_own_key<R>(s, arena, b, h, x);
  list_keys(s, b, first, x.keys);
  x.raw.resize(x.keys.size() * queries);
  score_by_index<R>(s, b, first, x);
  share_scores(x.raw.data(), queries, x.keys);
  keep_best(x.keys, s.candidates ? s.candidates : s.picks);
  if (s.candidates) {
    score_exactly(s, arena, b, first, x);
    share_scores(x.raw.data(), queries, x.keys);
    keep_best(x.keys, s.picks);
  }
  write_offsets(s, b, first, x.keys);
}

void check_index(const CacheArgs& c, const Tensor& index_offsets, const Tensor& offsets,
                 const std::array<const Tensor*, 5>& tables, int64_t picks, int64_t share) {
  BISHOP_CHECK_TENSOR(index_offsets, at::kLong, 1, "int64 [H]");
  const Tensor &mean = *tables[0], &basis = *tables[1], &step = *tables[2];
  for (const Tensor* t : tables)
    TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_contiguous(),
                "the tables of an index must be contiguous fp32, got ", described(*t));
  const int64_t heads = c.heads(), dim = c.dim();
  TORCH_CHECK(basis.dim() == 3 && basis.size(0) == heads && basis.size(1) == dim,
              "basis must be [", heads, ", ", dim, ", r], got ", described(basis));
  const int64_t dims = basis.size(2);
  TORCH_CHECK(dims % 8 == 0 && dims > 0 && dims <= kMostDims,
              "an index has a multiple of 8 directions up to ", kMostDims, ", got ", dims);
  TORCH_CHECK(mean.numel() == heads * dim && step.numel() == heads * dims &&
                  index_offsets.size(0) == heads,
              "mean, step and index_offsets must fit ", heads, " heads");
  TORCH_CHECK(tables[3]->dim() == 2 && tables[3]->size(1) == dim / 2 && dim % 2 == 0 &&
                  tables[3]->sizes() == tables[4]->sizes(),
              "cos and sin must be [N, ", dim / 2, "], got ", described(*tables[3]));
  TORCH_CHECK(share >= 1 && heads % share == 0, heads, " KV heads cannot share by ", share);
  TORCH_CHECK(offsets.size(2) == picks, "offsets has ", offsets.size(2), " places for ", picks,
              " picks");
}

void check_reach(const Select& s, int64_t batch, int64_t bytes, int64_t positions) {
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(s.positions[b] < positions, "positions[", b, "] = ", s.positions[b],
                " is beyond the ", positions, " positions of the index");
    for (int64_t h = 0; h < s.cache.heads(); ++h) {
      const int64_t end = s.slots[b] * s.entry_bytes + s.index_offsets[h] +
                          (s.cache.anchors + s.region(h).ring) * (s.dims / 2);
      TORCH_CHECK(s.index_offsets[h] >= 0 && end <= bytes, "the index of head ", h,
                  " of sequence ", b, " ends at byte ", end, ", but the arena has ", bytes);
    }
  }
}

}  // namespace

void index_select(const Tensor& q, Tensor arena, const Tensor& head_offsets,
                  const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
                  const Tensor& index_offsets, const Tensor& slots, const Tensor& positions,
                  const Tensor& rows, const Tensor& window, Tensor offsets, const Tensor& mean,
                  const Tensor& basis, const Tensor& step, const Tensor& cos, const Tensor& sin,
                  int64_t row_pairs, int64_t stride, int64_t picks, int64_t candidates,
                  int64_t share, double scale) {
  const CacheArgs cache{arena, head_offsets, rings, prompt_capacity, cache_anchors, q.size(-1)};
  const OptionalTensor table = offsets;
  const ReadArgs reads{window, table, 0, stride};
  check_decode(q, cache, slots, positions, positions, rows, reads);
  check_values(cache, slots, positions);
  check_select(reads, positions.numel());
  check_index(cache, index_offsets, offsets, {&mean, &basis, &step, &cos, &sin}, picks, share);
  const int64_t batch = q.size(0), heads = cache.heads();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = rows.const_data_ptr<int64_t>()[b];
    TORCH_CHECK(row >= 0 && row < offsets.size(0), "rows[", b, "] is ", row,
                ", but the offset table has ", offsets.size(0), " rows");
  }
  const int64_t entry = arena.stride(0) * static_cast<int64_t>(arena.element_size());
  const Select s{cache,
                 q.const_data_ptr<float>(),
                 q.stride(0),
                 static_cast<uint8_t*>(arena.data_ptr()),
                 index_offsets.const_data_ptr<int64_t>(),
                 slots.const_data_ptr<int64_t>(),
                 rows.const_data_ptr<int64_t>(),
                 positions.const_data_ptr<int32_t>(),
                 window.const_data_ptr<int32_t>(),
                 reinterpret_cast<Offset*>(offsets.data_ptr<int16_t>()),
                 offsets.stride(0) / 2,
                 offsets.stride(1) / 2,
                 static_cast<int>(picks),
                 mean.const_data_ptr<float>(),
                 basis.const_data_ptr<float>(),
                 step.const_data_ptr<float>(),
                 cos.const_data_ptr<float>(),
                 sin.const_data_ptr<float>(),
                 static_cast<int>(basis.size(2)),
                 static_cast<int>(row_pairs),
                 static_cast<int>(stride),
                 static_cast<int>(picks),
                 static_cast<int>(candidates),
                 static_cast<int>(share),
                 static_cast<float>(scale),
                 q.size(1) / heads,
                 entry};
  check_reach(s, batch, arena.numel() * static_cast<int64_t>(arena.element_size()), cos.size(0));
  with_storage(arena, [&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const auto run = s.dims == 8    ? select_group<8, T>
                     : s.dims == 16 ? select_group<16, T>
                                    : select_group<0, T>;
    const int64_t groups = heads / share;
    parallel_tasks(batch * groups,
                   [&](int64_t i) { run(s, data, i / groups, i % groups * share); });
  });
}

}  // namespace bishop::cpu
