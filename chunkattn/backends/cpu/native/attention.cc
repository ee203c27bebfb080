// Cuts a step into items, hands them to threads, and adds up the softmax states of an item's portions.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "parallel.h"
#include "rounding.h"

namespace chunkattn {
namespace {

constexpr int kGranule = 32;  // rows and outputs of a product's task are multiples

int bytes_of(Format format) { return format == Format::f32 ? 4 : format == Format::fp8 ? 1 : 2; }

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
    for (; row < end; row += rows)
      for (int g = 0; g < step.kv_heads; g++) items.push_back({row, std::min(rows, end - row), g, weighed(step, row)});
    row = end;
  }
  return items;
}

// Whether a valid slot of [begin, end) has a position above `before`.
bool holds_later(const Step &step, int sequence, int begin, int end, int before) {
  const int64_t row = int64_t(sequence) * step.width;
  for (int page = begin / step.block_size; page * step.block_size < end; page++) {
    const int base = page * step.block_size, last = std::min(base + step.page_len[row + page], end) - 1;
    if (last >= std::max(base, begin) && step.page_position[row + page] + last - base > before) return true;
  }
  return false;
}

// The portions of an item, in the order in which each row adds them: the prefix, then the rows' own parts. The chunks that
// weighed rows see stand in between.
std::vector<Portion> portions(const Step &step, const Item &item) {
  const int sequence = step.row_seq[item.row], after = item.row + item.rows, prefix_end = step.prefix_end[sequence];
  std::vector<Portion> found;
  const auto add = [&](int row, int end_row, int begin, int end, bool chunks) {
    int lowest = INT_MAX;  // position of the rows
    for (int i = row; step.window && i < end_row; i++) lowest = std::min(lowest, step.position(sequence, step.row_slot[i]));
    for (; begin < end; begin += kPortionSlots) {
      const int stop = std::min(begin + kPortionSlots, end);
      if (!step.window || holds_later(step, sequence, begin, stop, lowest - step.window))
        found.push_back({row, end_row - row, item.kv_head, begin, stop, chunks});
    }
  };
  const auto last = [&](int end_row) { return step.row_slot[end_row - 1] + 1; };
  add(item.row, after, 0, std::min(prefix_end, last(after)), false);
  if (item.weighed) {
    const int question = step.question_start[sequence];
    add(item.row, after, prefix_end, question, true);
    add(item.row, after, question, last(after), false);
    return found;
  }
  int row = item.row;
  while (row < after && step.row_slot[row] < prefix_end) row++;
  while (row < after) {
    const int start = std::max(prefix_end, step.row_start[row]);
    int end = row + 1;
    while (end < after && std::max(prefix_end, step.row_start[end]) == start) end++;
    add(row, end, start, last(end), false);
    row = end;
  }
  return found;
}

// Memory that a thread keeps for its next call: the states of a decode are many and small, and live for microseconds.
class Kept {
 public:
  explicit Kept(size_t count) {
    auto &free = of_thread();
    if (!free.empty()) memory_ = std::move(free.back()), free.pop_back();
    if (memory_.size() < count) memory_.resize(count);
  }
  ~Kept() {
    constexpr size_t kMost = 4;
    if (auto &free = of_thread(); free.size() < kMost) free.push_back(std::move(memory_));
  }
  Kept(const Kept &) = delete;
  float *get() { return memory_.data(); }

 private:
  static std::vector<std::vector<float>> &of_thread() {
    thread_local std::vector<std::vector<float>> free;
    return free;
  }
  std::vector<float> memory_;
};

// The softmax states of some rows, in memory of their own.
class States {
 public:
  States(const Step &step, int rows)
      : per_row_(step.lines_per_row()), dim_(step.padded_dim()),
        lines_((rows * per_row_ + kLineGranule - 1) / kLineGranule * kLineGranule),
        memory_(size_t(lines_) * (dim_ + 2)) {
    state_ = {memory_.get() + size_t(lines_) * dim_, memory_.get() + size_t(lines_) * (dim_ + 1), memory_.get()};
    clear(rows);
  }
  void clear(int rows) {
    const int lines = std::min(lines_, (rows * per_row_ + kLineGranule - 1) / kLineGranule * kLineGranule);
    std::fill_n(state_.maximum, lines, -1e30f);
    std::fill_n(state_.total, lines, 0.f);
    std::fill_n(state_.values, size_t(lines) * dim_, 0.f);
  }
  const State &get() const { return state_; }

  // Adds the states of `rows` rows to those from row `first` on.
  void add(const States &other, int first, int rows) {
    for (int line = 0; line < rows * per_row_; line++) merge(first * per_row_ + line, other.state_, line);
  }

  // Adds the chunks to the rest as one slot whose score is `scale` times their log-sum-exp.
  void add_weighed(States &chunks, float scale) {
    State &of = chunks.state_;
    for (int line = 0; line < lines_; line++) {
      if (of.total[line] == 0) continue;
      float *values = of.values + size_t(line) * dim_;
      for (int d = 0; d < dim_; d++) values[d] /= of.total[line];
      of.maximum[line] = scale * (of.maximum[line] + std::log2(of.total[line]));
      of.total[line] = 1;
      merge(line, of, line);
    }
  }

  // Divides, and writes the item's rows.
  void finish(const Step &step, const Item &item) const {
    for (int line = 0; line < item.rows * per_row_; line++) {
      const float *values = state_.values + size_t(line) * dim_, by = 1.f / std::max(state_.total[line], 1e-37f);
      const int64_t head = int64_t(item.row + line / per_row_) * step.heads + item.kv_head * per_row_ + line % per_row_;
      const int64_t to = head * step.head_dim;
      if (step.format == Format::bf16) {
        for (int d = 0; d < step.head_dim; d++) static_cast<uint16_t *>(step.out)[to + d] = rounded_bf16(values[d] * by);
      } else {
        for (int d = 0; d < step.head_dim; d++) static_cast<float *>(step.out)[to + d] = values[d] * by;
      }
    }
  }

 private:
  void merge(int line, const State &from, int of) {
    if (from.total[of] == 0) return;
    const float most = std::max(state_.maximum[line], from.maximum[of]);
    const float a = state_.total[line] == 0 ? 0 : std::exp2(state_.maximum[line] - most), b = std::exp2(from.maximum[of] - most);
    state_.maximum[line] = most;
    state_.total[line] = state_.total[line] * a + from.total[of] * b;
    float *to = state_.values + size_t(line) * dim_;
    const float *add = from.values + size_t(of) * dim_;
    for (int d = 0; d < dim_; d++) to[d] = to[d] * a + add[d] * b;
  }

  int per_row_, dim_, lines_;
  Kept memory_;
  State state_;
};

// The states of an item, to which its portions are added in order.
class Sum {
 public:
  Sum(const Step &step, const Item &item) : step_(step), item_(item), all_(step, item.rows) {
    if (item.weighed) chunks_ = std::make_unique<States>(step, item.rows);
  }
  void add(const Portion &portion, const States &states) {
    (portion.chunks ? *chunks_ : all_).add(states, portion.row - item_.row, portion.rows);
  }
  void finish() {
    if (item_.weighed) all_.add_weighed(*chunks_, step_.chunk_scale[step_.row_seq[item_.row]]);
    all_.finish(step_, item_);
  }

 private:
  const Step &step_;
  const Item &item_;
  States all_;
  std::unique_ptr<States> chunks_;
};

void attend_whole(const Step &step, const Kernel &kernel, const Item &item) {
  Sum sum(step, item);
  States one(step, item.rows);
  for (const Portion &portion : portions(step, item)) {
    one.clear(portion.rows);
    kernel.attend(step, portion, one.get());
    sum.add(portion, one);
  }
  sum.finish();
}

// An item of which every portion is a task; the last to end adds them up.
struct Divided {
  Divided(const Step &step, const Item &item)
      : item(item), parts(portions(step, item)), left(int(parts.size())), states(parts.size()) {}
  const Item item;
  const std::vector<Portion> parts;
  std::atomic<int> left;
  std::vector<std::unique_ptr<States>> states;

  void attend(const Step &step, const Kernel &kernel, int index) {
    states[index] = std::make_unique<States>(step, parts[index].rows);
    kernel.attend(step, parts[index], states[index]->get());
    if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Sum sum(step, item);
    for (size_t i = 0; i < parts.size(); i++) sum.add(parts[i], *states[i]);
    sum.finish();
    states.clear();
  }
};

// Calls `work(first, last)` for blocks of rows.
template <class Work> void by_rows(Threads &threads, int rows, int at_once, const Work &work) {
  parallel(threads, divided(rows, at_once), [&](int task) { work(task * at_once, std::min(rows, (task + 1) * at_once)); });
}

constexpr int kRowsPerTask = 64;

void attend_written(const Step &step, const Kernel &kernel, Threads &threads) {
  const bool in_chain = step.in_chain && step.num_rows <= kShortRows;
  const int64_t row_bytes = int64_t(step.heads) * step.head_dim * (step.format == Format::bf16 ? 2 : 4);
  memset(static_cast<char *>(step.out) + step.num_rows * row_bytes, 0, (step.padded_rows - step.num_rows) * row_bytes);

  const std::vector<Item> items = cut(step, threads.count());
  const int count = int(items.size());
  if (count >= 4 * threads.count() || threads.count() == 1) {
    // The last items of a sequence see most: begin with them.
    parallel(threads, count, [&](int i) { attend_whole(step, kernel, items[count - 1 - i]); }, in_chain);
    return;
  }
  std::vector<std::unique_ptr<Divided>> divided;
  std::vector<std::pair<int, int>> tasks;
  for (const Item &item : items) {
    divided.push_back(std::make_unique<Divided>(step, item));
    for (size_t i = 0; i < divided.back()->states.size(); i++) tasks.push_back({int(divided.size()) - 1, int(i)});
  }
  parallel(threads, int(tasks.size()), [&](int i) { divided[tasks[i].first]->attend(step, kernel, tasks[i].second); }, in_chain);
}

}  // namespace

void attention(const Step &step, const Kernel &kernel, Threads &threads) {
  by_rows(threads, step.num_rows, kRowsPerTask, [&](int first, int last) {
    for (int row = first; row < last; row++) write_row(step, row);
  });
  attend_written(step, kernel, threads);
}

void attention_of_heads(Step step, Heads heads, const Kernel &kernel, Threads &threads) {
  thread_local std::vector<char> queries;
  const size_t row_bytes = size_t(step.heads) * step.head_dim * bytes_of(step.format);
  if (queries.size() < step.num_rows * row_bytes) queries.resize(step.num_rows * row_bytes);
  std::vector<uint8_t> finite(size_t(step.num_rows) * step.kv_heads);
  step.q = heads.queries = queries.data(), heads.finite = finite.data();
  by_rows(threads, step.num_rows, kShortRows, [&](int first, int last) { kernel.rows_alone.prepare(step, heads, first, last); });
  attend_written(step, kernel, threads);
  const size_t group = size_t(step.lines_per_row()) * step.head_dim;
  for (size_t i = 0; i < finite.size(); i++) {
    if (finite[i]) continue;
    if (step.format == Format::bf16)
      std::fill_n(static_cast<uint16_t *>(step.out) + i * group, group, uint16_t(0x7fc0));
    else
      std::fill_n(static_cast<float *>(step.out) + i * group, group, std::nanf(""));
  }
}

void norm(const Norm &given, const Kernel &kernel, Threads &threads) {
  by_rows(threads, given.rows, kShortRows, [&](int first, int last) { kernel.rows_alone.norm(given, first, last); });
}

void gate(const Gate &given, const Kernel &kernel, Threads &threads) {
  constexpr int64_t kValues = 1 << 16;  // of a task
  parallel(threads, int((given.values + kValues - 1) / kValues), [&](int task) {
    kernel.rows_alone.gate(given, task * kValues, std::min(given.values, (task + 1) * kValues));
  });
}

void largest(const float *logits, int rows, int count, int32_t *index, bool *finite, const Kernel &kernel, Threads &threads) {
  parallel(
      threads, rows, [&](int row) { kernel.rows_alone.largest(logits + int64_t(row) * count, count, index + row, finite + row); },
      rows <= kShortRows);
}

void normalise(const float *logits, int rows, int count, float *to, const Kernel &kernel, Threads &threads) {
  parallel(threads, rows, [&](int row) { kernel.normalise(logits + int64_t(row) * count, count, to + 2 * row); });
}

void multiply(const RowProduct &given, const Kernel &kernel, Threads &threads) { multiply(&given, 1, kernel, threads); }

void multiply(const RowProduct *given, int count, const Kernel &kernel, Threads &threads) {
  if (!given->rows) return;
  const int rows = divided(divided(given->rows, divided(given->rows, kernel.rows)), kGranule) * kGranule;
  const int blocks = divided(given->rows, rows), wanted = divided(threads.count() * kTasksPerThread, blocks);
  int64_t all = 0;
  for (int i = 0; i < count; i++) all += given[i].outputs;
  const int pieces = std::max<int64_t>(2, (all + int64_t(kGranule) * wanted - 1) / (int64_t(kGranule) * wanted));
  const int outputs = std::min(pieces * kGranule, kernel.outputs);
  std::vector<std::pair<int, int>> parts;  // product, and first output
  for (int i = 0; i < count; i++)
    for (int first = 0; first < given[i].outputs; first += outputs) parts.push_back({i, first});
  const auto one = [&](int task) {
    const int row = task % blocks * rows, first = parts[task / blocks].second;  // neighbours share a piece of the weight
    RowProduct part = given[parts[task / blocks].first];
    part.x += int64_t(row) * part.in, part.out += int64_t(row) * part.outputs, part.rows = std::min(rows, part.rows - row);
    kernel.multiply(part, first, std::min(part.outputs, first + outputs));
  };
  parallel(threads, blocks * int(parts.size()), one, given->rows <= kShortRows);
}

void read_labels(const RowProduct &given, const int32_t *labels, int num_labels, float *logits, float *normalisers,
                 const Kernel &kernel, Threads &threads) {
  if (!given.rows || !given.outputs) return;
  constexpr int kPackedBytes = 1 << 20;  // of the rows of a task: half of a core's cache
  const int most = std::clamp(kPackedBytes / std::max(1, 2 * given.in) / kGranule * kGranule, kGranule, kernel.rows);
  const int parts = divided(given.outputs, kernel.outputs), blocks = divided(given.rows, most);
  const int pieces = divided(parts, divided(threads.count() * kTasksPerThread, blocks));
  std::vector<float> sums(size_t(2) * given.rows * parts);
  parallel(threads, blocks * divided(parts, pieces), [&](int task) {
    const int row = task % blocks * most, first = task / blocks * pieces, place = row * num_labels;
    RowReading some{given, labels + place, num_labels, logits + place, sums.data() + size_t(2) * row * parts, parts};
    some.product.x += int64_t(row) * given.in, some.product.rows = std::min(most, given.rows - row);
    kernel.read(some, first, std::min(parts, first + pieces));
  });
  for (int row = 0; row < given.rows; row++) {
    const float *of = sums.data() + size_t(2) * row * parts;
    float maximum = of[0];
    for (int part = 1; part < parts; part++) maximum = std::max(maximum, of[2 * part]);
    double total = 0;
    for (int part = 0; part < parts; part++) total += of[2 * part + 1] * std::exp(double(of[2 * part]) - maximum);
    normalisers[2 * row] = std::isfinite(total) ? maximum : std::nanf("");
    normalisers[2 * row + 1] = float(std::log(total));
  }
}

}  // namespace chunkattn
