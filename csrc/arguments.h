// The tensor arguments that the attention operators share, and what must hold for them whatever
// the device. Values (positions, slots) are checked where they can be read without a copy.
#pragma once

#include <optional>

#include "check.h"
#include "numeric.h"

namespace bishop {

// One layer of the caches of a batch (`sparse_attn.cache.LayerCache`).
struct CacheArgs {
  const at::Tensor& arena;         // [entries, 2, D] fp32, bf16 or fp16; or [entries, bytes] uint8
  const at::Tensor& head_offsets;  // int64 [H]
  const at::Tensor& rings;         // int32 [H]
  int64_t prompt;
  int64_t anchors;
  int64_t head_dim = 0;            // D where the arena is uint8, which does not tell it

  int64_t heads() const { return rings.size(0); }
  bool is_int8() const { return arena.scalar_type() == at::kByte; }
  int64_t dim() const { return is_int8() ? head_dim : arena.size(2); }
};

inline void check_cache(const CacheArgs& c) {
  const at::Tensor &arena = c.arena, &head_offsets = c.head_offsets, &rings = c.rings;
  const auto type = arena.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kByte,
              "the cache must be fp32, bf16, fp16 or int8, got ", described(arena),
              "; choose one of these KV formats");
  if (c.is_int8()) {
    TORCH_CHECK(arena.dim() == 2 && arena.size(1) == int8_entry_bytes(c.dim()),
                "an int8 arena must be [entries, ", int8_entry_bytes(c.dim()), "] for head_dim ",
                c.dim(), ", got ", described(arena));
  } else {
    TORCH_CHECK(arena.dim() == 3 && arena.size(1) == 2,
                "arena must be [entries, 2, head_dim], got ", described(arena));
  }
  BISHOP_CHECK_CONTIGUOUS(arena);
  TORCH_CHECK(c.dim() > 0 && c.dim() % 4 == 0, "head_dim must be a multiple of 4, got ", c.dim(),
              "; pad the heads or choose the reference backend");
  BISHOP_CHECK_TENSOR(head_offsets, at::kLong, 1, "int64 [H]");
  BISHOP_CHECK_TENSOR(rings, at::kInt, 1, "int32 [H]");
  BISHOP_CHECK_CONTIGUOUS(head_offsets);
  BISHOP_CHECK_CONTIGUOUS(rings);
  TORCH_CHECK(head_offsets.size(0) == rings.size(0), "head_offsets has ", head_offsets.size(0),
              " heads, rings has ", rings.size(0));
  TORCH_CHECK(c.prompt >= 0 && c.anchors >= 0, "prompt and anchors must not be negative, got ",
              c.prompt, " and ", c.anchors);
}

// A per-sequence vector of `Batch`.
inline void check_per_sequence(const at::Tensor& t, at::ScalarType type, int64_t batch,
                               const char* name) {
  TORCH_CHECK(t.scalar_type() == type && t.dim() == 1 && t.size(0) == batch, name, " must be ",
              c10::toString(type), " [", batch, "], got ", described(t));
  TORCH_CHECK(t.is_contiguous(), name, " must be contiguous; call .contiguous() first");
}

// Queries, keys or values [B, heads, D]: sequences may be strided, a sequence's heads may not.
inline void check_heads(const at::Tensor& t, int64_t batch, int64_t heads, int64_t dim,
                        const char* name) {
  TORCH_CHECK(t.dim() == 3 && t.size(0) == batch && t.size(1) == heads && t.size(2) == dim, name,
              " must be [", batch, ", ", heads, ", ", dim, "], got ", described(t));
  TORCH_CHECK(t.stride(2) == 1 && (heads == 1 || t.stride(1) == dim), name,
              " must hold the heads of a sequence side by side, got strides ", t.strides(),
              "; call .contiguous() first");
}

inline void check_append(const at::Tensor& k, const at::Tensor& v, const CacheArgs& c,
                         const at::Tensor& slots, const at::Tensor& positions) {
  check_cache(c);
  const int64_t batch = slots.size(0);
  check_per_sequence(slots, at::kLong, batch, "slots");
  check_per_sequence(positions, at::kInt, batch, "positions");
  BISHOP_CHECK_TENSOR(k, at::kFloat, 3, "fp32 [B, H, D]");
  BISHOP_CHECK_TENSOR(v, at::kFloat, 3, "fp32 [B, H, D]");
  check_heads(k, batch, c.heads(), c.dim(), "k");
  check_heads(v, batch, c.heads(), c.dim(), "v");
}

// How the reads of a layer are found (`sparse_attn.policy.ReadPlan`).
struct ReadArgs {
  const at::Tensor& window;                  // int32 [H]
  const std::optional<at::Tensor>& offsets;  // int16 [R, H, n, 2], or none
  int64_t anchors;
  int64_t stride;
};

inline void check_reads(const ReadArgs& r, int64_t heads) {
  check_per_sequence(r.window, at::kInt, heads, "window");
  TORCH_CHECK(r.stride >= 1, "stride must be at least 1, got ", r.stride);
  TORCH_CHECK(r.anchors >= 0, "anchors must not be negative, got ", r.anchors);
  if (!r.offsets) return;
  const at::Tensor& offsets = *r.offsets;
  TORCH_CHECK(offsets.scalar_type() == at::kShort && offsets.dim() == 4 &&
                  offsets.size(1) == heads && offsets.size(3) == 2,
              "offsets must be int16 [R, ", heads, ", n, 2], got ", described(offsets));
  TORCH_CHECK(offsets.stride(3) == 1 && (offsets.size(2) <= 1 || offsets.stride(2) == 2) &&
                  offsets.stride(0) % 2 == 0 && offsets.stride(1) % 2 == 0,
              "the offsets of a head must lie side by side, got strides ", offsets.strides(),
              "; call .contiguous() on the state first");
}

// A table that is written while others read it must not be shared by sequences.
inline void check_select(const ReadArgs& r, int64_t batch) {
  TORCH_CHECK(r.offsets->dim() > 0 && (batch <= 1 || r.offsets->size(0) > 1),
              "decode_select needs one row of offsets per sequence, got one for all ", batch,
              "; make the state with a row for each");
}

inline void check_decode(const at::Tensor& q, const CacheArgs& c, const at::Tensor& slots,
                         const at::Tensor& positions, const at::Tensor& prompts,
                         const at::Tensor& rows, const ReadArgs& reads) {
  check_cache(c);
  const int64_t batch = slots.size(0);
  check_per_sequence(slots, at::kLong, batch, "slots");
  check_per_sequence(positions, at::kInt, batch, "positions");
  check_per_sequence(prompts, at::kInt, batch, "prompts");
  check_per_sequence(rows, at::kLong, batch, "rows");
  BISHOP_CHECK_TENSOR(q, at::kFloat, 3, "fp32 [B, Hq, D]");
  TORCH_CHECK(c.heads() > 0 && q.size(1) > 0 && q.size(1) % c.heads() == 0, "q has ", q.size(1),
              " heads, which is no multiple of the ", c.heads(), " KV heads of the cache");
  check_heads(q, batch, q.size(1), c.dim(), "q");
  check_reads(reads, c.heads());
}

}  // namespace bishop
