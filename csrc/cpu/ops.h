// The CPU implementations of the operators, by the schemas in ../bishop.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace bishop::cpu {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void append(const Tensor& k, const Tensor& v, Tensor arena, const Tensor& head_offsets,
            const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
            const Tensor& slots, const Tensor& positions);

Tensor decode(const Tensor& q, const Tensor& arena, const Tensor& head_offsets,
              const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
              const Tensor& slots, const Tensor& positions, const Tensor& prompts,
              const Tensor& rows, const Tensor& window, const OptionalTensor& offsets,
              int64_t read_anchors, int64_t stride, double scale);

Tensor decode_select(const Tensor& q, const Tensor& arena, const Tensor& head_offsets,
                     const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
                     const Tensor& slots, const Tensor& positions, const Tensor& prompts,
                     const Tensor& rows, const Tensor& window, Tensor offsets,
                     int64_t read_anchors, int64_t stride, double scale, int64_t select_lo,
                     int64_t select_hi);

void index_select(const Tensor& q, Tensor arena, const Tensor& head_offsets,
                  const Tensor& rings, int64_t prompt_capacity, int64_t cache_anchors,
                  const Tensor& index_offsets, const Tensor& slots, const Tensor& positions,
                  const Tensor& rows, const Tensor& window, Tensor offsets, const Tensor& mean,
                  const Tensor& basis, const Tensor& step, const Tensor& cos, const Tensor& sin,
                  int64_t row_pairs, int64_t stride, int64_t picks, int64_t candidates,
                  int64_t share, double scale);

Tensor linear(const Tensor& x, const Tensor& packed, const OptionalTensor& scale,
              int64_t out_features);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);

Tensor swiglu(const Tensor& gate_up);

void qk_norm_rope(Tensor qkv, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                  const Tensor& cosine, const Tensor& sine, double eps, int64_t heads,
                  int64_t kv_heads);

Tensor sample(const Tensor& logits, const Tensor& partners, const Tensor& settings,
              const Tensor& top_k, const Tensor& keys);

}  // namespace bishop::cpu
