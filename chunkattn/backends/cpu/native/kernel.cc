// The kernels of one instruction set, chosen by the compiler's flags. Only the `Kernel` at the end leaves this file.
//
// Most portions multiply packed tiles of K and V; those of few lines, mostly decodes, take K and V from the pool.
// Source: FlashAttention, arXiv:2205.14135; the weighing: APE, arXiv:2502.05431.
#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>

#include "arena.h"
#include "few_lines.h"
#include "normaliser.h"
#include "products.h"
#include "recurrence_kernel.h"
#include "rows.h"
#if defined(__AMX_BF16__)
#include "readout.h"
#else
#include "few_rows.h"
#if defined(__AVX512BF16__)
#include "groups_kernel.h"
#endif
#endif

namespace chunkattn {
namespace {

constexpr float kMasked = -1e30f;
constexpr float kLog2E = 1.44269504f;
constexpr int32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int kBlockOfLines = 32;  // lines whose scores are held at a time

// Calls `found(slot, place)` for the valid slots of [begin, end), in order. A place in a pool counts a head's vectors.
template <class Found> inline void each_valid(const Step &step, const Portion &portion, int begin, int last, Found found) {
  const int64_t row = int64_t(step.row_seq[portion.row]) * step.width;
  for (int slot = begin; slot < last;) {
    const int page = slot / step.block_size, base = page * step.block_size;
    const int end = std::min(base + std::min(step.page_len[row + page], step.block_size), last);
    const int64_t at = (int64_t(step.block_tables[row + page]) * step.kv_heads + portion.kv_head) * step.block_size - base;
    for (; slot < end; slot++) found(slot, at + slot);
    slot = base + step.block_size;
  }
}

inline float log2_factor(const Step &step, const Portion &portion) {
  return step.scale * kLog2E / (portion.chunks ? step.temperature[step.row_seq[portion.row]] : 1.f);
}

// Adds the scores of a tile to a line's running softmax, and replaces them by weights. `visible` holds -1 or 0 for each slot.
template <bool FULL, class E> inline void weigh(const float *scores, E *weights, int padded, const int32_t *visible, float factor,
                                                float *maximum, float *total, float *values, int padded_dim) {
  const auto shown = [&](int j) { return read<Ints>(visible + j); };
  Floats most = splat(kMasked);
  for (int j = 0; j < padded; j += kWidth) {
    const Floats s = read<Floats>(scores + j);
    most = larger(most, FULL ? s : shown(j) ? s : splat(kMasked));
  }
  const float before = *maximum, now = std::max(before, largest_of(most) * factor);
  const Floats by = splat(factor), least = splat(now);
  Floats sum = {};
  for (int j = 0; j < padded; j += kWidth) {
    Floats e = exp2_of(read<Floats>(scores + j) * by - least);
    if (!FULL) e = shown(j) ? e : Floats{};
    sum += e;
    store_panel(weights + j, e);
  }
  if (now != before) {
    const float decay = std::exp2(std::max(before - now, -126.f));
    *total *= decay;
    for (int d = 0; d < padded_dim; d += kWidth) write(values + d, read<Floats>(values + d) * decay);
    *maximum = now;
  }
  *total += sum_of(sum);
}

// Computes a portion by tiles of kTileSlots slots.
template <Format Q, Format C> struct Tiles {
#if defined(__AVX512BF16__)
  using E = std::conditional_t<Q == Format::bf16, uint16_t, float>;
#else
  using E = float;
#endif
  const Step &step;
  const Portion &portion;
  const State &state;
  const int per_row, lines, padded_lines, dim, first;  // first: slot of the first row
  E *queries, *keys, *values, *weights;
  float *scores;
  int32_t *own, *before;  // of each line: slot, and the last position before its window
  int lowest = INT_MAX, highest = INT_MIN, nearest = INT_MAX;  // of `before`; smallest position of a tile's valid slots
  int64_t *places, *next;  // of the slots of a tile and of the tile after it; -1 where there is none
  int32_t valid[kTileSlots];  // -1 or 0
  int32_t position[kTileSlots];  // of slots, under a window

  Tiles(const Step &step, const Portion &portion, const State &state)
      : step(step), portion(portion), state(state), per_row(step.lines_per_row()), lines(portion.rows * per_row),
        padded_lines((lines + kProductLines - 1) / kProductLines * kProductLines), dim(step.padded_dim()),
        first(step.row_slot[portion.row]) {
    constexpr size_t tile = kTileSlots, block = kBlockOfLines * tile;
    Arena arena(Arena::bytes<E>(padded_lines * dim) + 2 * Arena::bytes<E>(tile * dim) + Arena::bytes<E>(block) +
                Arena::bytes<float>(block) + 2 * Arena::bytes<int32_t>(padded_lines) + 2 * Arena::bytes<int64_t>(tile));
    queries = arena.take<E>(padded_lines * dim);
    keys = arena.take<E>(tile * dim), values = arena.take<E>(tile * dim), weights = arena.take<E>(block);
    scores = arena.take<float>(block);
    own = arena.take<int32_t>(padded_lines), before = arena.take<int32_t>(padded_lines);
    places = arena.take<int64_t>(tile), next = arena.take<int64_t>(tile);
    for (int line = 0; line < padded_lines; line++) {
      const bool used = line < lines;
      const int row = portion.row + (used ? line / per_row : 0);
      own[line] = used ? step.row_slot[row] : -1;
      if (step.window) {
        before[line] = step.position(step.row_seq[row], step.row_slot[row]) - step.window;
        lowest = std::min(lowest, before[line]), highest = std::max(highest, before[line]);
      }
      E *to = queries + int64_t(line) * dim;
      memset(to, 0, dim * sizeof(E));
      if (used) copy_query(row, portion.kv_head * per_row + line % per_row, to);
    }
  }

  void copy_query(int row, int head, E *to) {
    using T = typename Stored<Q>::Type;
    const T *from = static_cast<const T *>(step.q) + (int64_t(row) * step.heads + head) * step.head_dim;
    if constexpr (sizeof(E) == 2)
      memcpy(to, from, step.head_dim * 2);
    else
      for (int d = 0; d < step.head_dim; d += kWidth) write(to + d, Stored<Q>::load(from + d));
  }

  void run() {
    int count = find(portion.begin, places);
    for (int begin = portion.begin; begin < portion.end; begin += kTileSlots) {
      const int later = find(begin + kTileSlots, next);
      const int end = std::min(begin + kTileSlots, portion.end);
      if (count && (!step.window || place_in_window(begin, end) > lowest)) one_tile(begin, end, count);
      std::swap(places, next);
      count = later;
    }
  }

  // Finds the places of a tile's slots, which keep their order, holes too. Returns the number of valid slots.
  int find(int begin, int64_t *to) {
    int count = 0;
    std::fill_n(to, kTileSlots, int64_t(-1));
    each_valid(step, portion, begin, std::min(begin + kTileSlots, portion.end), [&](int slot, int64_t place) {
      to[slot - begin] = place, count++;
    });
    return count;
  }

  // Finds the positions of a tile's slots. Returns the largest of a valid one.
  int place_in_window(int begin, int end) {
    const int64_t row = int64_t(step.row_seq[portion.row]) * step.width;
    int largest = INT_MIN;
    nearest = INT_MAX;
    for (int slot = begin; slot < end;) {
      const int page = slot / step.block_size, base = page * step.block_size, at = step.page_position[row + page] - base;
      const int written = std::min(base + step.page_len[row + page], end);
      if (slot < written) nearest = std::min(nearest, at + slot), largest = std::max(largest, at + written - 1);
      for (const int stop = std::min(base + step.block_size, end); slot < stop; slot++) position[slot - begin] = at + slot;
    }
    return largest;
  }

  void one_tile(int begin, int end, int count) {
    const int padded = (end - begin + 31) / 32 * 32;
    const bool all = end - 1 <= first && (!step.window || nearest > highest), full = all && count == padded;
    for (int j = 0; j < padded; j++) valid[j] = places[j] >= 0 ? -1 : 0;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    if (lines <= kFewLines) {
      with_lines(lines, [&](auto few) {
        few_scores<few, C>(step, padded, places, next, queries, scores);
        weigh_lines(0, few, begin, padded, all, full);
        few_values<few, C>(step, padded, places, weights, state.values);
      });
      return;
    }
#endif
    pack<C>(step, padded, places, keys, values);
    for (int line = 0; line < padded_lines; line += kBlockOfLines) {
      const int block = std::min(kBlockOfLines, padded_lines - line);
      product<false>(block, padded / 16, dim, queries + int64_t(line) * dim, dim, keys, scores, kTileSlots);
      weigh_lines(line, block, begin, padded, all, full);
      product<true>(block, dim / 16, padded, weights, kTileSlots, values, state.values + int64_t(line) * dim, dim);
    }
  }

  // Makes weights of the scores of `count` lines.
  void weigh_lines(int from, int count, int begin, int padded, bool all, bool full) {
    const float factor = log2_factor(step, portion);
    for (int i = 0; i < count; i++) {
      const int line = from + i;
      float *row = scores + i * kTileSlots, *to = state.values + int64_t(line) * dim;
      E *weight = weights + i * kTileSlots;
      if (full) {
        weigh<true>(row, weight, padded, nullptr, factor, state.maximum + line, state.total + line, to, dim);
        continue;
      }
      int32_t visible[kTileSlots];
      for (int j = 0; j < padded && !all; j += kWidth) {
        const Ints slot = begin + j + read<Ints>(kCount);
        Ints shown = read<Ints>(valid + j) & (slot <= own[line]);
        if (step.window) shown = shown & (read<Ints>(position + j) > before[line]);
        write(visible + j, shown);
      }
      weigh<false>(row, weight, padded, all ? valid : visible, factor, state.maximum + line, state.total + line, to, dim);
    }
  }
};

template <Format Q, Format C> void attend_as(const Step &step, const Portion &portion, const State &state) {
  TileRegisters registers;
  Tiles<Q, C>(step, portion, state).run();
}

void attend(const Step &step, const Portion &portion, const State &state) {
  const bool fp8 = step.cache_format == Format::fp8;
  switch (step.format) {
    case Format::f32: return (fp8 ? attend_as<Format::f32, Format::fp8> : attend_as<Format::f32, Format::f32>)(step, portion, state);
    case Format::f16: return (fp8 ? attend_as<Format::f16, Format::fp8> : attend_as<Format::f16, Format::f16>)(step, portion, state);
    default: return (fp8 ? attend_as<Format::bf16, Format::fp8> : attend_as<Format::bf16, Format::bf16>)(step, portion, state);
  }
}

}  // namespace

#if defined(__AMX_BF16__)
const Kernel kAmx = {"amx", attend, multiply, kRowsOfCall, kOutputsOfCall, normalise, read_outputs, kRows, nullptr, kRecurrence};
#elif defined(__AVX512BF16__)
const Kernel kAvx512Bf16 = {"avx512_bf16", attend, multiply, kRowsOfCall, kOutputsOfCall, normalise, nullptr, kRows, &kPanels, kRecurrence};
#elif defined(__AVX2__)
const Kernel kAvx2 = {"avx2", attend, multiply, kRowsOfCall, kOutputsOfCall, normalise, nullptr, kRows, nullptr, kRecurrence};
#else
const Kernel kPortable = {"portable", attend, multiply, kRowsOfCall, kOutputsOfCall, normalise, nullptr, kRows, nullptr, kRecurrence};
#endif

}  // namespace chunkattn
