// `rms_norm`, `swiglu` and `qk_norm_rope` on the CPU.
#include "rows.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../check.h"
#include "ops.h"

namespace bishop::cpu {
namespace {

inline constexpr int64_t kGrain = 16384;  // values below which a second thread does not pay

template <typename Row>
void for_rows(int64_t rows, int64_t width, const Row& row) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i);
  });
}

void check_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2 && x.is_contiguous(), name,
              " must be fp32, 2-D and contiguous, got ", described(x), " with strides ",
              x.strides());
}

void check_vector(const Tensor& x, int64_t size, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 1 && x.size(0) == size &&
                  x.is_contiguous(),
              name, " must be fp32 [", size, "] and contiguous, got ", described(x));
}

// Norm (where there is one) and rotation of `heads` heads side by side.
struct HeadsOfRow {
  const float* norm;  // may be null
  const float *cosine, *sine;
  int dim;
  float eps;

  void apply(float* x, int64_t heads) const {
    for (int64_t h = 0; h < heads; ++h, x += dim) {
      if (norm) rms_norm_row(x, norm, dim, eps, x);
      rotate_head(x, cosine, sine, dim / 2);
    }
  }
};

void check_qk_norm_rope(const Tensor& qkv, const OptionalTensor& q_norm,
                        const OptionalTensor& k_norm, const Tensor& cosine, const Tensor& sine,
                        int64_t heads, int64_t kv_heads) {
  check_rows(qkv, "qkv");
  check_rows(cosine, "cos");
  check_rows(sine, "sin");
  const int64_t all = heads + 2 * kv_heads, dim = 2 * cosine.size(1);
  TORCH_CHECK(heads > 0 && kv_heads > 0 && qkv.size(1) == all * dim, "qkv of ", heads, " + 2 x ",
              kv_heads, " heads of ", dim, " (twice the ", cosine.size(1), " angles) must be [M, ",
              all * dim, "], got ", described(qkv));
  TORCH_CHECK(cosine.size(0) == qkv.size(0) && sine.sizes() == cosine.sizes(),
              "cos and sin must be [", qkv.size(0), ", ", dim / 2, "], got ", described(cosine),
              " and ", described(sine));
  if (q_norm) check_vector(*q_norm, dim, "q_norm");
  if (k_norm) check_vector(*k_norm, dim, "k_norm");
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rows(x, "x");
  check_vector(weight, x.size(1), "weight");
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(1);
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  for_rows(x.size(0), n, [&](int64_t i) {
    rms_norm_row(from + i * n, w, static_cast<int>(n), static_cast<float>(eps), to + i * n);
  });
  return out;
}

Tensor swiglu(const Tensor& gate_up) {
  check_rows(gate_up, "gate_up");
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up must be [M, 2 F], got ", described(gate_up));
  const int64_t n = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), n}, gate_up.options());
  const float* from = gate_up.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  for_rows(gate_up.size(0), 4 * n, [&](int64_t i) {
    swiglu_row(from + 2 * i * n, static_cast<int>(n), to + i * n);
  });
  return out;
}

void qk_norm_rope(Tensor qkv, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                  const Tensor& cosine, const Tensor& sine, double eps, int64_t heads,
                  int64_t kv_heads) {
  check_qk_norm_rope(qkv, q_norm, k_norm, cosine, sine, heads, kv_heads);
  const int64_t half = cosine.size(1), width = qkv.size(1);
  const float *c = cosine.const_data_ptr<float>(), *s = sine.const_data_ptr<float>();
  const float* qn = q_norm ? q_norm->const_data_ptr<float>() : nullptr;
  const float* kn = k_norm ? k_norm->const_data_ptr<float>() : nullptr;
  float* data = qkv.data_ptr<float>();
  const int dim = static_cast<int>(2 * half);
  for_rows(qkv.size(0), width, [&](int64_t i) {
    HeadsOfRow row{qn, c + i * half, s + i * half, dim, static_cast<float>(eps)};
    row.apply(data + i * width, heads);
    row.norm = kn;
    row.apply(data + i * width + heads * dim, kv_heads);
  });
}

}  // namespace bishop::cpu
