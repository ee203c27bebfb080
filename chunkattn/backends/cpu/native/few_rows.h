// Products of a few rows with a weight as checkpoints have it, [out, in]. They take as long as the weight takes to arrive from
// memory, so it is read once and packed in registers only. Compiled once per instruction set.
//
// Every output is one sum over the depth in ascending order, with pairs of bfloat16 multiplied as `vdpbf16ps` does: the order of
// XLA's own product, so that a row has the same bits beside few rows and beside many.
#pragma once
#include "products.h"

namespace chunkattn {
namespace {

#if defined(__AVX512BF16__)
// Bytes by which a line of the weight is called from memory ahead of its use.
constexpr int kAhead = 512;

// Outputs [output, output + 16 * BLOCKS) of ROWS rows from `row` on.
template <int ROWS, int BLOCKS> inline void dots(const FewRows &given, int row, int output) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  __m512 sums[BLOCKS][ROWS];
  for (int b = 0; b < BLOCKS; b++)
    for (int r = 0; r < ROWS; r++) sums[b][r] = _mm512_setzero_ps();
  for (int k = 0; k < given.in; k += 32) {
    for (int b = 0; b < BLOCKS; b++) {
      __m512i lines[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const uint16_t *from = w + int64_t(16 * b + i) * given.in + k;
        lines[i] = _mm512_loadu_si512(from);
        _mm_prefetch(reinterpret_cast<const char *>(from) + kAhead, _MM_HINT_T0);
      }
      transpose(lines);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const int32_t pair = read<int32_t>(x + int64_t(r) * given.in + k + 2 * i);
          sums[b][r] = _mm512_dpbf16_ps(sums[b][r], (__m512bh)lines[i], (__m512bh)_mm512_set1_epi32(pair));
        }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int b = 0; b < BLOCKS; b++)
      _mm512_storeu_ps(given.out + int64_t(row + r) * given.outputs + output + 16 * b, sums[b][r]);
}

// Outputs [output, last), fewer than 16, of one row.
inline void rest(const FewRows &given, int row, int output, int last) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  __m512 sum = _mm512_setzero_ps();
  for (int k = 0; k < given.in; k += 32) {
    __m512i lines[16];
    for (int i = 0; i < 16; i++)
      lines[i] = output + i < last ? _mm512_loadu_si512(w + int64_t(i) * given.in + k) : _mm512_setzero_si512();
    transpose(lines);
    for (int i = 0; i < 16; i++)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)lines[i], (__m512bh)_mm512_set1_epi32(read<int32_t>(x + k + 2 * i)));
  }
  const __mmask16 used = (1u << (last - output)) - 1;
  _mm512_mask_storeu_ps(given.out + int64_t(row) * given.outputs + output, used, sum);
}

template <int ROWS> inline void some_rows(const FewRows &given, int row, int output, int last) {
  constexpr int kBlocks = ROWS > 4 ? 1 : 2;
  for (; output + 16 * kBlocks <= last; output += 16 * kBlocks) dots<ROWS, kBlocks>(given, row, output);
  for (; output + 16 <= last; output += 16) dots<ROWS, 1>(given, row, output);
  for (int r = row; r < row + ROWS && output < last; r++) rest(given, r, output, last);
}

void multiply(const FewRows &given, int first, int last) {
  for (int row = 0; row < given.rows;) {
    const int left = given.rows - row;
    if (left >= 16) some_rows<16>(given, row, first, last), row += 16;
    else if (left >= 8) some_rows<8>(given, row, first, last), row += 8;
    else if (left >= 4) some_rows<4>(given, row, first, last), row += 4;
    else if (left >= 2) some_rows<2>(given, row, first, last), row += 2;
    else some_rows<1>(given, row, first, last), row += 1;
  }
}
#else
void multiply(const FewRows &given, int first, int last) {
  for (int row = 0; row < given.rows; row++)
    for (int output = first; output < last; output++) {
      const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
      Floats sum = {};
      for (int k = 0; k < given.in; k += 16) sum += Stored<Format::bf16>::load(x + k) * Stored<Format::bf16>::load(w + k);
      given.out[int64_t(row) * given.outputs + output] = sum_of(sum);
    }
}
#endif

}  // namespace
}  // namespace chunkattn
