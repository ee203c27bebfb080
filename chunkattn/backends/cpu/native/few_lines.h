// Attention of few lines, mostly decodes: products that take a tile's K and V from the pool, without packing. Their sums have the
// order of `product`. Compiled once per instruction set.
#pragma once
#include <algorithm>
#include <type_traits>

#include "packing.h"
#include "products.h"

namespace chunkattn {
namespace {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int kFewLines = 8;

template <Format C> inline __m512i load_unit(const typename Stored<C>::Type *from, int count, uint16_t) { return load_bf16<C>(from, count); }
template <Format C> inline __m512i load_unit(const typename Stored<C>::Type *from, int count, float) {
  return count > 0 ? (__m512i)Stored<C>::load(from) : _mm512_setzero_si512();
}
inline __m512 add_product(__m512 sum, const uint16_t *left, __m512i right) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(read<int32_t>(left)), (__m512bh)right);
}
inline __m512 add_product(__m512 sum, const float *left, __m512i right) { return (__m512)((Floats)sum + *left * (Floats)right); }

// Whether 16 slots lie one behind the other.
inline bool in_a_row(const int64_t *places) {
  bool all = places[0] >= 0;
  for (int i = 1; i < 16; i++) all &= places[i] == places[0] + i;
  return all;
}

// Scores [LINES, kTileSlots] of queries [LINES, dim] with the first `padded` slots of a tile. Meanwhile the values of these slots
// are called from memory, and the keys of those kAhead further, perhaps in the tile at `next`.
template <int LINES, Format C, class E> inline void few_scores(const Step &step, int padded, const int64_t *places,
                                                               const int64_t *next, const E *queries, float *scores) {
  constexpr int kAhead = 32;
  constexpr int kUnit = 64 / sizeof(E), kPair = kUnit / 16;  // values of a register, and of a lane
  using T = typename Stored<C>::Type;
  constexpr int kLines = 16 * kUnit * sizeof(T) / 64;  // of the cache, in a unit of 16 slots
  const T *keys = static_cast<const T *>(step.keys), *values = static_cast<const T *>(step.values);
  const int dim = step.head_dim, padded_dim = step.padded_dim();
  for (int first = 0; first < padded; first += 16) {
    const int64_t *of = places + first;
    const int64_t *ahead = first + kAhead < padded ? of + kAhead : next + (first + kAhead - padded);
    const int64_t begin = std::max<int64_t>(of[0], 0) * dim, later = std::max<int64_t>(ahead[0], 0) * dim;
    const auto score = [&](auto whole) {
      __m512 sums[LINES];
      for (int i = 0; i < LINES; i++) sums[i] = _mm512_setzero_ps();
      for (int d = 0; d < padded_dim; d += kUnit) {
        __m512i slots[16];
        const T *from = keys + begin + d;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          if constexpr (whole)
            slots[i] = load_unit<C>(from, dim - d, E()), from += dim;
          else
            slots[i] = of[i] >= 0 ? load_unit<C>(keys + of[i] * dim + d, dim - d, E()) : _mm512_setzero_si512();
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLines; i++) {
          __builtin_prefetch(reinterpret_cast<const char *>(values + begin + d * 16) + 64 * i, 0, 2);
          __builtin_prefetch(reinterpret_cast<const char *>(keys + later + d * 16) + 64 * i, 0, 2);
        }
        transpose(slots);
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++)
#pragma GCC unroll 8
          for (int i = 0; i < LINES; i++) sums[i] = add_product(sums[i], queries + i * padded_dim + d + k * kPair, slots[k]);
      }
      for (int i = 0; i < LINES; i++) _mm512_storeu_ps(scores + i * kTileSlots + first, sums[i]);
    };
    if (in_a_row(of))
      score(std::true_type());
    else
      score(std::false_type());
  }
}

// Adds to the values [LINES, dim] of the elements [at, at + 32 * BLOCKS) the values of a tile by their weights.
template <int LINES, int BLOCKS, Format C, class E> inline void few_values(const Step &step, int padded, const int64_t *places,
                                                                           const E *weights, int at, float *to) {
  using T = typename Stored<C>::Type;
  const T *values = static_cast<const T *>(step.values);
  const int dim = step.head_dim, padded_dim = step.padded_dim();
  __m512 sums[LINES][2 * BLOCKS];
  for (int i = 0; i < LINES; i++)
    for (int b = 0; b < 2 * BLOCKS; b++) sums[i][b] = _mm512_loadu_ps(to + i * padded_dim + at + 16 * b);
  if constexpr (sizeof(E) == 2) {
    alignas(64) uint16_t of_low[32], of_high[32];
    for (int i = 0; i < 16; i++)
      of_low[2 * i] = i, of_low[2 * i + 1] = 32 + i, of_high[2 * i] = 16 + i, of_high[2 * i + 1] = 48 + i;
    const __m512i low = _mm512_load_si512(of_low), high = _mm512_load_si512(of_high), zero = _mm512_setzero_si512();
    for (int slot = 0; slot < padded; slot += 2) {
      const int64_t one = places[slot], two = places[slot + 1];
      if (one < 0 && two < 0) continue;
#pragma GCC unroll 4
      for (int b = 0; b < BLOCKS; b++) {
        const int d = at + 32 * b;
        const __m512i x = one >= 0 ? load_bf16<C>(values + one * dim + d, dim - d) : zero;
        const __m512i y = two >= 0 ? load_bf16<C>(values + two * dim + d, dim - d) : zero;
        const __m512i left = _mm512_permutex2var_epi16(x, low, y), right = _mm512_permutex2var_epi16(x, high, y);
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) {
          sums[i][2 * b] = add_product(sums[i][2 * b], weights + i * kTileSlots + slot, left);
          sums[i][2 * b + 1] = add_product(sums[i][2 * b + 1], weights + i * kTileSlots + slot, right);
        }
      }
    }
  } else {
    for (int slot = 0; slot < padded; slot++) {
      if (places[slot] < 0) continue;
      for (int b = 0; b < 2 * BLOCKS; b++) {
        const int d = at + 16 * b;
        const __m512i x = load_unit<C>(values + places[slot] * dim + d, dim - d, E());
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) sums[i][b] = add_product(sums[i][b], weights + i * kTileSlots + slot, x);
      }
    }
  }
  for (int i = 0; i < LINES; i++)
    for (int b = 0; b < 2 * BLOCKS; b++) _mm512_storeu_ps(to + i * padded_dim + at + 16 * b, sums[i][b]);
}

template <int LINES, Format C, class E> inline void few_values(const Step &step, int padded, const int64_t *places,
                                                               const E *weights, float *to) {
  constexpr int kBlocks = LINES > 4 ? 1 : LINES > 2 ? 2 : 4;
  int d = 0;
  for (; d + 32 * kBlocks <= step.padded_dim(); d += 32 * kBlocks)
    few_values<LINES, kBlocks, C>(step, padded, places, weights, d, to);
  for (; d < step.padded_dim(); d += 32) few_values<LINES, 1, C>(step, padded, places, weights, d, to);
}

// Calls `work` with the number of lines, at most kFewLines, as a constant.
template <class Work> inline void with_lines(int lines, const Work &work) {
  switch (lines) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
    case 5: return work(std::integral_constant<int, 5>());
    case 6: return work(std::integral_constant<int, 6>());
    case 7: return work(std::integral_constant<int, 7>());
    default: return work(std::integral_constant<int, 8>());
  }
}
#endif

}  // namespace
}  // namespace chunkattn
