// The gated delta rule of some value heads of one key head, over one walk. Compiled once per instruction set.
//
// A sum over the key's values, or over the rows of a block, adds one product after the other in ascending order, into one number
// of a vector. Rows and columns are computed together only to share loads, so no cut of a walk into steps changes a bit.
// Source: Gated Delta Networks, arXiv:2412.06464, in the chunkwise form of arXiv:2406.06484.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "arena.h"
#include "recurrence.h"
#include "rows.h"

namespace chunkattn {
namespace {

// Rows that are computed together, and vectors of columns for several rows and for one row. A row has two lines: its key and
// its query. Their sums fit the registers.
constexpr int kTogether = 4;
#if defined(__AVX512F__)
constexpr int kWideTogether = 2, kWideAlone = 8, kStateLines = 8;
#else
constexpr int kWideTogether = 1, kWideAlone = 4, kStateLines = 8;
#endif
constexpr int kRowsAhead = 8;   // whose inputs are loaded before they are needed
constexpr int kPackedFrom = 8;  // rows from which the columns of a state are packed
static_assert(kRecurrentBlock % kWidth == 0);

template <int N> using Count = std::integral_constant<int, N>;

// Adds A [LINES, depth] * B [depth, WIDE vectors].
template <int LINES, int WIDE>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[LINES][WIDE], int depth, const float *a, int lda,
                                                        const float *b, int64_t ldb) {
  for (int k = 0; k < depth; k++, b += ldb) {
    Floats right[WIDE];
#pragma GCC unroll 8
    for (int p = 0; p < WIDE; p++) right[p] = read<Floats>(b + p * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++)
#pragma GCC unroll 8
      for (int p = 0; p < WIDE; p++) sums[i][p] += a[int64_t(i) * lda + k] * right[p];
  }
}

// Calls `work(Count, first)` for pieces of at most WIDE vectors of `columns` columns, a multiple of kWidth.
template <int WIDE, class Work> inline void each_columns(int columns, const Work &work, int first = 0) {
  for (; first + WIDE * kWidth <= columns; first += WIDE * kWidth) work(Count<WIDE>(), first);
  if constexpr (WIDE > 1) each_columns<WIDE / 2>(columns, work, first);
}

// Calls `work(Count, row)` for kTogether rows at a time, and for each row that is left.
template <class Work> inline void each_rows(int first, int last, const Work &work) {
  for (; first + kTogether <= last; first += kTogether) work(Count<kTogether>(), first);
  for (; first < last; first++) work(Count<1>(), first);
}

inline int padded(int size) { return (size + kWidth - 1) / kWidth * kWidth; }

class RecurrentHeads {
 public:
  RecurrentHeads(const Recurrence &given, const RecurrentTask &task)
      : given_(given), task_(task), walk_(*task.walk), dk_(given.key_dim), dv_(given.value_dim), padded_dk_(padded(dk_)),
        padded_dv_(padded(dv_)), heads_(task.last - task.first) {
    constexpr size_t block = kRecurrentBlock;
    const size_t panel = std::max(kWideTogether, kWideAlone) * kWidth, own = walk_.slot < 0 ? heads_ * given.state_size() : 0;
    const auto bytes = [](size_t count) { return Arena::bytes<float>(count); };
    Arena arena(bytes(2 * block * padded_dk_) + bytes(padded_dk_ * block) + 2 * bytes(2 * block * block) +
                bytes(block * padded_dv_) + bytes(dk_ * panel) + bytes(block * panel) +
                bytes(std::max(padded_dk_, padded_dv_)) + bytes(own) + Arena::bytes<const float *>(heads_));
    lines_ = arena.take<float>(2 * block * padded_dk_), keys_ = arena.take<float>(padded_dk_ * block);
    products_ = arena.take<float>(2 * block * block), weights_ = arena.take<float>(2 * block * block);
    values_ = arena.take<float>(block * padded_dv_), columns_ = arena.take<float>(dk_ * panel);
    written_ = arena.take<float>(block * panel), zeros_ = arena.take<float>(std::max(padded_dk_, padded_dv_));
    own_ = arena.take<float>(own), states_ = arena.take<const float *>(heads_);
    std::fill_n(zeros_, std::max(padded_dk_, padded_dv_), 0.f);
    for (int i = 0; i < heads_; i++) states_[i] = walk_.source < 0 ? nullptr : given.state_of(walk_.source, task.first + i);
  }

  void run() {
    while (done_ < walk_.count) {
      first_ = (walk_.at + done_) % kRecurrentBlock;
      last_ = std::min(kRecurrentBlock, first_ + walk_.count - done_);
      const int after = done_ + last_ - first_;
      open_ = last_ < kRecurrentBlock && walk_.slot >= 0;
      closes_ = last_ == kRecurrentBlock && (walk_.slot >= 0 || after < walk_.count);
      keeps_ = walk_.keeps() && walk_.keep_at == walk_.at + after;
      prepare_keys();
      for (int head = task_.first; head < task_.last; head++) compute(head);
      done_ = after;
    }
    if (walk_.slot < 0 || walk_.source == walk_.slot || walk_.closed()) return;
    for (int head = task_.first; head < task_.last; head++) {
      float *to = given_.state_of(walk_.slot, head);
      const float *from = states_[head - task_.first];
      from ? (void)std::copy_n(from, given_.state_size(), to) : (void)std::fill_n(to, given_.state_size(), 0.f);
    }
  }

 private:
  int row_of(int i) const { return walk_.row + done_ + i - first_; }  // in the step, of row i of the block
  bool finite(int i) const { return task_.finite[row_of(i)]; }

  // Writes the convolution of `count` channels from `channel` on, for row i of the block.
  void convolve(int input, int i, int channel, int count, float *to) const {
    const float *from[kMostTaps], *taps = task_.taps[input] + channel;
    const int channels = given_.channels(input);
    for (int t = 0; t < given_.taps; t++) {
      const float *of = given_.input(walk_, task_.finite, input, done_ + i - first_ - (given_.taps - 1) + t);
      from[t] = of ? of + channel : zeros_;
    }
    // A row is far from the next one, so the processor does not foresee its loads.
    if (const int later = done_ + i - first_ + kRowsAhead; later < walk_.count) {
      const float *next = given_.inputs[input] + int64_t(walk_.row + later) * channels + channel;
      for (int c = 0; c < count; c += 16) __builtin_prefetch(next + c);
    }
    const auto all = [&](auto number) {
      each_piece(count, [&](int64_t c, int some) __attribute__((always_inline)) {
        Floats sum = {};
#pragma GCC unroll 4
        for (int t = 0; t < (number.value ? number.value : given_.taps); t++)
          sum += take<Format::f32>(taps + int64_t(t) * channels, c, some) * take<Format::f32>(from[t], c, some);
        write(to + c, sum * logistic(sum));
      });
    };
    given_.taps == 4 ? all(Count<4>()) : all(Count<0>());
  }

  void normalise_line(float *line, float scale) const {
    Floats sum = {};
    for (int c = 0; c < padded_dk_; c += kWidth) sum += read<Floats>(line + c) * read<Floats>(line + c);
    const float factor = scale / std::sqrt(sum_of(sum) + 1e-6f);
    for (int c = 0; c < padded_dk_; c += kWidth) write(line + c, read<Floats>(line + c) * factor);
  }

  // Makes the lines of the new rows, the keys of the block as columns, and the products of the lines with the keys.
  void prepare_keys() {
    const int channel = task_.key_head * dk_;
    const float scale = 1.f / std::sqrt(float(dk_));
    for (int i = first_; i < last_; i++) {
      float *key = lines_ + int64_t(2 * i) * padded_dk_, *query = key + padded_dk_;
      if (!finite(i)) {
        std::fill_n(key, 2 * padded_dk_, 0.f);
        continue;
      }
      convolve(1, i, channel, dk_, key), normalise_line(key, 1.f);
      convolve(0, i, channel, dk_, query), normalise_line(query, scale);
    }
    const int64_t stride = int64_t(given_.key_heads) * dk_;
    const float *const seat = walk_.seat < 0 ? nullptr : given_.keys_of(walk_.seat) + channel;
    for (int j = 0; j < padded(last_); j += kWidth)
      for (int c = 0; c < dk_; c += kWidth) {
        Line block[kWidth];
        for (int r = 0; r < kWidth; r++) {
          Floats part = {};
          if (j + r < first_)
            part = take<Format::f32>(seat + (j + r) * stride, c, dk_ - c);
          else if (j + r < last_)
            part = read<Floats>(lines_ + int64_t(2 * (j + r)) * padded_dk_ + c);
          block[r] = (Line)part;
        }
        transpose(block);
        for (int r = 0; r < kWidth; r++) write(keys_ + (c + r) * kRecurrentBlock + j, block[r]);
      }
    each_rows(first_, last_, [&](auto rows, int i) {
      constexpr int kLinesNow = 2 * rows.value, kWide = rows.value == 1 ? 4 : kWideTogether;
      each_columns<kWide>(padded(i + rows.value), [&](auto wide, int column) {
        Floats sums[kLinesNow][wide.value] = {};
        add_products(sums, dk_, lines_ + int64_t(2 * i) * padded_dk_, padded_dk_, keys_ + column, kRecurrentBlock);
        for (int l = 0; l < kLinesNow; l++)
          for (int p = 0; p < wide.value; p++)
            write(products_ + (2 * i + l) * kRecurrentBlock + column + p * kWidth, sums[l][p]);
      });
    });
    if (open_ && task_.open_keys)
      for (int i = first_; i < last_; i++)
        std::copy_n(lines_ + int64_t(2 * i) * padded_dk_, dk_, task_.open_keys + i * stride + channel);
  }

  // Sets the decays of the block, and the write strengths of its new rows.
  void prepare_gates(int head) {
    constexpr double kLog2E = 1.4426950408889634;
    constexpr float kLeastDecay = -128;
    const float rate = -std::exp(given_.a_log[head]), bias = given_.dt_bias[head];
    const int64_t rows = int64_t(walk_.seat) * kRecurrentBlock;
    float *const seat = walk_.seat < 0 ? nullptr : given_.decay + rows * given_.value_heads + head;
    double sum = 0;
    for (int i = 0; i < last_; i++) {
      float decay = 0;
      if (i < first_) {
        decay = seat[i * given_.value_heads];
      } else {
        strength_[i] = 0;
        if (finite(i)) {
          const int64_t at = int64_t(row_of(i)) * given_.value_heads + head;
          const float x = given_.a[at] + bias;
          // A state that decays by more is gone; sums of such decays stay finite.
          decay = std::max(rate * (x > 20.f ? x : std::log1p(std::exp(x))), kLeastDecay);
          strength_[i] = 1.f / (1.f + std::exp(-given_.b[at]));
        }
        if (open_) seat[i * given_.value_heads] = decay;
      }
      sum += double(decay) * kLog2E;
      high_[i] = float(sum), low_[i] = float(sum - high_[i]);
    }
    for (int i = last_; i < padded(last_); i++) high_[i] = low_[i] = 0;
    for (int j = 0; j < last_; j += kWidth) {
      write(from_start_ + j, exp2_of(read<Floats>(high_ + j) + read<Floats>(low_ + j)));
      write(to_end_ + j, since(last_ - 1, j));
    }
  }

  // The decay from rows j to j + kWidth - 1 to row i.
  Floats since(int i, int j) const { return exp2_of((high_[i] - read<Floats>(high_ + j)) + (low_[i] - read<Floats>(low_ + j))); }

  void compute(int head) {
    prepare_gates(head);
    for (int i = first_; i < last_; i++) {
      const int64_t at = int64_t(2 * i) * kRecurrentBlock;
      for (int j = 0; j <= i; j += kWidth) {
        const Floats factor = since(i, j);
        for (int64_t line : {at + j, at + j + kRecurrentBlock}) write(weights_ + line, read<Floats>(products_ + line) * factor);
      }
      if (finite(i)) convolve(2, i, head * dv_, dv_, values_ + int64_t(i) * padded_dv_);
    }
    const auto work = [&](auto wide, int column) { compute_columns<wide.value>(head, column); };
    if (last_ - first_ < kTogether)
      each_columns<kWideAlone>(padded_dv_, work);
    else
      each_columns<kWideTogether>(padded_dv_, work);
    if (closes_) states_[head - task_.first] = own_state(head);
  }

  float *own_state(int head) const {
    return walk_.slot < 0 ? own_ + (head - task_.first) * given_.state_size() : given_.state_of(walk_.slot, head);
  }

  // Computes WIDE vectors of the columns of a value head.
  template <int WIDE> void compute_columns(int head, int column) {
    const int wide = WIDE * kWidth, left = dv_ - column;
    const int64_t stride = int64_t(given_.value_heads) * dv_, in_row = int64_t(head) * dv_ + column;
    const float *state = states_[head - task_.first];
    int64_t lds = dv_;
    if (state) {
      state += column;
      if (left < wide || last_ - first_ >= kPackedFrom) {
        for (int t = 0; t < dk_; t++) copy_in<WIDE>(state + int64_t(t) * dv_, left, columns_ + t * wide);
        state = columns_, lds = wide;
      }
    }
    float *const seat = walk_.seat < 0 ? nullptr : given_.values + int64_t(walk_.seat) * kRecurrentBlock * stride + in_row;
    for (int j = 0; j < first_; j++) copy_in<WIDE>(seat + j * stride, left, written_ + j * wide);
    each_rows(first_, last_, [&](auto rows, int i) { compute_rows<rows.value, WIDE>(state, lds, i, in_row, left); });
    if (open_)
      for (int i = first_; i < last_; i++) copy_out<WIDE>(written_ + i * wide, left, seat + i * stride);
    if (closes_ || keeps_) close<WIDE>(head, column, state, lds);
  }

  template <int WIDE> static void copy_in(const float *from, int count, float *to) {
    for (int p = 0; p < WIDE * kWidth; p += kWidth) write(to + p, take<Format::f32>(from, p, count - p));
  }
  template <int WIDE> static void copy_out(const float *from, int count, float *to) {
    for (int p = 0; p < WIDE * kWidth; p += kWidth) put(to + p, count - p, read<Floats>(from + p));
  }

  // Computes what ROWS rows from row i on write, and their outputs.
  template <int ROWS, int WIDE>
  inline __attribute__((always_inline)) void compute_rows(const float *state, int64_t lds, int i, int64_t in_row, int left) {
    const int wide = WIDE * kWidth;
    const int64_t stride = int64_t(given_.value_heads) * dv_;
    Floats before[2 * ROWS][WIDE] = {}, within[2 * ROWS][WIDE] = {};
    if (state) add_products(before, dk_, lines_ + int64_t(2 * i) * padded_dk_, padded_dk_, state, lds);
    const float *weights = weights_ + int64_t(2 * i) * kRecurrentBlock;
    add_products(within, i, weights, kRecurrentBlock, written_, wide);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const float *of_key = weights + 2 * r * kRecurrentBlock + i, *of_query = of_key + kRecurrentBlock;
      const float factor = from_start_[i + r], strength = strength_[i + r];
      const bool good = finite(i + r);
      float *const out = given_.out + row_of(i + r) * stride + in_row;
#pragma GCC unroll 8
      for (int p = 0; p < WIDE; p++) {
        Floats key = within[2 * r][p], query = within[2 * r + 1][p];
#pragma GCC unroll 4
        for (int j = 0; j < r; j++) {
          const Floats other = read<Floats>(written_ + (i + j) * wide + p * kWidth);
          key += of_key[j] * other, query += of_query[j] * other;
        }
        const Floats value = read<Floats>(values_ + int64_t(i + r) * padded_dv_ + in_row % dv_ + p * kWidth);
        const Floats own = good ? (value - factor * before[2 * r][p] - key) * strength : Floats{};
        write(written_ + (i + r) * wide + p * kWidth, own);
        query += of_query[r] * own;
        query = good ? factor * before[2 * r + 1][p] + query : splat(std::numeric_limits<float>::quiet_NaN());
        put(out + p * kWidth, left - p * kWidth, query);
      }
    }
  }

  // Writes the columns of the state after the block's last row, and makes `written_` useless.
  template <int WIDE> void close(int head, int column, const float *state, int64_t lds) {
    const int wide = WIDE * kWidth, left = dv_ - column;
    for (int j = 0; j < last_; j++)
      for (int p = 0; p < wide; p += kWidth) write(written_ + j * wide + p, read<Floats>(written_ + j * wide + p) * to_end_[j]);
    const float factor = from_start_[last_ - 1];
    float *const own = closes_ ? own_state(head) + column : nullptr;
    float *const kept = keeps_ ? given_.state_of(walk_.keep_slot, head) + column : nullptr;
    const auto some = [&](auto lines, int t) {
      Floats sums[lines.value][WIDE] = {};
      if (state)
        for (int l = 0; l < lines.value; l++)
          for (int p = 0; p < WIDE; p++) sums[l][p] = read<Floats>(state + (t + l) * lds + p * kWidth) * factor;
      add_products(sums, last_, keys_ + t * kRecurrentBlock, kRecurrentBlock, written_, wide);
      for (int l = 0; l < lines.value; l++)
        for (int p = 0; p < WIDE; p++)
          for (float *to : {own, kept})
            if (to) put(to + int64_t(t + l) * dv_ + p * kWidth, left - p * kWidth, sums[l][p]);
    };
    constexpr int kLinesNow = WIDE > kWideTogether ? 2 : kStateLines;
    int t = 0;
    for (; t + kLinesNow <= dk_; t += kLinesNow) some(Count<kLinesNow>(), t);
    for (; t < dk_; t++) some(Count<1>(), t);
  }

  const Recurrence &given_;
  const RecurrentTask &task_;
  const Walk &walk_;
  const int dk_, dv_, padded_dk_, padded_dv_, heads_;
  float *lines_;                  // [block, 2, padded dk]: key and query of each new row
  float *keys_;                   // [padded dk, block]
  float *products_, *weights_;    // [block, 2, block]: of the lines with the keys; times the decays of a head
  float *values_;                 // [block, padded dv]
  float *columns_, *written_;     // [dk, wide], [block, wide]: columns of a state, and of what the rows write
  float *zeros_, *own_;           // own_: [heads, dk, dv], states of a walk without a slot
  const float **states_;          // [heads], before the block; null for zeros
  alignas(64) float strength_[kRecurrentBlock], from_start_[kRecurrentBlock], to_end_[kRecurrentBlock];
  alignas(64) float high_[kRecurrentBlock], low_[kRecurrentBlock];  // their sum: log2 of the decay from the start of the block
  int done_ = 0, first_ = 0, last_ = 0;  // tokens before the block; rows of the block that are new
  // Whether the seat gets the new rows, whether the state after them is the next block's, and whether it is kept.
  bool open_ = false, closes_ = false, keeps_ = false;
};

void compute_heads(const Recurrence &given, const RecurrentTask &task) { RecurrentHeads(given, task).run(); }

void check_inputs(const Recurrence &given, int first, int last, uint8_t *finite) {
  for (int row = first; row < last; row++) {
    Floats odd[kLanes] = {};  // 0 times every input: NaN for those that are not finite
    const auto look = [&](const float *from, int64_t size) {
      int lane = 0;
      each_piece(size, [&](int64_t i, int count) { odd[lane++ % kLanes] += take<Format::f32>(from + row * size, i, count) * 0.f; });
    };
    for (int input = 0; input < 3; input++) look(given.inputs[input], given.channels(input));
    look(given.a, given.value_heads), look(given.b, given.value_heads);
    finite[row] = total_of(odd) == 0;
  }
}

const RecurrenceKernel kRecurrence = {check_inputs, compute_heads};

}  // namespace
}  // namespace chunkattn
