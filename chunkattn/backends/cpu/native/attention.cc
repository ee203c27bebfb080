// Cuts a step into items, hands them to threads, and merges the softmax states of an item's splits.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace chunkattn {
namespace {

int bytes_of(Format format) { return format == Format::f32 ? 4 : format == Format::fp8 ? 1 : 2; }

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

void write_row(const Step &step, int row) {
  const int head = step.head_dim * bytes_of(step.cache_format), slot = step.row_slot[row];
  const int64_t page = step.block_tables[int64_t(step.row_seq[row]) * step.width + slot / step.block_size];
  for (int g = 0; g < step.kv_heads; g++) {
    const int64_t to = ((page * step.kv_heads + g) * step.block_size + slot % step.block_size) * head;
    const int64_t from = (int64_t(row) * step.kv_heads + g) * head;
    memcpy(static_cast<char *>(step.keys) + to, static_cast<const char *>(step.k) + from, head);
    memcpy(static_cast<char *>(step.values) + to, static_cast<const char *>(step.v) + from, head);
  }
}

bool weighed(const Step &step, int row) {
  if (!step.question_start) return false;
  const int sequence = step.row_seq[row], start = step.question_start[sequence];
  return step.row_slot[row] >= start && step.prefix_end[sequence] < start;
}

std::vector<Item> cut(const Step &step, int threads) {
  int rows = std::max(1, kMaxLines / step.lines_per_row());
  // Few rows and many threads: smaller items. Results do not depend on an item's size.
  while (rows * step.lines_per_row() > 64 && step.num_rows * step.kv_heads < rows * 2 * threads) rows = (rows + 1) / 2;
  std::vector<Item> items;
  for (int row = 0; row < step.num_rows;) {
    int end = row + 1;
    while (end < step.num_rows && step.row_seq[end] == step.row_seq[row] && weighed(step, end) == weighed(step, row)) end++;
    const bool alone = end == row + 1;
    for (; row < end; row += rows)
      for (int g = 0; g < step.kv_heads; g++) items.push_back({row, std::min(rows, end - row), g, weighed(step, row), alone});
    row = end;
  }
  return items;
}

// The softmax states of an item, in memory of its own.
class States {
 public:
  States(const Step &step, const Item &item)
      : dim_(step.padded_dim()),
        lines_(item.alone ? step.lines_per_row()
                              : (item.rows * step.lines_per_row() + kLineGranule - 1) / kLineGranule * kLineGranule),
        count_(item.weighed ? 2 : 1), memory_(new float[size_t(count_) * lines_ * (dim_ + 2)]) {
    for (int s = 0; s < count_; s++) {
      float *at = memory_.get() + size_t(s) * lines_ * (dim_ + 2);
      states_[s] = {at + size_t(lines_) * dim_, at + size_t(lines_) * (dim_ + 1), at};
    }
    clear();
  }
  void clear() {
    for (int s = 0; s < count_; s++) {
      std::fill_n(states_[s].maximum, lines_, -1e30f);
      std::fill_n(states_[s].total, lines_, 0.f);
      std::fill_n(states_[s].values, size_t(lines_) * dim_, 0.f);
    }
  }
  State *get() { return states_; }

  void add(const States &other) {
    for (int s = 0; s < count_; s++)
      for (int line = 0; line < lines_; line++) merge(states_[s], other.states_[s], line);
  }

  // Divides, and writes the item's rows.
  void finish(const Step &step, const Item &item) {
    const int per_row = step.lines_per_row();
    for (int line = 0; line < item.rows * per_row; line++) {
      if (item.weighed) weigh(line, step.chunk_scale[step.row_seq[item.row]]);
      const float *values = states_[0].values + size_t(line) * dim_, by = 1.f / std::max(states_[0].total[line], 1e-37f);
      const int64_t to = (int64_t(item.row + line / per_row) * step.heads + item.kv_head * per_row + line % per_row) * step.head_dim;
      if (step.format == Format::bf16) {
        for (int d = 0; d < step.head_dim; d++) static_cast<uint16_t *>(step.out)[to + d] = bf16(values[d] * by);
      } else {
        for (int d = 0; d < step.head_dim; d++) static_cast<float *>(step.out)[to + d] = values[d] * by;
      }
    }
  }

 private:
  static uint16_t bf16(float x) {  // rounds to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
  }

  void merge(State &into, const State &from, int line) const {
    if (from.total[line] == 0) return;
    const float most = std::max(into.maximum[line], from.maximum[line]);
    const float a = into.total[line] == 0 ? 0 : std::exp2(into.maximum[line] - most), b = std::exp2(from.maximum[line] - most);
    into.maximum[line] = most;
    into.total[line] = into.total[line] * a + from.total[line] * b;
    float *to = into.values + size_t(line) * dim_;
    const float *add = from.values + size_t(line) * dim_;
    for (int d = 0; d < dim_; d++) to[d] = to[d] * a + add[d] * b;
  }

  // Adds the chunks to the rest as one slot whose score is `scale` times their log-sum-exp.
  void weigh(int line, float scale) {
    State &chunks = states_[1];
    if (chunks.total[line] == 0) return;
    float *values = chunks.values + size_t(line) * dim_;
    for (int d = 0; d < dim_; d++) values[d] /= chunks.total[line];
    chunks.maximum[line] = scale * (chunks.maximum[line] + std::log2(chunks.total[line]));
    chunks.total[line] = 1;
    merge(states_[0], chunks, line);
  }

  int dim_, lines_, count_;
  std::unique_ptr<float[]> memory_;
  State states_[2];
};

// First and last split with a slot that the item may see.
int first_split(const Step &step, const Item &item) {
  return step.window ? std::max(0, step.row_slot[item.row] - step.window + 1) / kSplitSlots : 0;
}
int last_split(const Step &step, const Item &item) { return step.row_slot[item.row + item.rows - 1] / kSplitSlots; }

void attend_whole(const Step &step, const Kernel &kernel, const Item &item) {
  const int first = first_split(step, item), last = last_split(step, item);
  States all(step, item);
  kernel.attend(step, item, first, all.get());
  if (last > first) {
    States one(step, item);
    for (int split = first + 1; split <= last; split++) {
      kernel.attend(step, item, split, one.get());
      all.add(one);
      one.clear();
    }
  }
  all.finish(step, item);
}

// An item of which every split is a task; the last to end merges them, in order.
struct Divided {
  Divided(const Step &step, const Item &item)
      : item(item), first(first_split(step, item)), left(last_split(step, item) - first + 1), states(left) {}
  const Item item;
  const int first;
  std::atomic<int> left;
  std::vector<std::unique_ptr<States>> states;

  void attend(const Step &step, const Kernel &kernel, int index) {
    states[index] = std::make_unique<States>(step, item);
    kernel.attend(step, item, first + index, states[index]->get());
    if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (size_t i = 1; i < states.size(); i++) states[0]->add(*states[i]);
    states[0]->finish(step, item);
    states.clear();
  }
};

}  // namespace

void attention(const Step &step, const Kernel &kernel, Threads &threads) {
  constexpr int kRowsPerTask = 64;
  parallel(threads, (step.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    const int end = std::min(step.num_rows, (task + 1) * kRowsPerTask);
    for (int row = task * kRowsPerTask; row < end; row++) write_row(step, row);
  });
  const int64_t row_bytes = int64_t(step.heads) * step.head_dim * (step.format == Format::bf16 ? 2 : 4);
  memset(static_cast<char *>(step.out) + step.num_rows * row_bytes, 0, (step.padded_rows - step.num_rows) * row_bytes);

  const std::vector<Item> items = cut(step, threads.count());
  const int count = int(items.size());
  if (count >= 4 * threads.count() || threads.count() == 1) {
    // The last items of a sequence see most: begin with them.
    parallel(threads, count, [&](int i) { attend_whole(step, kernel, items[count - 1 - i]); });
    return;
  }
  std::vector<std::unique_ptr<Divided>> divided;
  std::vector<std::pair<int, int>> tasks;
  for (const Item &item : items) {
    divided.push_back(std::make_unique<Divided>(step, item));
    for (size_t i = 0; i < divided.back()->states.size(); i++) tasks.push_back({int(divided.size()) - 1, int(i)});
  }
  parallel(threads, int(tasks.size()), [&](int i) { divided[tasks[i].first]->attend(step, kernel, tasks[i].second); });
}

void multiply(const FewRows &given, const Kernel &kernel, Threads &threads) {
  constexpr int kOutputsPerTask = 64;
  parallel(threads, (given.outputs + kOutputsPerTask - 1) / kOutputsPerTask, [&](int task) {
    kernel.multiply(given, task * kOutputsPerTask, std::min(given.outputs, (task + 1) * kOutputsPerTask));
  });
}

}  // namespace chunkattn
