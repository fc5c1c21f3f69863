// Independent tasks over torch's intra-op threads, handed out one by one, since tasks differ in
// cost (sequences at different positions, heads with different rings). Which thread runs a task
// never changes its result.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>

namespace bishop {

template <typename Task>
void parallel_tasks(int64_t count, const Task& task) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < count; i = next++) task(i);
    }
  });
}

}  // namespace bishop
