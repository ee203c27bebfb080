// Products of many rows with a weight as checkpoints have it, [out, in], whose outputs have the bits that few_rows.h gives them in one
// block. Rows lie in panels, and the weight is packed once for all of them. Compiled for processors that multiply pairs of bfloat16.
#pragma once
#include <algorithm>

#include "arena.h"
#include "packing.h"

namespace chunkattn {
namespace {

constexpr int kRowsOfPanel = 8, kOutputsAtOnce = 32;

// Packs rows, at most kRowsOfPanel: [in / 2][kRowsOfPanel] pairs, with zeros behind the last row.
void pack_panel(const uint16_t *const *rows, int count, int in, uint32_t *to) {
  for (int k = 0; k < in; k += 32, to += 16 * kRowsOfPanel) {
    __m512i lines[16];
    for (int r = 0; r < 16; r++) lines[r] = r < count ? _mm512_loadu_si512(rows[r] + k) : _mm512_setzero_si512();
    transpose(lines);
    for (int i = 0; i < 16; i++)
      _mm256_store_si256(reinterpret_cast<__m256i *>(to + i * kRowsOfPanel), _mm512_castsi512_si256(lines[i]));
  }
}

// Packs 16 outputs of a weight, [in / 2][16 outputs] pairs, with zeros behind `count` outputs.
inline void pack_outputs(const uint16_t *w, int count, int in, uint32_t *to) {
  for (int k = 0; k < in; k += 32, to += 256) {
    __m512i lines[16];
    for (int i = 0; i < 16; i++) lines[i] = i < count ? _mm512_loadu_si512(w + int64_t(i) * in + k) : _mm512_setzero_si512();
    transpose(lines);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 16, lines[i]);
  }
}

// Memory that is called into the cache meanwhile: `lines` cache lines for every 16 pairs.
struct Ahead {
  const char *next;
  int lines;
};

// Writes kOutputsAtOnce outputs, of which `count` are used, of the first `used` rows of a panel, at most ROWS.
template <int ROWS>
inline void multiply_panel(const uint32_t *rows, int used, int pairs, const uint32_t *weight, int count, float *out, int64_t stride, Ahead &ahead) {
  __m512 sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const uint32_t *more = weight + int64_t(pairs) * 16;
  for (int block = 0; block < pairs; block += 16) {
    for (int i = 0; i < ahead.lines; i++, ahead.next += 64) _mm_prefetch(ahead.next, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int pair = block; pair < block + 16; pair++) {
      const __m512bh left = (__m512bh)_mm512_load_si512(weight + int64_t(pair) * 16), right = (__m512bh)_mm512_load_si512(more + int64_t(pair) * 16);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(int32_t(rows[pair * kRowsOfPanel + r]));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, row);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, row);
      }
    }
  }
  const __mmask16 first = count >= 16 ? 0xffff : (1u << count) - 1, second = count >= 32 ? 0xffff : count > 16 ? (1u << (count - 16)) - 1 : 0;
  for (int r = 0; r < std::min(ROWS, used); r++, out += stride) {
    _mm512_mask_storeu_ps(out, first, sums[r][0]);
    _mm512_mask_storeu_ps(out + 16, second, sums[r][1]);
  }
}

// Computes the outputs [first, last) of all rows.
void multiply_panels(const RowProduct &given, const uint32_t *panels, int first, int last) {
  const int pairs = given.in / 2;
  const int64_t size = int64_t(pairs) * kRowsOfPanel;  // of a panel
  Arena arena(Arena::bytes<uint32_t>(size_t(pairs) * kOutputsAtOnce));
  uint32_t *weight = arena.take<uint32_t>(size_t(pairs) * kOutputsAtOnce);
  const int blocks = (given.rows + kRowsOfPanel - 1) / kRowsOfPanel * (pairs / 16);
  for (int output = first; output < last; output += kOutputsAtOnce) {
    const int count = std::min(kOutputsAtOnce, last - output);
    const uint16_t *w = given.weight + int64_t(output) * given.in;
    for (int at = 0; at < kOutputsAtOnce; at += 16) pack_outputs(w + int64_t(at) * given.in, count - at, given.in, weight + int64_t(pairs) * at);
    const bool more = last - output >= 2 * kOutputsAtOnce;
    Ahead ahead{reinterpret_cast<const char *>(w + int64_t(kOutputsAtOnce) * given.in), more ? (pairs + blocks - 1) / blocks * (kOutputsAtOnce * 4 / 64) : 0};
    for (int row = 0; row < given.rows; row += kRowsOfPanel) {
      const int used = std::min(kRowsOfPanel, given.rows - row);
      float *out = given.out + int64_t(row) * given.outputs + output;
      (used > kRowsOfPanel / 2 ? multiply_panel<kRowsOfPanel> : multiply_panel<kRowsOfPanel / 2>)(
          panels + row / kRowsOfPanel * size, used, pairs, weight, count, out, given.outputs, ahead);
    }
  }
}

const PanelKernel kPanels = {kRowsOfPanel, pack_panel, multiply_panels};

}  // namespace
}  // namespace chunkattn
