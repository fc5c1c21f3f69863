// `linear` on the CPU: panels of outputs over threads, tiles of rows within.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../check.h"
#include "multiply.h"
#include "ops.h"

namespace bishop::cpu {
namespace {

struct Linear {
  const float* x;
  int64_t rows, depth;
  const float* scale;  // may be null
  int64_t outputs;
  float* out;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  PanelOut panel_out(int64_t panel, int64_t row) const {
    const int64_t column = panel * kPanel;
    return {out + row * outputs + column, outputs, scale ? scale + column : nullptr,
            static_cast<int>(std::min<int64_t>(outputs - column, kPanel))};
  }
};

template <typename W>
void multiply(const Linear& l, const W* packed) {
  at::parallel_for(0, l.panels(), 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> buffer;
    const RowTiles tiles(l.x, l.rows, l.depth, buffer);
    for (int64_t p = begin; p < end; ++p)
      for (int64_t i = 0; i < tiles.count(); ++i)
        multiply_panel_of<W>(tiles.size(i))(tiles.data(i), packed + p * l.depth * kPanel, l.depth,
                                            l.panel_out(p, tiles.first(i)));
  });
}

void check_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& scale,
                  int64_t outputs) {
  BISHOP_CHECK_TENSOR(x, at::kFloat, 2, "fp32 [M, K]");
  BISHOP_CHECK_CONTIGUOUS(x);
  const auto type = packed.scalar_type();
  TORCH_CHECK((type == at::kFloat || type == at::kChar) && packed.dim() == 3 &&
                  packed.size(2) == kPanel && packed.is_contiguous(),
              "packed must be fp32 or int8 [N / 64, K, 64] as pack_weight makes it, got ",
              described(packed));
  TORCH_CHECK(packed.size(1) == x.size(1), "x has ", x.size(1), " inputs, the weight ",
              packed.size(1));
  TORCH_CHECK(outputs > 0 && (outputs + kPanel - 1) / kPanel == packed.size(0), "out_features = ",
              outputs, " does not fit a packed weight of ", packed.size(0), " panels of 64");
  TORCH_CHECK(scale.has_value() == (type == at::kChar),
              "an int8 weight needs a scale per output, an fp32 weight takes none");
  if (!scale) return;
  TORCH_CHECK(scale->scalar_type() == at::kFloat && scale->dim() == 1 &&
                  scale->size(0) == outputs && scale->is_contiguous(),
              "scale must be fp32 [", outputs, "] and contiguous, got ", described(*scale));
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& packed, const OptionalTensor& scale,
              int64_t out_features) {
  check_linear(x, packed, scale, out_features);
  Tensor out = at::empty({x.size(0), out_features}, x.options());
  if (x.size(0) == 0) return out;
  const Linear l{x.const_data_ptr<float>(), x.size(0), x.size(1),
                 scale ? scale->const_data_ptr<float>() : nullptr, out_features,
                 out.data_ptr<float>()};
  if (packed.scalar_type() == at::kChar) {
    multiply(l, packed.const_data_ptr<int8_t>());
  } else {
    multiply(l, packed.const_data_ptr<float>());
  }
  return out;
}

}  // namespace bishop::cpu
