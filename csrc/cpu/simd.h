// One vector of fp32 lanes and the few operations the kernels need: AVX-512, AVX2, or plain C++
// (GCC vector extensions). Chosen at compile time. All arithmetic is explicit, so that a value
// never depends on how the compiler vectorised or contracted the code around it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../numeric.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define BISHOP_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BISHOP_AVX2 1
#include <immintrin.h>
#endif

namespace bishop {

#if BISHOP_AVX512

inline constexpr const char* kIsa = "avx512";

struct Vec {
  static constexpr int width = 16;
  __m512 v;
};

inline __mmask16 lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load(const int8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
inline Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
inline Vec load(const bf16* p, int n) {
  const __m256i raw = _mm256_maskz_loadu_epi16(lanes(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const fp16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p))};
}
inline Vec load(const int8_t* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes(n), p)))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, lanes(n), a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec nearest(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^a for integral a in [-126, 127].
inline Vec power2(Vec a) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float highest(Vec a) { return _mm512_reduce_max_ps(a.v); }

// Lane i of the result is the sum of a[i]: a transposition that adds at every level.
inline Vec sums(const Vec (&a)[16]) {
  __m512 four[4];  // 128-bit lane j of four[i]: partial sums of a[4 i .. 4 i + 3]
  for (int i = 0; i < 4; ++i) {
    const __m512 w = a[4 * i].v, x = a[4 * i + 1].v, y = a[4 * i + 2].v, z = a[4 * i + 3].v;
    const __m512 wx = _mm512_add_ps(_mm512_unpacklo_ps(w, x), _mm512_unpackhi_ps(w, x));
    const __m512 yz = _mm512_add_ps(_mm512_unpacklo_ps(y, z), _mm512_unpackhi_ps(y, z));
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(wx, yz, 0x44), _mm512_shuffle_ps(wx, yz, 0xee));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                                   _mm512_shuffle_f32x4(four[0], four[1], 0xee));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                                    _mm512_shuffle_f32x4(four[2], four[3], 0xee));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                        _mm512_shuffle_f32x4(low, high, 0xdd))};
}

#elif BISHOP_AVX2

inline constexpr const char* kIsa = "avx2";

struct Vec {
  static constexpr int width = 8;
  __m256 v;
};

inline __m256i lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec widen_bf16(__m128i raw) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const bf16* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const fp16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load(const int8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw))};
}
inline Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, lanes(n))}; }
inline __m128i load_halves(const void* p, int n) {
  alignas(16) uint16_t part[8] = {};
  std::memcpy(part, p, 2 * static_cast<size_t>(n));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(part));
}
inline Vec load(const bf16* p, int n) { return widen_bf16(load_halves(p, n)); }
inline Vec load(const fp16* p, int n) { return {_mm256_cvtph_ps(load_halves(p, n))}; }
inline Vec load(const int8_t* p, int n) {
  alignas(8) int8_t part[8] = {};
  std::memcpy(part, p, static_cast<size_t>(n));
  return load(part);
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int n) { _mm256_maskstore_ps(p, lanes(n), a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec nearest(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec power2(Vec a) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float highest(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// Lane i of the result is the sum of a[i].
inline Vec sums(const Vec (&a)[8]) {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
  const __m256 high =
      _mm256_hadd_ps(_mm256_hadd_ps(a[4].v, a[5].v), _mm256_hadd_ps(a[6].v, a[7].v));
  return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                        _mm256_permute2f128_ps(low, high, 0x31))};
}

#else

inline constexpr const char* kIsa = "portable";

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));

struct Vec {
  static constexpr int width = 8;
  Lanes v;
};

inline Vec set1(float x) { return {x - Lanes{}}; }
template <typename T>
inline Vec load(const T* p, int n) {
  Vec a{Lanes{}};
  for (int i = 0; i < n; ++i) a.v[i] = to_float(p[i]);
  return a;
}
template <typename T>
inline Vec load(const T* p) {
  return load(p, Vec::width);
}
inline void store(float* p, Vec a, int n) { std::memcpy(p, &a.v, sizeof(float) * n); }
inline void store(float* p, Vec a) { store(p, a, Vec::width); }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }  // two roundings, everywhere
inline Vec nearest(Vec a) {
  for (int i = 0; i < Vec::width; ++i) a.v[i] = std::nearbyint(a.v[i]);
  return a;
}
inline Vec power2(Vec a) {
  const IntLanes e = (__builtin_convertvector(a.v, IntLanes) + 127) << 23;
  Vec r;
  std::memcpy(&r.v, &e, sizeof e);
  return r;
}
inline float sum(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float highest(Vec a) {
  float m = a.v[0];
  for (int i = 1; i < Vec::width; ++i) m = m < a.v[i] ? a.v[i] : m;
  return m;
}

// Lane i of the result is the sum of a[i].
inline Vec sums(const Vec (&a)[8]) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = sum(a[i]);
  return r;
}

#endif

// e^x to about 2 ulp (degree-6 polynomial on [-ln2/2, ln2/2]). Subnormal results are kept, since
// the arg-min of attention weights compares them; below that 0, above the range infinity.
inline Vec exp(Vec x) {
  x = min(max(x, set1(-110.f)), set1(90.f));
  const Vec n = nearest(x * set1(1.44269504088896f));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.f));
  const Vec half = nearest(n * set1(0.5f));  // 2^n in two factors: n reaches past the exponents
  return p * power2(half) * power2(n - half);
}

}  // namespace bishop
