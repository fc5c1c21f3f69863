// Where the keys of a query lie: the address arithmetic of `CacheLayout` and `ReadPlan`, written
// once for CPU and CUDA. No torch, no standard library.
//
// A head's region is [prompt | anchors | ring], in entries; an entry is K then V of one token.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define BISHOP_HD __host__ __device__ __forceinline__
#else
#define BISHOP_HD inline
#endif

namespace bishop {

// The region of one KV head; entries count from its start.
struct HeadRegion {
  int prompt;   // entries set aside for the prompt
  int anchors;  // leading visual keys that are never evicted
  int ring;     // entries of the ring behind them

  BISHOP_HD int entries() const { return prompt + anchors + ring; }
  BISHOP_HD int ring_start() const { return prompt + anchors; }

  BISHOP_HD int visual(int key) const {
    if (key < anchors) return prompt + key;
    return ring_start() + (key - anchors) % ring;
  }
  // Place in the ring of the query's own key; others are found from it without a division.
  BISHOP_HD int ring_place(int position) const {
    return position < anchors ? 0 : (position - anchors) % ring;
  }
  // Entry of the key `back` positions before the query whose own key has ring place `own`.
  BISHOP_HD int visual_back(int position, int own, int back) const {
    const int key = position - back;
    if (key < anchors) return prompt + key;
    int place = own - back;
    while (place < 0) place += ring;  // once for a resident key; never out of the region
    return ring_start() + place;
  }
};

// A linear offset back from the query, and the column shift that must stay within the row.
struct Offset {
  int16_t linear;
  int16_t dc;
};

// What the query at `position` reads besides the prompt, for one head.
struct HeadReads {
  const Offset* offsets;  // may be null
  int count;              // places in `offsets`
  int window;             // keys counted from the query's own
  int anchors;            // leading visual keys always read
  int stride;             // positions per picture row
  int position;

  BISHOP_HD int anchor_keys() const { return anchors < position + 1 ? anchors : position + 1; }
  BISHOP_HD int window_first() const {
    const int64_t first = static_cast<int64_t>(position) - window + 1;
    return first > anchors ? static_cast<int>(first) : anchors;
  }
  BISHOP_HD int window_keys() const {
    const int n = position + 1 - window_first();
    return n > 0 ? n : 0;
  }
  BISHOP_HD bool reads(Offset o) const {
    const int source = position % stride - o.dc;
    return position - o.linear >= anchors && source >= 0 && source < stride;
  }
};

}  // namespace bishop
