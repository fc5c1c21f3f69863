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
}

TORCH_LIBRARY_IMPL(bishop, CPU, m) {
  m.impl("append", &bishop::cpu::append);
  m.impl("decode", &bishop::cpu::decode);
  m.impl("decode_select", &bishop::cpu::decode_select);
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
