// Products of a few rows with a weight as checkpoints have it, [out, in]. They take as long as the weight takes to arrive from
// memory, so it is read once, and packed in registers or not at all. Compiled once per instruction set.
//
// Every output is a sum over the depth, in the order of XLA's own product, so that a row has the same bits beside few rows and
// beside many. The depth is cut into blocks, whose sums are added in order. A block adds pairs in ascending order, of each the
// second value first, as `vdpbf16ps` does, or value by value.
#pragma once
#include <algorithm>

#include "arena.h"
#include "packing.h"
#include "products.h"

namespace chunkattn {
namespace {

// More rows are never asked for, and outputs have no limit.
constexpr int kRowsOfCall = 16, kOutputsOfCall = 1 << 30;

#if defined(__AVX512BF16__)
constexpr int kLine = 64;  // bytes

// Outputs [output, output + 16) of ROWS rows from `row` on. `ahead`: bytes from a piece of the weight to the piece that is called
// from memory while it is in use; 0 calls none. Returns the row after them.
template <int ROWS> inline int some_rows(const RowProduct &given, int row, int output, int64_t ahead) {
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

inline __m512 add_pair(__m512 sum, __m512i rows, int32_t pair) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)rows);
}
inline __m256 add_pair(__m256 sum, __m256i rows, int32_t pair) {
  return _mm256_dpbf16_ps(sum, (__m256bh)_mm256_set1_epi32(pair), (__m256bh)rows);
}

// Outputs [output, output + 16) of the LANES rows from `row` on, which have a lane each: the weight needs no packing.
template <int LANES> inline void rows_in_lanes(const RowProduct &given, const uint32_t *rows, int row, int output, int64_t ahead) {
  using Sum = std::conditional_t<LANES == 16, __m512, __m256>;
  using Pairs = std::conditional_t<LANES == 16, __m512i, __m256i>;
  const uint16_t *w = given.weight + int64_t(output) * given.in;
  const char *next = reinterpret_cast<const char *>(w) + ahead;
  for (int begin = 0; begin < given.in; begin += given.block) {
    Sum sums[16] = {};
    for (int k = begin; k < std::min(begin + given.block, given.in); k += 32) {
      if (ahead)
        for (int i = 0; i < 16; i++, next += kLine) _mm_prefetch(next, _MM_HINT_T1);
      for (int pair = k; pair < k + 32; pair += 2) {
        const Pairs right = read<Pairs>(rows + int64_t(pair) / 2 * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sums[i] = add_pair(sums[i], right, read<int32_t>(w + int64_t(i) * given.in + pair));
      }
    }
    __m512i lines[16];
    for (int i = 0; i < 16; i++)
      if constexpr (LANES == 16)
        lines[i] = _mm512_castps_si512(sums[i]);
      else
        lines[i] = _mm512_castps_si512(_mm512_castps256_ps512(sums[i]));
    transpose(lines);
    for (int r = 0; r < std::min(LANES, given.rows - row); r++) {
      float *to = given.out + int64_t(row + r) * given.outputs + output;
      const __m512 sum = _mm512_castsi512_ps(lines[r]);
      _mm512_storeu_ps(to, begin ? _mm512_loadu_ps(to) + sum : sum);
    }
  }
}

// Outputs [output, last), fewer than 16, of one row.
inline void rest(const RowProduct &given, int row, int output, int last) {
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

// Outputs [output, output + 16) of few rows, of which the weight is packed for as many as fit the registers.
inline void by_packed_weight(const RowProduct &given, int output, int64_t ahead) {
  for (int row = 0; row < given.rows; ahead = 0) {
    const int left = given.rows - row;
    row = left >= 4   ? some_rows<4>(given, row, output, ahead)
          : left >= 2 ? some_rows<2>(given, row, output, ahead)
                      : some_rows<1>(given, row, output, ahead);
  }
}

void multiply(const RowProduct &given, int first, int last) {
  const int64_t piece = int64_t(16) * given.in * 2;
  const char *begin = reinterpret_cast<const char *>(given.weight + int64_t(first) * given.in);
  if (last - first >= 16)
    for (int64_t at = 0; at < piece; at += kLine) _mm_prefetch(begin + at, _MM_HINT_T1);
  const int lanes = given.rows > 8 ? 16 : given.rows > 4 ? 8 : 0, packed = given.in / 2 * lanes;
  const int packs = lanes ? (given.rows + lanes - 1) / lanes : 0;
  Arena arena(Arena::bytes<uint32_t>(size_t(packed) * packs));
  uint32_t *rows = arena.take<uint32_t>(size_t(packed) * packs);
  for (int i = 0; i < packs; i++) (lanes == 16 ? pack_rows<16> : pack_rows<8>)(given, i * lanes, 0, given.in, rows + size_t(i) * packed);
  int output = first;
  for (; output + 16 <= last; output += 16) {
    int64_t ahead = output + 32 <= last ? piece : 0;
    if (!lanes) by_packed_weight(given, output, ahead);
    for (int i = 0; i < packs; i++, ahead = 0)
      (lanes == 16 ? rows_in_lanes<16> : rows_in_lanes<8>)(given, rows + size_t(i) * packed, i * lanes, output, ahead);
  }
  for (int row = 0; row < given.rows && output < last; row++) rest(given, row, output, last);
}
#else
constexpr int kPieces = 2;  // vectors of outputs that are added up at a time, so that sums wait less for each other
constexpr int kOutputs = kPieces * kWidth;

// Outputs [output, output + count) of ROWS rows of x from `row` on; `count` is at most kOutputs. Returns the row after them. A
// product of bfloat16 is exact in float32.
template <int ROWS, bool ASCENDING> inline int some_rows(const RowProduct &given, const float *all, int row, int output, int count) {
  const float *x = all + int64_t(row) * given.in;
  const uint16_t *w = given.weight + int64_t(output) * given.in;
  Floats totals[ROWS][kPieces];
  for (int begin = 0; begin < given.in; begin += given.block) {
    Floats sums[ROWS][kPieces] = {};
    for (int k = begin, end = std::min(begin + given.block, given.in); k < end; k += 2 * kWidth) {
      Words lines[kPieces][kWidth];
      for (int p = 0; p < kPieces; p++) {
        for (int i = 0; i < kWidth; i++) {
          const int of = p * kWidth + i;
          lines[p][i] = of < count ? read<Words>(w + int64_t(of) * given.in + k) : Words{};
        }
        transpose(lines[p]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; i++)
#pragma GCC unroll 2
        for (int turn = 0; turn < 2; turn++) {
          const int second = ASCENDING ? turn : 1 - turn;
          Floats right[kPieces];
#pragma GCC unroll 2
          for (int p = 0; p < kPieces; p++) right[p] = (Floats)(second ? lines[p][i] & 0xffff0000u : lines[p][i] << 16);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < kPieces; p++) sums[r][p] += right[p] * x[int64_t(r) * given.in + k + 2 * i + second];
        }
    }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < kPieces; p++) totals[r][p] = begin ? totals[r][p] + sums[r][p] : sums[r][p];
  }
  for (int r = 0; r < ROWS; r++)
    memcpy(given.out + int64_t(row + r) * given.outputs + output, totals[r], count * sizeof(float));
  return row + ROWS;
}

template <bool ASCENDING> void multiply_as(const RowProduct &given, const float *x, int first, int last) {
  for (int output = first; output < last; output += kOutputs)
    for (int row = 0; row < given.rows;) {
      const int left = given.rows - row, count = std::min(kOutputs, last - output);
      row = left >= 4   ? some_rows<4, ASCENDING>(given, x, row, output, count)
            : left >= 2 ? some_rows<2, ASCENDING>(given, x, row, output, count)
                        : some_rows<1, ASCENDING>(given, x, row, output, count);
    }
}

void multiply(const RowProduct &given, int first, int last) {
  const size_t values = size_t(given.rows) * given.in;
  Arena arena(Arena::bytes<float>(values));
  float *x = arena.take<float>(values);
  for (size_t i = 0; i < values; i += kWidth) write(x + i, Stored<Format::bf16>::load(given.x + i));
  (given.ascending ? multiply_as<true> : multiply_as<false>)(given, x, first, last);
}
#endif

}  // namespace
}  // namespace chunkattn
