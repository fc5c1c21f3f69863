// Independent tasks over torch's intra-op threads, handed out one by one, since tasks differ in
// cost (sequences at different positions, heads with different rings). Which thread runs a task
// never changes its result.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bishop {

// Calls worker(claim) on every thread; claim() gives the next task, or `count` when none is left.
template <typename Worker>
void parallel_workers(int64_t count, const Worker& worker) {
  std::atomic<int64_t> next{0};
  const auto claim = [&] { return std::min(next++, count); };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) worker(claim);
  });
}

template <typename Task>
void parallel_tasks(int64_t count, const Task& task) {
  parallel_workers(count, [&](const auto& claim) {
    for (int64_t i = claim(); i < count; i = claim()) task(i);
  });
}

// The same where a task has two halves: each thread prepares its next task before it runs the one
// at hand, so that what `prepare` prefetches arrives meanwhile. `Slot`: a thread's memory of a task.
template <typename Slot, typename Prepare, typename Run>
void parallel_pipeline(int64_t count, const Prepare& prepare, const Run& run) {
  parallel_workers(count, [&](const auto& claim) {
    thread_local Slot slots[2];
    int64_t i = claim();
    if (i < count) prepare(i, slots[0]);
    for (int turn = 0; i < count; turn ^= 1) {
      const int64_t ahead = claim();
      if (ahead < count) prepare(ahead, slots[turn ^ 1]);
      run(i, slots[turn]);
      i = ahead;
    }
  });
}

}  // namespace bishop
