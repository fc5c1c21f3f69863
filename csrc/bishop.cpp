// Registration of every operator: the schemas, which device implements them, and the Python
// module that loads this library.
#include <Python.h>
#include <torch/library.h>

#include "cpu/ops.h"
#include "cpu/simd.h"

// The arguments are those of `ReadPlan`, `Batch` and `LayerCache` (sparse_attn/policy.py and
// cache.py), flattened.
TORCH_LIBRARY(bishop, m) {
  m.def(
      "append(Tensor k, Tensor v, Tensor(a!) arena, Tensor head_offsets, Tensor rings, "
      "int prompt_capacity, int cache_anchors, Tensor slots, Tensor positions) -> ()");
  m.def(
      "decode(Tensor q, Tensor arena, Tensor head_offsets, Tensor rings, int prompt_capacity, "
      "int cache_anchors, Tensor slots, Tensor positions, Tensor prompts, Tensor rows, "
      "Tensor window, Tensor? offsets, int read_anchors, int stride, float scale) -> Tensor");
  m.def(
      "decode_select(Tensor q, Tensor arena, Tensor head_offsets, Tensor rings, "
      "int prompt_capacity, int cache_anchors, Tensor slots, Tensor positions, Tensor prompts, "
      "Tensor rows, Tensor window, Tensor(a!) offsets, int read_anchors, int stride, "
      "float scale, int select_lo, int select_hi) -> Tensor");
  m.def(
      "index_select(Tensor q, Tensor(a!) arena, Tensor head_offsets, Tensor rings, "
      "int prompt_capacity, int cache_anchors, Tensor index_offsets, Tensor slots, "
      "Tensor positions, Tensor rows, Tensor window, Tensor(b!) offsets, Tensor mean, "
      "Tensor basis, Tensor step, Tensor cos, Tensor sin, int row_pairs, int stride, int picks, "
      "int candidates, int share, float scale) -> ()");
  m.def("linear(Tensor x, Tensor packed, Tensor? scale, int out_features) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def(
      "qk_norm_rope(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, "
      "float eps, int heads, int kv_heads) -> ()");
  m.def("sample(Tensor logits, Tensor partners, Tensor settings, Tensor top_k, Tensor keys) -> Tensor");
}

TORCH_LIBRARY_IMPL(bishop, CPU, m) {
  m.impl("append", &bishop::cpu::append);
  m.impl("decode", &bishop::cpu::decode);
  m.impl("decode_select", &bishop::cpu::decode_select);
  m.impl("index_select", &bishop::cpu::index_select);
  m.impl("linear", &bishop::cpu::linear);
  m.impl("rms_norm", &bishop::cpu::rms_norm);
  m.impl("swiglu", &bishop::cpu::swiglu);
  m.impl("qk_norm_rope", &bishop::cpu::qk_norm_rope);
  m.impl("sample", &bishop::cpu::sample);
}

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_C", "The compiled operators of Bishop (torch.ops.bishop).", -1,
    nullptr,               nullptr, nullptr, nullptr, nullptr};

// What was built, for messages: `cpu` names the instruction set, `cuda` says "built" or why not.
PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&module_definition);
  if (!module) return nullptr;
  PyModule_AddStringConstant(module, "cpu", bishop::kIsa);
  PyModule_AddStringConstant(module, "cuda", BISHOP_CUDA_STATUS);
  return module;
}
