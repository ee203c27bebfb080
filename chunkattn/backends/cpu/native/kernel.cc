// The kernels of one instruction set, chosen by the compiler's flags. Only the `Kernel` at the end leaves this file.
//
// Most items multiply packed tiles of K and V; rows that are alone, mostly decodes, read the pool directly.
// Source: FlashAttention, arXiv:2205.14135; the weighing: APE, arXiv:2502.05431.
#include <algorithm>
#include <climits>
#include <cmath>
#include <vector>

#include "few_rows.h"
#include "products.h"

namespace chunkattn {
namespace {

constexpr float kMasked = -1e30f;
constexpr float kLog2E = 1.44269504f;
constexpr int kBlockOfLines = 32;  // lines whose scores are held at a time

enum class Part { all, chunks, others };  // of the visible slots

struct Range {
  int begin, end;
};

// What an item sees.
struct View {
  int sequence, first, last, least_start, most_start, prefix_end, window;
  Range chunks;

  View(const Step &step, const Item &item) {
    const int32_t *slot = step.row_slot + item.row, *start = step.row_start + item.row;
    sequence = step.row_seq[item.row];
    first = slot[0], last = slot[item.rows - 1];
    least_start = *std::min_element(start, start + item.rows), most_start = *std::max_element(start, start + item.rows);
    prefix_end = step.window ? 0 : step.prefix_end[sequence];
    window = step.window ? step.window : INT_MAX;
    chunks = item.weighed ? Range{step.prefix_end[sequence], step.question_start[sequence]} : Range{0, 0};
  }

  // The slots that some row of the item sees, in at most two ranges rounded out to multiples of `unit`.
  int ranges(Part part, int unit, Range *found) const {
    const auto down = [&](int slot) { return slot / unit * unit; };
    const auto up = [&](int slot) { return (slot + unit - 1) / unit * unit; };
    const int end = last + 1;
    if (window != INT_MAX) {
      found[0] = {down(std::max(0, first - window + 1)), end};
      return 1;
    }
    if (part == Part::chunks) {
      found[0] = {down(chunks.begin), std::min(up(chunks.end), end)};
      return 1;
    }
    const int gap = part == Part::others ? chunks.begin : prefix_end;
    const int again = part == Part::others ? chunks.end : least_start;
    if (again <= gap) {
      found[0] = {0, end};
      return 1;
    }
    found[0] = {0, std::min(up(gap), end)};
    found[1] = {std::max(down(again), found[0].end), end};
    return 2;
  }
};

// Calls `found(slot, place)` for the valid slots of `range`, in order. A place in a pool counts a head's vectors.
template <class Found> inline void each_valid(const Step &step, const Item &item, const View &view, Range range, Found found) {
  const int64_t row = int64_t(view.sequence) * step.width;
  for (int slot = range.begin; slot < range.end;) {
    const int page = slot / step.block_size, base = page * step.block_size;
    const int end = std::min(base + std::min(step.page_len[row + page], step.block_size), range.end);
    const int64_t at = (int64_t(step.block_tables[row + page]) * step.kv_heads + item.kv_head) * step.block_size - base;
    for (; slot < end; slot++) found(slot, at + slot);
    slot = base + step.block_size;
  }
}

inline float log2_factor(const Step &step, const View &view, Part part) {
  return step.scale * kLog2E / (part == Part::chunks ? step.temperature[view.sequence] : 1.f);
}

// Memory of a thread, handed out in pieces aligned to cache lines.
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

inline void store_panel(float *to, Floats x) { write(to, x); }
#if defined(__AVX512BF16__)
inline void store_panel(uint16_t *to, Floats x) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
  memcpy(to, &rounded, sizeof rounded);
}

// 32 values of a head as bfloat16; those beyond `count` are zero.
template <Format C> inline __m512i load_bf16(const typename Stored<C>::Type *from, int count) {
  if constexpr (C == Format::bf16) return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1, from);
  const __m512 low = Stored<C>::load(from), high = count > 16 ? Stored<C>::load(from + 16) : Floats{};
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

inline void transpose(__m512i r[16]) {  // a 16 x 16 matrix of pairs
  __m512i t[16];
  for (int i = 0; i < 8; i++)
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88), r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88), r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

template <Format C> void pack(const Step &step, int padded, const int64_t *places, uint16_t *keys, uint16_t *values) {
  using T = typename Stored<C>::Type;
  const T *k = static_cast<const T *>(step.keys), *v = static_cast<const T *>(step.values);
  const int dim = step.head_dim, padded_dim = step.padded_dim();
  for (int first = 0; first < padded; first += 16)
    for (int d = 0; d < padded_dim; d += 32) {
      __m512i lines[16];
      for (int i = 0; i < 16; i++)
        lines[i] = places[first + i] >= 0 ? load_bf16<C>(k + places[first + i] * dim + d, dim - d) : _mm512_setzero_si512();
      transpose(lines);
      uint16_t *to = keys + int64_t(first) * padded_dim + d * 16;
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 32, lines[i]);
    }
  alignas(64) uint16_t of_low[32], of_high[32];
  for (int i = 0; i < 16; i++)
    of_low[2 * i] = i, of_low[2 * i + 1] = 32 + i, of_high[2 * i] = 16 + i, of_high[2 * i + 1] = 48 + i;
  const __m512i low = _mm512_load_si512(of_low), high = _mm512_load_si512(of_high), zero = _mm512_setzero_si512();
  for (int slot = 0; slot < padded; slot += 2)
    for (int d = 0; d < padded_dim; d += 32) {
      const __m512i x = places[slot] >= 0 ? load_bf16<C>(v + places[slot] * dim + d, dim - d) : zero;
      const __m512i y = places[slot + 1] >= 0 ? load_bf16<C>(v + places[slot + 1] * dim + d, dim - d) : zero;
      uint16_t *to = values + int64_t(d) * padded + slot * 16;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_storeu_si512(to + int64_t(16) * padded, _mm512_permutex2var_epi16(x, high, y));
    }
}
#endif

// Packs K [depth: head][columns: slots] and V [depth: slots][columns: head] of a tile. Slots without a place become zero.
template <Format C> void pack(const Step &step, int padded, const int64_t *places, float *keys, float *values) {
  using T = typename Stored<C>::Type;
  const T *k = static_cast<const T *>(step.keys), *v = static_cast<const T *>(step.values);
  const int dim = step.head_dim, padded_dim = step.padded_dim();
  for (int slot = 0; slot < padded; slot++) {
    float *key = keys + int64_t(slot / 16 * 16) * padded_dim + slot % 16;
    for (int d = 0; d < padded_dim; d += 16) {
      const bool inside = places[slot] >= 0 && d < dim;
      const Floats x = inside ? Stored<C>::load(k + places[slot] * dim + d) : Floats{};
      for (int i = 0; i < 16; i++) key[(d + i) * 16] = x[i];
      write(values + int64_t(d) * padded + slot * 16, inside ? Stored<C>::load(v + places[slot] * dim + d) : Floats{});
    }
  }
}

// Adds the scores of a tile to a line's running softmax, and replaces them by weights.
template <bool FULL, class E> inline void weigh(const float *scores, E *weights, int padded, const Ints *visible, float factor,
                                                float *maximum, float *total, float *values, int padded_dim) {
  Floats most = splat(kMasked);
  for (int j = 0; j < padded; j += 16) {
    const Floats s = read<Floats>(scores + j);
    most = larger(most, FULL ? s : visible[j / 16] ? s : splat(kMasked));
  }
  const float before = *maximum, now = std::max(before, largest_of(most) * factor);
  const Floats by = splat(factor), least = splat(now);
  Floats sum = {};
  for (int j = 0; j < padded; j += 16) {
    Floats e = exp2_of(read<Floats>(scores + j) * by - least);
    if (!FULL) e = visible[j / 16] ? e : Floats{};
    sum += e;
    store_panel(weights + j, e);
  }
  if (now != before) {
    const float decay = std::exp2(std::max(before - now, -126.f));
    *total *= decay;
    for (int d = 0; d < padded_dim; d += 16) write(values + d, read<Floats>(values + d) * decay);
    *maximum = now;
  }
  *total += sum_of(sum);
}

// Computes items by tiles of kTileSlots slots.
template <Format Q, Format C> struct Tiles {
#if defined(__AVX512BF16__)
  using E = std::conditional_t<Q == Format::bf16, uint16_t, float>;
#else
  using E = float;
#endif
  const Step &step;
  const Item &item;
  const View view;
  const int per_row, lines, padded_lines, dim;
  E *queries, *keys, *values, *weights;
  float *scores;
  int32_t *own, *start;
  int64_t *places;
  Ints valid[kTileSlots / 16];

  Tiles(const Step &step, const Item &item)
      : step(step), item(item), view(step, item), per_row(step.lines_per_row()), lines(item.rows * per_row),
        padded_lines((lines + kLineGranule - 1) / kLineGranule * kLineGranule), dim(step.padded_dim()) {
    constexpr size_t tile = kTileSlots, block = kBlockOfLines * tile;
    Arena arena(Arena::bytes<E>(padded_lines * dim) + 2 * Arena::bytes<E>(tile * dim) + Arena::bytes<E>(block) +
                Arena::bytes<float>(block) + 2 * Arena::bytes<int32_t>(padded_lines) + Arena::bytes<int64_t>(tile));
    queries = arena.take<E>(padded_lines * dim);
    keys = arena.take<E>(tile * dim), values = arena.take<E>(tile * dim), weights = arena.take<E>(block);
    scores = arena.take<float>(block);
    own = arena.take<int32_t>(padded_lines), start = arena.take<int32_t>(padded_lines);
    places = arena.take<int64_t>(tile);
    for (int line = 0; line < padded_lines; line++) {
      const bool used = line < lines;
      const int row = item.row + (used ? line / per_row : 0);
      own[line] = used ? step.row_slot[row] : -1, start[line] = used ? step.row_start[row] : 0;
      E *to = queries + int64_t(line) * dim;
      memset(to, 0, dim * sizeof(E));
      if (used) copy_query(row, item.kv_head * per_row + line % per_row, to);
    }
  }

  void copy_query(int row, int head, E *to) {
    using T = typename Stored<Q>::Type;
    const T *from = static_cast<const T *>(step.q) + (int64_t(row) * step.heads + head) * step.head_dim;
    if constexpr (sizeof(E) == 2)
      memcpy(to, from, step.head_dim * 2);
    else
      for (int d = 0; d < step.head_dim; d += 16) write(to + d, Stored<Q>::load(from + d));
  }

  void run(int split, Part part, State &state) {
    Range ranges[2];
    const int count = view.ranges(part, kTileSlots, ranges);
    for (int r = 0; r < count; r++) {
      const int end = std::min(ranges[r].end, (split + 1) * kSplitSlots);
      for (int tile = std::max(ranges[r].begin, split * kSplitSlots); tile < end; tile += kTileSlots)
        one_tile({tile, std::min(tile + kTileSlots, end)}, part, state);
    }
  }

  // Slots keep their places in a tile, holes too: where a chunk begins on a page, its sums have the same order in any company.
  void one_tile(Range range, Part part, State &state) {
    const int padded = (range.end - range.begin + 31) / 32 * 32;
    std::fill_n(places, padded, int64_t(-1));
    int count = 0;
    each_valid(step, item, view, range, [&](int slot, int64_t place) { places[slot - range.begin] = place, count++; });
    if (!count) return;
    pack<C>(step, padded, places, keys, values);
    const float factor = log2_factor(step, view, part);
    const bool all = seen_by_all(range, part), full = all && count == padded;
    for (int j = 0; j < padded; j++) valid[j / 16][j % 16] = places[j] >= 0 ? -1 : 0;
    for (int first = 0; first < padded_lines; first += kBlockOfLines) {
      const int block = std::min(kBlockOfLines, padded_lines - first);
      product<false>(block, padded / 16, dim, queries + int64_t(first) * dim, dim, keys, scores, kTileSlots);
      for (int i = 0; i < block; i++) {
        const int line = first + i;
        float *row = scores + i * kTileSlots, *to = state.values + int64_t(line) * dim;
        E *weight = weights + i * kTileSlots;
        if (full) {
          weigh<true>(row, weight, padded, nullptr, factor, state.maximum + line, state.total + line, to, dim);
          continue;
        }
        Ints visible[kTileSlots / 16];
        for (int j = 0; j < padded / 16 && !all; j++) visible[j] = valid[j] & seen(range.begin + 16 * j, line, part);
        weigh<false>(row, weight, padded, all ? valid : visible, factor, state.maximum + line, state.total + line, to, dim);
      }
      product<true>(block, dim / 16, padded, weights, kTileSlots, values, state.values + int64_t(first) * dim, dim);
    }
  }

  // Whether every line sees all slots of a range.
  bool seen_by_all(Range range, Part part) const {
    const int first = range.begin, last = range.end - 1;
    const bool by_chunks = part == Part::all || (part == Part::chunks ? first >= view.chunks.begin && last < view.chunks.end
                                                                      : last < view.chunks.begin || first >= view.chunks.end);
    return by_chunks && last <= view.first && first > view.last - view.window &&
           (last < view.prefix_end || first >= view.most_start || view.most_start <= view.prefix_end);
  }

  // Which of 16 slots a line sees.
  Ints seen(int first, int line, Part part) const {
    const Ints slot = first + Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Ints found = (slot <= own[line]) & (slot > own[line] - view.window);
    found &= (slot < view.prefix_end) | (slot >= start[line]);
    if (part == Part::all) return found;
    const Ints chunk = (slot >= view.chunks.begin) & (slot < view.chunks.end);
    return found & (part == Part::chunks ? chunk : ~chunk);
  }
};

// Computes rows that are alone from the pool, without packing.
template <Format Q, Format C> struct Decode {
  static constexpr int kSlots = 64;
  using T = typename Stored<C>::Type;
  const Step &step;
  const Item &item;
  const View view;
  const int per_row, head_dim, dim;
  const T *keys, *values;
  // Slots of one product. Those of the next one are known early, for their keys are called from memory while this one's
  // values are added.
  struct Slots {
    int count = 0;
    int64_t places[kSlots];
  } slots[2];
  alignas(64) float queries[kMaxHeadDim];
  alignas(64) float scores[kSlots];

  Decode(const Step &step, const Item &item)
      : step(step), item(item), view(step, item), per_row(step.lines_per_row()), head_dim(step.head_dim),
        dim(step.padded_dim()), keys(static_cast<const T *>(step.keys)), values(static_cast<const T *>(step.values)) {}

  void run(int split, Part part, State &state) {
    Range ranges[2];
    const int count = view.ranges(part, 1, ranges);
    const float factor = log2_factor(step, view, part);
    Slots *now = &slots[0], *next = &slots[1];
    now->count = 0;
    for (int r = 0; r < count; r++) {
      const int end = std::min(ranges[r].end, (split + 1) * kSplitSlots);
      for (int slot = std::max(ranges[r].begin, split * kSplitSlots); slot < end;) {
        const int until = std::min((slot / kSlots + 1) * kSlots, end);
        next->count = 0;
        each_valid(step, item, view, {slot, until}, [&](int, int64_t place) { next->places[next->count++] = place; });
        slot = until;
        if (!next->count) continue;
        if (now->count) some_slots(*now, next, factor, state);
        std::swap(now, next);
      }
    }
    if (now->count) some_slots(*now, nullptr, factor, state);
  }

  void some_slots(const Slots &now, const Slots *next, float factor, State &state) {
    const int count = now.count, padded = (count + 15) / 16 * 16;
    for (int line = 0; line < per_row; line++) {
      const int64_t row = (int64_t(item.row) * step.heads + item.kv_head * per_row + line) * head_dim;
      const auto *query = static_cast<const typename Stored<Q>::Type *>(step.q) + row;
      for (int i = 0; i < kSlots; i += 16) write(scores + i, splat(kMasked));
      dots(query, now, line == 0);
      float *to = state.values + int64_t(line) * dim;
      Floats most = splat(kMasked);
      for (int j = 0; j < padded; j += 16) most = larger(most, read<Floats>(scores + j));
      const float before = state.maximum[line], maximum = std::max(before, largest_of(most) * factor);
      Floats sum = {};
      for (int j = 0; j < padded; j += 16) {
        const Floats s = read<Floats>(scores + j), e = exp2_of(s * factor - maximum);
        const Floats weight = s > kMasked ? e : Floats{};
        sum += weight;
        write(scores + j, weight);
      }
      const float decay = maximum == before ? 1.f : std::exp2(std::max(before - maximum, -126.f));
      state.maximum[line] = maximum;
      state.total[line] = state.total[line] * decay + sum_of(sum);
      int d = 0;
      for (; d + 128 <= head_dim; d += 128) add<8>(to + d, now, d, decay, line == 0 ? next : nullptr);
      for (; d + 64 <= head_dim; d += 64) add<4>(to + d, now, d, decay, line == 0 ? next : nullptr);
      for (; d < head_dim; d += 16) add<1>(to + d, now, d, decay, line == 0 ? next : nullptr);
    }
  }

  // Calls `count` elements of a head's vector from memory.
  static void ahead(const T *from, int count) {
    for (int d = 0; d < count; d += 64 / int(sizeof(T))) __builtin_prefetch(from + d);
  }

  void dots(const typename Stored<Q>::Type *query, const Slots &now, bool first) {
    const int count = now.count;
#if defined(__AVX512BF16__)
    if constexpr (Q == Format::bf16) {
      for (int j = 0; j < count; j++) {
        if (first) ahead(values + now.places[j] * head_dim, head_dim);
        __m512 sum = _mm512_setzero_ps();
        for (int d = 0; d < head_dim; d += 32)
          sum = _mm512_dpbf16_ps(sum, (__m512bh)load_bf16<Q>(query + d, head_dim - d),
                                 (__m512bh)load_bf16<C>(keys + now.places[j] * head_dim + d, head_dim - d));
        scores[j] = sum_of(sum);
      }
      return;
    }
#endif
    for (int d = 0; d < head_dim; d += 16) write(queries + d, Stored<Q>::load(query + d));
    for (int j = 0; j < count; j++) {
      if (first) ahead(values + now.places[j] * head_dim, head_dim);
      const T *key = keys + now.places[j] * head_dim;
      Floats sum = {};
      for (int d = 0; d < head_dim; d += 16) sum += read<Floats>(queries + d) * Stored<C>::load(key + d);
      scores[j] = sum_of(sum);
    }
  }

  // Adds N * 16 elements of the weighted values, from element `at` on.
  template <int N> void add(float *to, const Slots &now, int at, float decay, const Slots *next) {
    Floats sums[N];
    for (int i = 0; i < N; i++) sums[i] = read<Floats>(to + 16 * i) * decay;
    for (int j = 0; j < now.count; j++) {
      if (next && j < next->count) ahead(keys + next->places[j] * head_dim + at, 16 * N);
      const T *value = values + now.places[j] * head_dim + at;
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) sums[i] += scores[j] * Stored<C>::load(value + 16 * i);
    }
    for (int i = 0; i < N; i++) write(to + 16 * i, sums[i]);
  }
};

template <class Computed> void both_parts(Computed &&of, const Item &item, int split, State *states) {
  of.run(split, item.weighed ? Part::others : Part::all, states[0]);
  if (item.weighed) of.run(split, Part::chunks, states[1]);
}

template <Format Q, Format C> void attend_as(const Step &step, const Item &item, int split, State *states) {
  if (item.alone) return both_parts(Decode<Q, C>(step, item), item, split, states);
  TileRegisters registers;
  both_parts(Tiles<Q, C>(step, item), item, split, states);
}

void attend(const Step &step, const Item &item, int split, State *states) {
  const bool fp8 = step.cache_format == Format::fp8;
  switch (step.format) {
    case Format::f32: return (fp8 ? attend_as<Format::f32, Format::fp8> : attend_as<Format::f32, Format::f32>)(step, item, split, states);
    case Format::f16: return (fp8 ? attend_as<Format::f16, Format::fp8> : attend_as<Format::f16, Format::f16>)(step, item, split, states);
    default: return (fp8 ? attend_as<Format::bf16, Format::fp8> : attend_as<Format::bf16, Format::bf16>)(step, item, split, states);
  }
}

}  // namespace

#if defined(__AMX_BF16__)
const Kernel kAmx = {"amx", attend, multiply};
#elif defined(__AVX512BF16__)
const Kernel kAvx512Bf16 = {"avx512_bf16", attend, multiply};
#elif defined(__AVX2__)
const Kernel kAvx2 = {"avx2", attend, multiply};
#else
const Kernel kPortable = {"portable", attend, multiply};
#endif

}  // namespace chunkattn
