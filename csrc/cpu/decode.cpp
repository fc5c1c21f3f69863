// `decode` and `decode_select` on the CPU: one task per sequence and KV head.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <numeric>

#include "attend.h"
#include "ops.h"
#include "parallel.h"
#include "storage.h"
#include "values.h"

namespace bishop::cpu {
namespace {

// What one launch needs, as raw pointers and numbers.
struct Decode {
  const CacheArgs& cache;
  const float* q;
  int64_t q_stride;
  const int64_t* slots;
  const int32_t *positions, *prompts;
  const int64_t* rows;
  const int32_t* window;
  Offset* offsets;  // may be null
  int64_t row_stride, head_stride;
  int places;
  int read_anchors, stride;
  float scale;
  int64_t select_lo, select_hi;
  int64_t heads, group, dim;
  float* out;

  Offset* table(int64_t b, int64_t h) const {
    return offsets ? offsets + rows[b] * row_stride + h * head_stride : nullptr;
  }
  HeadReads reads(int64_t b, int64_t h) const {
    return {table(b, h), places, window[h], read_anchors, stride, positions[b]};
  }
};

// What a thread keeps of one task; the memory stays for the next.
struct Scratch {
  std::vector<int32_t> entries;  // entries read, in the order of the softmax
  std::vector<int32_t> places;   // places of the offset table behind the last of them
  std::vector<float> q, scores, weights, one;
  std::vector<Running> running;
};

// Appends `n` entries that lie side by side, from `first` on, running on at the start of the ring
// where its end is reached.
int32_t* list_run(const HeadRegion& region, int first, int n, int32_t* out) {
  while (n > 0) {
    const int run = std::min(n, region.entries() - first);
    std::iota(out, out + run, first);
    out += run;
    n -= run;
    first = region.ring_start();
  }
  return out;
}

// Appends the entries behind the offset table, and the places they come from.
int32_t* list_offsets(const HeadRegion& region, const HeadReads& reads, int32_t* out,
                      std::vector<int32_t>& places) {
  const int own = region.ring_place(reads.position);
  places.resize(reads.count);
  int n = 0;
  for (int i = 0; i < reads.count; ++i) {
    if (!reads.reads(reads.offsets[i])) continue;
    out[n] = region.visual_back(reads.position, own, reads.offsets[i].linear);
    places[n++] = i;
  }
  places.resize(n);
  return out + n;
}

// Lists what the query reads: prompt, anchors, window, offsets.
void list_reads(const HeadRegion& region, const HeadReads& reads, int prompt, Scratch& s) {
  const int anchors = reads.anchor_keys(), window = reads.window_keys();
  s.entries.resize(prompt + anchors + window + reads.count);
  int32_t* at = s.entries.data();
  std::iota(at, at + prompt, 0);
  at = list_run(region, region.prompt, anchors, at + prompt);
  if (window) at = list_run(region, region.visual(reads.window_first()), window, at);
  at = list_offsets(region, reads, at, s.places);
  s.entries.resize(at - s.entries.data());
}

// Attention weights of the keys behind the offset table, summed over the query group.
void weigh_offsets(Scratch& s, int64_t group) {
  const size_t count = s.entries.size(), n = s.places.size();
  s.weights.assign(n, 0.f);
  s.one.resize(n);
  for (int64_t g = 0; g < group; ++g) {
    const float* scores = s.scores.data() + (g + 1) * count - n;
    exponentials(scores, static_cast<int>(n), s.running[g].max, s.one.data());
    for (size_t i = 0; i < n; ++i) s.weights[i] += s.one[i] / s.running[g].sum;
  }
}

// The place of the smallest weight; ties: the largest offset.
int weakest(const Scratch& s, const Offset* table) {
  size_t best = 0;
  for (size_t i = 1; i < s.places.size(); ++i) {
    const bool tie = s.weights[i] == s.weights[best];
    const bool farther = table[s.places[i]].linear > table[s.places[best]].linear;
    if (s.weights[i] < s.weights[best] || (tie && farther)) best = i;
  }
  return s.places[best];
}

// Puts the offset that the window gains with the next step in the place of the weakest key.
void select(const Decode& d, int64_t b, int64_t h, Scratch& s) {
  const int t = d.positions[b];
  if (t < d.select_lo || t >= d.select_hi || s.places.empty()) return;
  weigh_offsets(s, d.group);
  Offset* table = d.table(b, h);
  table[weakest(s, table)].linear = static_cast<int16_t>(t + 1 - d.read_anchors);
}

// Copies the queries of a KV head and prepares the running softmax of each.
void start(const Decode& d, int64_t b, int64_t h, Scratch& s) {
  const int64_t n = d.group * d.dim;
  const float* q = d.q + b * d.q_stride + h * n;
  s.q.assign(q, q + n);
  scale(s.q.data(), static_cast<int>(n), d.scale);
  s.scores.resize(s.entries.size() * d.group);
  s.running.assign(d.group, Running{});
}

template <typename T>
KeyValues<T> keys_of(const Decode& d, const T* arena, int64_t b, int64_t h) {
  const int64_t first = d.slots[b] + d.cache.head_offsets.const_data_ptr<int64_t>()[h];
  return KeyValues<T>::of(arena, first, static_cast<int>(d.dim));
}

template <typename T>
void prepare_head(const Decode& d, const T* arena, int64_t b, int64_t h, Scratch& s) {
  list_reads(region_of(d.cache, h), d.reads(b, h), d.prompts[b], s);
  prefetch_first(keys_of(d, arena, b, h), s.entries);
}

template <typename T>
void decode_head(const Decode& d, const T* arena, int64_t b, int64_t h, Scratch& s) {
  start(d, b, h, s);
  float* out = d.out + (b * d.heads + h) * d.group * d.dim;
  attend(keys_of(d, arena, b, h), s.entries, static_cast<int>(d.group), s.q.data(),
         s.scores.data(), s.running.data(), out);
  if (d.offsets) select(d, b, h, s);
}

void check_sequences(const CacheArgs& c, const Tensor& prompts, const Tensor& rows,
                     const ReadArgs& reads) {
  const int64_t tables = reads.offsets ? reads.offsets->size(0) : 0;
  for (int64_t b = 0; b < prompts.size(0); ++b) {
    const int32_t prompt = prompts.const_data_ptr<int32_t>()[b];
    const int64_t row = rows.const_data_ptr<int64_t>()[b];
    TORCH_CHECK(prompt >= 0 && prompt <= c.prompt, "prompts[", b, "] is ", prompt,
                ", but the cache has room for ", c.prompt, " prompt tokens");
    TORCH_CHECK(tables <= 1 || (row >= 0 && row < tables), "rows[", b, "] is ", row,
                ", but the offset table has ", tables, " rows");
  }
}

Tensor run(const Tensor& q, const CacheArgs& cache, const Tensor& slots, const Tensor& positions,
           const Tensor& prompts, const Tensor& rows, const ReadArgs& reads, double scale,
           int64_t select_lo, int64_t select_hi) {
  check_decode(q, cache, slots, positions, prompts, rows, reads);
  check_values(cache, slots, positions);
  check_sequences(cache, prompts, rows, reads);
  const int64_t batch = q.size(0), heads = cache.heads(), group = q.size(1) / heads;
  Tensor out = at::empty({batch, q.size(1), q.size(2)}, q.options());
  const bool table = reads.offsets && reads.offsets->size(2) > 0;
  const bool shared = table && reads.offsets->size(0) == 1;
  const Decode d{cache,
                 q.const_data_ptr<float>(),
                 q.stride(0),
                 slots.const_data_ptr<int64_t>(),
                 positions.const_data_ptr<int32_t>(),
                 prompts.const_data_ptr<int32_t>(),
                 rows.const_data_ptr<int64_t>(),
                 reads.window.const_data_ptr<int32_t>(),
                 table ? reinterpret_cast<Offset*>(reads.offsets->data_ptr<int16_t>()) : nullptr,
                 shared || !table ? 0 : reads.offsets->stride(0) / 2,
                 table ? reads.offsets->stride(1) / 2 : 0,
                 table ? static_cast<int>(reads.offsets->size(2)) : 0,
                 static_cast<int>(reads.anchors),
                 static_cast<int>(reads.stride),
                 static_cast<float>(scale),
                 select_lo,
                 select_hi,
                 heads,
                 group,
                 q.size(2),
                 out.data_ptr<float>()};
  with_storage(cache.arena, [&](const auto* arena) {
    parallel_pipeline<Scratch>(
        batch * heads,
        [&](int64_t i, Scratch& s) { prepare_head(d, arena, i / heads, i % heads, s); },
        [&](int64_t i, Scratch& s) { decode_head(d, arena, i / heads, i % heads, s); });
  });
  return out;
}

}  // namespace

Tensor decode(const Tensor& q, const Tensor& arena, const Tensor& head_offsets,
              const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
              const Tensor& slots, const Tensor& positions, const Tensor& prompts,
              const Tensor& rows, const Tensor& window, const OptionalTensor& offsets,
              int64_t read_anchors, int64_t stride, double scale) {
  const CacheArgs cache{arena, head_offsets, rings, prompt_capacity, cache_anchors, q.size(-1)};
  const ReadArgs reads{window, offsets, read_anchors, stride};
  return run(q, cache, slots, positions, prompts, rows, reads, scale, 0, 0);
}

Tensor decode_select(const Tensor& q, const Tensor& arena, const Tensor& head_offsets,
                     const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
                     const Tensor& slots, const Tensor& positions, const Tensor& prompts,
                     const Tensor& rows, const Tensor& window, Tensor offsets,
                     int64_t read_anchors, int64_t stride, double scale, int64_t select_lo,
                     int64_t select_hi) {
  const CacheArgs cache{arena, head_offsets, rings, prompt_capacity, cache_anchors, q.size(-1)};
  const OptionalTensor table = offsets;
  const ReadArgs reads{window, table, read_anchors, stride};
  check_select(reads, positions.numel());
  return run(q, cache, slots, positions, prompts, rows, reads, scale, select_lo, select_hi);
}

}  // namespace bishop::cpu
