// Products of a few rows with a weight as checkpoints have it, [out, in]. They take as long as the weight takes to arrive from
// memory, so it is read once, in order, and not packed. Compiled once per instruction set.
#pragma once
#include "products.h"

namespace chunkattn {
namespace {

constexpr int kRowsAtOnce = 8, kOutputsAtOnce = 2;
// Bytes by which the weight is called from memory ahead of its use. The processor's own prefetching keeps up with one row, and
// falls behind where several rows take time.
constexpr int kAhead = 8192;

// Outputs [first, last) of ROWS rows from `row` on.
template <int ROWS, int OUTPUTS> inline void dots(const FewRows &given, int row, int output) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  float *to = given.out + int64_t(row) * given.outputs + output;
#if defined(__AVX512BF16__)
  __m512 sums[ROWS][OUTPUTS];
  for (int r = 0; r < ROWS; r++)
    for (int o = 0; o < OUTPUTS; o++) sums[r][o] = _mm512_setzero_ps();
  for (int k = 0; k < given.in; k += 32) {
    __m512bh right[OUTPUTS];
#pragma GCC unroll 2
    for (int o = 0; o < OUTPUTS; o++) {
      const uint16_t *from = w + int64_t(o) * given.in + k;
      right[o] = (__m512bh)_mm512_loadu_si512(from);
      if (row == 0) _mm_prefetch(reinterpret_cast<const char *>(from) + kAhead, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(x + int64_t(r) * given.in + k);
#pragma GCC unroll 2
      for (int o = 0; o < OUTPUTS; o++) sums[r][o] = _mm512_dpbf16_ps(sums[r][o], left, right[o]);
    }
  }
#else
  Floats sums[ROWS][OUTPUTS] = {};
  for (int k = 0; k < given.in; k += 16) {
    Floats right[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) right[o] = Stored<Format::bf16>::load(w + int64_t(o) * given.in + k);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Floats left = Stored<Format::bf16>::load(x + int64_t(r) * given.in + k);
      for (int o = 0; o < OUTPUTS; o++) sums[r][o] += left * right[o];
    }
  }
#endif
  for (int r = 0; r < ROWS; r++)
    for (int o = 0; o < OUTPUTS; o++) to[int64_t(r) * given.outputs + o] = sum_of(sums[r][o]);
}

template <int OUTPUTS> inline void all_rows(const FewRows &given, int output) {
  int row = 0;
  for (; row + kRowsAtOnce <= given.rows; row += kRowsAtOnce) dots<kRowsAtOnce, OUTPUTS>(given, row, output);
  for (; row < given.rows; row++) dots<1, OUTPUTS>(given, row, output);
}

void multiply(const FewRows &given, int first, int last) {
  int output = first;
  for (; output + kOutputsAtOnce <= last; output += kOutputsAtOnce) all_rows<kOutputsAtOnce>(given, output);
  for (; output < last; output++) all_rows<1>(given, output);
}

}  // namespace
}  // namespace chunkattn
