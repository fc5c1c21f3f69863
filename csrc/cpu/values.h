// Checks of values that CPU operators can afford to read: nothing is read or written outside the
// arena whatever the batch says.
#pragma once

#include "../arguments.h"
#include "../reads.h"

namespace bishop::cpu {

inline HeadRegion region_of(const CacheArgs& c, int64_t head) {
  return {static_cast<int>(c.prompt), static_cast<int>(c.anchors),
          c.rings.const_data_ptr<int32_t>()[head]};
}

// Entries that a slot spans in this layer: the end of its farthest head region.
inline int64_t layer_end(const CacheArgs& c) {
  int64_t end = 0;
  for (int64_t h = 0; h < c.heads(); ++h) {
    const int64_t first = c.head_offsets.const_data_ptr<int64_t>()[h];
    const HeadRegion region = region_of(c, h);
    TORCH_CHECK(first >= 0 && region.ring >= 0, "head ", h, " has offset ", first, " and ring ",
                region.ring, "; both must not be negative");
    end = std::max(end, first + region.entries());
  }
  return end;
}

inline int smallest_ring(const CacheArgs& c) {
  const int32_t* rings = c.rings.const_data_ptr<int32_t>();
  return c.heads() ? *std::min_element(rings, rings + c.heads()) : 0;
}

inline void check_values(const CacheArgs& c, const at::Tensor& slots, const at::Tensor& positions) {
  const int64_t end = layer_end(c), entries = c.arena.size(0);
  const bool ringless = smallest_ring(c) == 0;
  for (int64_t b = 0; b < slots.size(0); ++b) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[b];
    const int32_t t = positions.const_data_ptr<int32_t>()[b];
    TORCH_CHECK(slot >= 0 && slot + end <= entries, "slots[", b, "] = ", slot, " needs entries up to ",
                slot + end, ", but the arena has ", entries);
    TORCH_CHECK(t >= 0 && (!ringless || t < c.anchors), "positions[", b, "] = ", t,
                ringless ? " has no place in a cache without a ring" : " is negative");
  }
}

}  // namespace bishop::cpu
