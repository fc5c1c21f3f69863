// Storage types as bit patterns, with their conversions: what CPU and CUDA code agree on.
#pragma once

#include <cstdint>
#include <cstring>

namespace bishop {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// Bytes of an entry of 8-bit KV: K, V, a float scale of each, padding to 16 bytes.
constexpr int64_t int8_entry_bytes(int64_t dim) { return (2 * dim + 8 + 15) / 16 * 16; }

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Shifted into place the exponent is 112 too small; the product also mends subnormals.
  const float magnitude = bits_to_float(rest << 13) * bits_to_float(0x77800000u);
  return bits_to_float(sign | float_to_bits(magnitude));
}

// Round to nearest, ties to even, as torch does.
inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, bf16& out) {
  const uint32_t bits = float_to_bits(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = nan ? 0x7fc0u : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void from_float(float x, fp16& out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (rest < 0x38800000u) {  // subnormal: adding .5 leaves the rounded fraction at the end
    half = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace bishop
