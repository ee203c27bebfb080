// Products of a few rows with a weight as checkpoints have it, [out, in]. They take as long as the weight takes to arrive from
// memory, so it is read once and packed in registers only. Compiled once per instruction set.
//
// Every output is a sum over the depth, in the order of XLA's own product, so that a row has the same bits beside few rows and
// beside many. The depth is cut into blocks, whose sums are added in order. A block adds pairs in ascending order, of each the
// second value first, as `vdpbf16ps` does, or value by value.
#pragma once
#include <algorithm>
#include <utility>

#include "products.h"

namespace chunkattn {
namespace {

#if defined(__AVX512BF16__)
constexpr int kLine = 64;  // bytes

// Outputs [output, output + 16) of ROWS rows from `row` on. `ahead`: bytes from a piece of the weight to the piece that is called
// from memory while it is in use; 0 calls none. Returns the row after them.
template <int ROWS> inline int some_rows(const FewRows &given, int row, int output, int64_t ahead) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  const char *next = reinterpret_cast<const char *>(w) + ahead;  // in the order of memory, unlike what is in use
  float *to = given.out + int64_t(row) * given.outputs + output;
  for (int begin = 0; begin < given.in; begin += given.block) {
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = _mm512_setzero_ps();
    for (int k = begin; k < std::min(begin + given.block, given.in); k += 32) {
      __m512i lines[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        lines[i] = _mm512_loadu_si512(w + int64_t(i) * given.in + k);
        if (ahead) _mm_prefetch(next + i * kLine, _MM_HINT_T1);
      }
      next += 16 * kLine;
      transpose(lines);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const int32_t pair = read<int32_t>(x + int64_t(r) * given.in + k + 2 * i);
          sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)lines[i], (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (int r = 0; r < ROWS; r++) {
      float *of = to + int64_t(r) * given.outputs;
      _mm512_storeu_ps(of, begin ? _mm512_loadu_ps(of) + sums[r] : sums[r]);
    }
  }
  return row + ROWS;
}

// Outputs [output, last), fewer than 16, of one row.
inline void rest(const FewRows &given, int row, int output, int last) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  __m512 total = _mm512_setzero_ps();
  for (int begin = 0; begin < given.in; begin += given.block) {
    __m512 sum = _mm512_setzero_ps();
    for (int k = begin; k < std::min(begin + given.block, given.in); k += 32) {
      __m512i lines[16];
      for (int i = 0; i < 16; i++)
        lines[i] = output + i < last ? _mm512_loadu_si512(w + int64_t(i) * given.in + k) : _mm512_setzero_si512();
      transpose(lines);
      for (int i = 0; i < 16; i++)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)lines[i], (__m512bh)_mm512_set1_epi32(read<int32_t>(x + k + 2 * i)));
    }
    total = begin ? total + sum : sum;
  }
  const __mmask16 used = (1u << (last - output)) - 1;
  _mm512_mask_storeu_ps(given.out + int64_t(row) * given.outputs + output, used, total);
}

void multiply(const FewRows &given, int first, int last) {
  const int64_t piece = int64_t(16) * given.in * 2;
  const char *begin = reinterpret_cast<const char *>(given.weight + int64_t(first) * given.in);
  if (last - first >= 16)
    for (int64_t at = 0; at < piece; at += kLine) _mm_prefetch(begin + at, _MM_HINT_T1);
  int output = first;
  for (; output + 16 <= last; output += 16)
    for (int row = 0; row < given.rows;) {
      const int left = given.rows - row;
      const int64_t ahead = row == 0 && output + 32 <= last ? piece : 0;
      row = left >= 16  ? some_rows<16>(given, row, output, ahead)
            : left >= 8 ? some_rows<8>(given, row, output, ahead)
            : left >= 4 ? some_rows<4>(given, row, output, ahead)
            : left >= 2 ? some_rows<2>(given, row, output, ahead)
                        : some_rows<1>(given, row, output, ahead);
    }
  for (int row = 0; row < given.rows && output < last; row++) rest(given, row, output, last);
}
#else
// Transposes a 16 x 16 matrix: log2(16) rounds that exchange halves of ever smaller blocks.
template <int HALF, size_t... I> inline void exchange(Words &a, Words &b, std::index_sequence<I...>) {
#ifdef __clang__
  const Words low = __builtin_shufflevector(a, b, (int(I) & HALF ? 16 + int(I) - HALF : int(I))...);
  b = __builtin_shufflevector(a, b, (int(I) & HALF ? 16 + int(I) : int(I) + HALF)...), a = low;
#else
  const Words low = __builtin_shuffle(a, b, Ints{(int(I) & HALF ? 16 + int(I) - HALF : int(I))...});
  b = __builtin_shuffle(a, b, Ints{(int(I) & HALF ? 16 + int(I) : int(I) + HALF)...}), a = low;
#endif
}
template <int HALF> inline void exchange(Words r[16]) {
  for (int i = 0; i < 16; i++)
    if (!(i & HALF)) exchange<HALF>(r[i], r[i + HALF], std::make_index_sequence<16>());
}
inline void transpose(Words r[16]) { exchange<1>(r), exchange<2>(r), exchange<4>(r), exchange<8>(r); }

inline float as_float(uint32_t bits) { return read<float>(&bits); }

// Outputs [output, output + count) of ROWS rows from `row` on; `count` is at most 16. Returns the row after them. A product of
// bfloat16 is exact in float32.
template <int ROWS> inline int some_rows(const FewRows &given, int row, int output, int count) {
  const uint16_t *x = given.x + int64_t(row) * given.in, *w = given.weight + int64_t(output) * given.in;
  Floats totals[ROWS];
  for (int begin = 0; begin < given.in; begin += given.block) {
    Floats sums[ROWS] = {};
    for (int k = begin; k < std::min(begin + given.block, given.in); k += 32) {
      Words lines[16];
      for (int i = 0; i < 16; i++) lines[i] = i < count ? read<Words>(w + int64_t(i) * given.in + k) : Words{};
      transpose(lines);
      for (int i = 0; i < 16; i++) {
        const Floats even = (Floats)(lines[i] << 16), odd = (Floats)(lines[i] & 0xffff0000u);
        for (int r = 0; r < ROWS; r++) {
          const uint32_t pair = read<uint32_t>(x + int64_t(r) * given.in + k + 2 * i);
          const float first = as_float(pair << 16), second = as_float(pair & 0xffff0000u);
          if (given.ascending)
            sums[r] += even * first, sums[r] += odd * second;
          else
            sums[r] += odd * second, sums[r] += even * first;
        }
      }
    }
    for (int r = 0; r < ROWS; r++) totals[r] = begin ? totals[r] + sums[r] : sums[r];
  }
  for (int r = 0; r < ROWS; r++)
    memcpy(given.out + int64_t(row + r) * given.outputs + output, &totals[r], count * sizeof(float));
  return row + ROWS;
}

void multiply(const FewRows &given, int first, int last) {
  for (int output = first; output < last; output += 16)
    for (int row = 0; row < given.rows;) {
      const int left = given.rows - row, count = std::min(16, last - output);
      row = left >= 4   ? some_rows<4>(given, row, output, count)
            : left >= 2 ? some_rows<2>(given, row, output, count)
                        : some_rows<1>(given, row, output, count);
    }
}
#endif

}  // namespace
}  // namespace chunkattn
