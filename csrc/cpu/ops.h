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

}  // namespace bishop::cpu
