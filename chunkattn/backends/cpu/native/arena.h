// Memory of a thread for what a task packs. Compiled once per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chunkattn {
namespace {

// Hands out one memory of a thread in pieces aligned to cache lines.
class Arena {
 public:
  explicit Arena(size_t bytes) {
    thread_local std::vector<char> memory;
    if (memory.size() < bytes + 64) memory.resize(bytes + 64);
    next_ = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  }
  template <class T> T *take(size_t count) {
    T *piece = reinterpret_cast<T *>(next_);
    next_ += bytes<T>(count);
    return piece;
  }
  template <class T> static size_t bytes(size_t count) { return (count * sizeof(T) + 63) / 64 * 64; }

 private:
  char *next_;
};

}  // namespace
}  // namespace chunkattn
