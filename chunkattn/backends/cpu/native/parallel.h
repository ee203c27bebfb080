// Tasks on a pool of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "attention.h"

namespace chunkattn {

// Products have few tasks, since each waits for its first piece of the weight, and several for each thread, since threads are not
// equally fast.
constexpr int kTasksPerThread = 4;

inline int divided(int a, int b) { return (a + b - 1) / b; }

// Calls `work(0)` to `work(count - 1)`. The caller takes part, and never waits for a helper that has not begun.
template <class Work> void parallel(Threads &threads, int count, const Work &work) {
  struct Shared {
    std::atomic<int> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();  // a helper may begin after all is done
  auto loop = [shared, count, &work] {
    for (int i; (i = shared->next.fetch_add(1)) < count;) {
      work(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int helper = 1; helper < std::min(threads.count(), count); helper++) threads.schedule(loop);
  loop();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; spins++)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace chunkattn
