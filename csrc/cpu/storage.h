// From a tensor's dtype to the storage types of the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "../numeric.h"

namespace bishop::cpu {

// Calls `f` with the data of an fp32, bf16, fp16 or 8-bit arena as a typed pointer.
template <typename F>
void with_storage(const at::Tensor& t, const F& f) {
  void* data = t.data_ptr();
  if (t.scalar_type() == at::kFloat) return f(static_cast<float*>(data));
  if (t.scalar_type() == at::kBFloat16) return f(static_cast<bf16*>(data));
  if (t.scalar_type() == at::kHalf) return f(static_cast<fp16*>(data));
  return f(static_cast<int8_t*>(data));
}

}  // namespace bishop::cpu
