// Tiles of K and V, and rows of bfloat16, packed for products. Compiled once per instruction set.
#pragma once
#include <algorithm>

#include "vectors.h"

namespace chunkattn {
namespace {

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

// The pairs at the depths [begin, end) of the LANES rows from `row` on, side by side: [pairs][LANES]. Zeros follow the last row, and
// fill the last 32 of the depth.
template <int LANES> inline void pack_rows(const RowProduct &given, int row, int begin, int end, uint32_t *to) {
  const uint16_t *x = given.x + int64_t(row) * given.in;
  for (int k = begin; k < end; k += 32, to += 16 * LANES) {
    const __mmask32 used = end - k >= 32 ? ~0u : (1u << (end - k)) - 1;
    __m512i lines[16];
    for (int r = 0; r < 16; r++)
      lines[r] = r < std::min(LANES, given.rows - row) ? _mm512_maskz_loadu_epi16(used, x + int64_t(r) * given.in + k)
                                                       : _mm512_setzero_si512();
    transpose(lines);
    for (int i = 0; i < 16; i++)
      if constexpr (LANES == 16)
        _mm512_store_si512(to + i * LANES, lines[i]);
      else
        _mm256_store_si256(reinterpret_cast<__m256i *>(to + i * LANES), _mm512_castsi512_si256(lines[i]));
  }
}
#endif

// Packs K [depth: head][columns: slots] and V [depth: slots][columns: head] of a tile. Slots without a place become zero.
template <Format C> void pack(const Step &step, int padded, const int64_t *places, float *keys, float *values) {
  using T = typename Stored<C>::Type;
  const T *k = static_cast<const T *>(step.keys), *v = static_cast<const T *>(step.values);
  const int dim = step.head_dim, padded_dim = step.padded_dim();
  for (int slot = 0; slot < padded; slot += kWidth)
    for (int d = 0; d < padded_dim; d += kWidth) {
      Line lines[kWidth];
      for (int i = 0; i < kWidth; i++) {
        const int64_t place = d < dim ? places[slot + i] : -1;
        lines[i] = place >= 0 ? (Line)Stored<C>::load(k + place * dim + d) : Line{};
        write(values + int64_t(d / 16 * 16) * padded + (slot + i) * 16 + d % 16,
              place >= 0 ? Stored<C>::load(v + place * dim + d) : Floats{});
      }
      transpose(lines);
      float *key = keys + int64_t(slot / 16 * 16) * padded_dim + d * 16 + slot % 16;
      for (int i = 0; i < kWidth; i++) write(key + i * 16, lines[i]);
    }
}

}  // namespace
}  // namespace chunkattn
