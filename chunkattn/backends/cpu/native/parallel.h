// Tasks on a pool of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "attention.h"

namespace chunkattn {

// Products have few tasks, since each waits for its first piece of the weight, and several for each thread, since threads are not
// equally fast.
constexpr int kTasksPerThread = 4;
// Rows up to which a step is a chain of short calls, between which helpers stay awake.
constexpr int kShortRows = 16;

inline int divided(int a, int b) { return (a + b - 1) / b; }

// A thread's memory, which grows and stays, aligned to cache lines.
inline char *memory_of_thread(int64_t bytes) {
  thread_local std::unique_ptr<char[]> held;
  thread_local int64_t size = 0;
  if (size < bytes) held.reset(new char[bytes + 64]), size = bytes;
  return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(held.get()) + 63) & ~uintptr_t(63));
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Helpers that look for tasks for a while after the last one. Waking a thread takes longer than a short call, so the calls of a
// decode find their helpers awake. One call has the team at a time.
class Team {
 public:
  using Call = void (*)(const void *work, int task);

  static Team &get() {
    static Team *const team = new Team;  // never destroyed, since a helper may outlive `main`
    return *team;
  }

  // Calls `call(work, 0)` to `call(work, count - 1)`. Returns false at once if another call has the team.
  bool run(Threads &threads, int count, Call call, const void *work) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    const uint64_t first = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
    claims_.store(first << 32 | kClosed);  // nobody claims a task with a mixture of the old call and the new one
    call_.store(call, std::memory_order_release), work_.store(work, std::memory_order_release);
    count_.store(count, std::memory_order_release), done_.store(0, std::memory_order_release);
    claims_.store((first + 1) << 32);
    const int wanted = std::min(threads.count(), count) - 1;
    for (int awake = awake_.load(std::memory_order_relaxed); awake < wanted; awake++) {
      awake_.fetch_add(1, std::memory_order_relaxed);
      threads.schedule([this] { help(); });
    }
    while (one_task()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++)
      if (spins > 1000) std::this_thread::yield();
    taken_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;
  static constexpr std::chrono::microseconds kAwake{60};

  bool one_task() {
    uint64_t claimed = claims_.load(std::memory_order_acquire);
    for (;;) {
      const Call call = call_.load(std::memory_order_acquire);
      const void *work = work_.load(std::memory_order_acquire);
      const uint32_t task = uint32_t(claimed), count = uint32_t(count_.load(std::memory_order_acquire));
      if (task >= count) return false;
      if (!claims_.compare_exchange_weak(claimed, claimed + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      call(work, int(task));
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void help() {
    using Clock = std::chrono::steady_clock;
    for (auto end = Clock::now() + kAwake; Clock::now() < end;) {
      bool found = false;
      for (int looks = 0; looks < 64 && !found; looks++) {
        found = one_task();
        pause();
      }
      if (found) end = Clock::now() + kAwake;
    }
    awake_.fetch_sub(1, std::memory_order_relaxed);
  }

  std::atomic<uint64_t> claims_{uint64_t(kClosed)};  // number of the call, and of its next task
  std::atomic<Call> call_{nullptr};
  std::atomic<const void *> work_{nullptr};
  std::atomic<int> count_{0}, done_{0}, awake_{0};
  std::atomic<bool> taken_{false};
};

// Calls `work(0)` to `work(count - 1)`. The caller takes part, and never waits for a helper that has not begun.
//
// Args: `in_chain`: more calls follow at once, so that helpers stay awake for them.
template <class Work> void parallel(Threads &threads, int count, const Work &work, bool in_chain = false) {
  if (count <= 1 || threads.count() <= 1) {
    for (int i = 0; i < count; i++) work(i);
    return;
  }
  const auto call = [](const void *of, int task) { (*static_cast<const Work *>(of))(task); };
  if (in_chain && Team::get().run(threads, count, call, &work)) return;
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
