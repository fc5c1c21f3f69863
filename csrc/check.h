// Host-side checks shared by the operators: every refusal says what was given and what to change.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

namespace bishop {

inline std::string described(const at::Tensor& t) {
  std::string text = std::string(c10::toString(t.scalar_type())) + " [";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "] on " + t.device().str();
}

#define BISHOP_CHECK_TENSOR(t, type, ndim, what)                                              \
  TORCH_CHECK((t).scalar_type() == (type) && (t).dim() == (ndim), #t " must be ", what, ", got ", \
              ::bishop::described(t))

#define BISHOP_CHECK_CONTIGUOUS(t)                                                        \
  TORCH_CHECK((t).is_contiguous(), #t " must be contiguous, got strides ", (t).strides(), \
              "; call .contiguous() first")

}  // namespace bishop
