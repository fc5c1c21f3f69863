// `sample` on the CPU: guidance, temperature, top-k, top-p and Gumbel noise in one pass per image.
// The meaning, and the noise to the bit, are those of engine/sampling.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../check.h"
#include "attend.h"
#include "ops.h"
#include "parallel.h"

namespace bishop::cpu {
namespace {

// One image's draw. top_k 0 and top_p 1 mean all; temperature 0 means arg-max.
struct Draw {
  float guidance, temperature, top_p;
  int64_t top_k;
  uint64_t key;
};

struct Scratch {
  std::vector<float> logits, mass;
  std::vector<int32_t> order;
};

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

float gumbel(uint64_t key, uint64_t token) {
  const uint64_t bits = mix(key + token * 0x9E3779B97F4A7C15u) >> 40;
  const float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-24f;
  return -std::log(-std::log(uniform));
}

// Guided logits over the temperature; false if one of them is not finite.
bool prepare(const float* conditional, const float* unconditional, int n, const Draw& d,
             float* out) {
  const Vec guidance = set1(d.guidance), heat = set1(d.temperature > 0 ? d.temperature : 1.f);
  for (int i = 0; i < n; i += Vec::width) {
    const int left = std::min(n - i, Vec::width);
    Vec x = load(conditional + i, left);
    if (unconditional) {
      const Vec u = load(unconditional + i, left);
      x = u + guidance * (x - u);
    }
    store(out + i, x / heat, left);
  }
  return std::all_of(out, out + n, [](float x) { return std::isfinite(x); });
}

// Sorts the `count` most likely tokens to the front; ties: the lower id first.
void bring_forward(Scratch& s, int64_t done, int64_t count) {
  const auto likelier = [&](int32_t a, int32_t b) {
    return s.logits[a] != s.logits[b] ? s.logits[a] > s.logits[b] : a < b;
  };
  const auto begin = s.order.begin();
  if (count < static_cast<int64_t>(s.order.size()))
    std::nth_element(begin + done, begin + count, s.order.end(), likelier);
  std::sort(begin + done, begin + count, likelier);
}

// How many of the most likely tokens stay; they stand at the front of `order` then.
int64_t nucleus(Scratch& s, const Draw& d) {
  const int64_t n = static_cast<int64_t>(s.logits.size());
  const int64_t most = d.top_k > 0 ? std::min(d.top_k, n) : n;
  std::iota(s.order.begin(), s.order.end(), 0);
  if (most < n) bring_forward(s, 0, most);
  if (d.top_p >= 1.f) return most;
  const float top = *std::max_element(s.logits.begin(), s.logits.end());
  s.mass.resize(n);
  double total = exponentials(s.logits.data(), static_cast<int>(n), top, s.mass.data());
  if (most < n)
    total = std::accumulate(s.order.begin(), s.order.begin() + most, 0.0,
                            [&](double sum, int32_t token) { return sum + s.mass[token]; });
  double before = 0;
  // Few tokens make up the nucleus as a rule: sort only as far as it reaches.
  for (int64_t done = 0, count = 64; done < most; done = count, count *= 4) {
    count = std::min(count, most);
    if (most == n) bring_forward(s, done, count);
    for (int64_t i = done; i < count; ++i) {
      if (i > 0 && before >= d.top_p * total) return i;
      before += s.mass[s.order[i]];
    }
  }
  return most;
}

int64_t draw_token(Scratch& s, const Draw& d) {
  if (d.temperature == 0)
    return std::max_element(s.logits.begin(), s.logits.end()) - s.logits.begin();
  const int64_t kept = nucleus(s, d);
  int64_t best = -1;
  float score = 0;
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t token = s.order[i];
    const float x = s.logits[token] + gumbel(d.key, static_cast<uint64_t>(token));
    if (best < 0 || x > score || (x == score && token < best)) best = token, score = x;
  }
  return best;
}

void check_sample(const Tensor& logits, const Tensor& partners, const Tensor& settings,
                  const Tensor& top_k, const Tensor& keys) {
  BISHOP_CHECK_TENSOR(logits, at::kFloat, 2, "fp32 [rows, V]");
  BISHOP_CHECK_CONTIGUOUS(logits);
  const int64_t images = partners.numel();
  BISHOP_CHECK_TENSOR(partners, at::kLong, 1, "int64 [B]");
  BISHOP_CHECK_TENSOR(settings, at::kFloat, 2, "fp32 [B, 3]");
  BISHOP_CHECK_TENSOR(top_k, at::kLong, 1, "int64 [B]");
  BISHOP_CHECK_TENSOR(keys, at::kLong, 1, "int64 [B]");
  for (const Tensor& t : {partners, settings, top_k, keys}) BISHOP_CHECK_CONTIGUOUS(t);
  TORCH_CHECK(logits.size(1) > 0 && images <= logits.size(0) && settings.size(0) == images &&
                  settings.size(1) == 3 && top_k.numel() == images && keys.numel() == images,
              "sample needs one row of logits, partner, setting, top_k and key for each image, got ",
              described(logits), ", ", described(partners), ", ", described(settings), ", ",
              described(top_k), ", ", described(keys));
  for (int64_t i = 0; i < images; ++i)
    TORCH_CHECK(partners.const_data_ptr<int64_t>()[i] < logits.size(0), "partners[", i,
                "] points behind the last row of logits");
}

}  // namespace

Tensor sample(const Tensor& logits, const Tensor& partners, const Tensor& settings,
              const Tensor& top_k, const Tensor& keys) {
  check_sample(logits, partners, settings, top_k, keys);
  const int64_t images = partners.numel(), n = logits.size(1);
  Tensor out = at::empty({images}, partners.options());
  const float* rows = logits.const_data_ptr<float>();
  parallel_tasks(images, [&](int64_t i) {
    thread_local Scratch s;
    s.logits.resize(n);
    s.order.resize(n);
    const int64_t partner = partners.const_data_ptr<int64_t>()[i];
    const float* setting = settings.const_data_ptr<float>() + 3 * i;
    const Draw d{setting[0], setting[1], setting[2], top_k.const_data_ptr<int64_t>()[i],
                 static_cast<uint64_t>(keys.const_data_ptr<int64_t>()[i])};
    const bool finite = prepare(rows + i * n, partner < 0 ? nullptr : rows + partner * n,
                                static_cast<int>(n), d, s.logits.data());
    out.data_ptr<int64_t>()[i] = finite ? draw_token(s, d) : -1;
  });
  return out;
}

}  // namespace bishop::cpu
