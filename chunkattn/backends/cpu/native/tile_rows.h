// Products of rows with a weight as checkpoints have it, [out, in], on AMX tiles. The weight is the left side, which needs no
// packing; the rows are packed as the right side.
//
// An output is a sum over the depth in ascending order, 32 at a time, so that a row has the same bits beside any number of rows.
// Source: the instruction TDPBF16PS in Intel's Software Developer's Manual.
#pragma once
#include <algorithm>
#include <cstring>

#include "arena.h"
#include "packing.h"
#include "products.h"

namespace chunkattn {
namespace {

constexpr int kTile = 16;        // outputs or rows of a tile
constexpr int kPair = 2 * kTile;  // outputs or rows that are computed at a time
constexpr int kSums = kPair * kPair;
// The rows of a call, packed for a part of the depth, and the sums of its outputs take half of a core's cache each.
constexpr int kRowsOfCall = 256, kDepthOfPart = 2048, kOutputsOfCall = 1024;

constexpr int64_t kManyBytes = 8 << 20;  // of the outputs of a call that are written past the caches; their reader finds fewer there

// A part of the depth: of the weight from `w` on, whose rows are `stride` apart, and of packed rows.
struct Part {
  int depth;
  const uint16_t *w;
  int64_t stride;
  const uint32_t *rows;
  const char *next;  // memory that is called into the cache meanwhile, `lines` cache lines for every 32 of the depth; null: none
  int lines;
  bool add;  // whether to begin with the sums
};

// Sums of 16 * LEFT outputs and 16 * RIGHT rows, [LEFT][2][16 outputs][16 rows].
template <int LEFT, int RIGHT> inline void sum_tiles(const Part &part, float *sums) {
  const int64_t w_bytes = part.stride * 2;
  const uint16_t *w = part.w;
  const uint32_t *rows = part.rows, *more = rows + int64_t(part.depth) / 2 * kTile;
  const char *next = part.next;
  finish_stores(rows);
  if (part.add) {
    _tile_loadd(0, sums, 64);
    if constexpr (RIGHT > 1) _tile_loadd(1, sums + 256, 64);
    if constexpr (LEFT > 1) _tile_loadd(2, sums + 512, 64);
    if constexpr (LEFT > 1 && RIGHT > 1) _tile_loadd(3, sums + 768, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < part.depth; k += 32, w += 32, rows += 16 * kTile, more += 16 * kTile) {
    if (next)
      for (int i = 0; i < part.lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(4, w, w_bytes);
    _tile_loadd(6, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (RIGHT > 1) {
      _tile_loadd(7, more, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (LEFT > 1) {
      _tile_loadd(5, w + part.stride * kTile, w_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (RIGHT > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (RIGHT > 1) _tile_stored(1, sums + 256, 64);
  if constexpr (LEFT > 1) _tile_stored(2, sums + 512, 64);
  if constexpr (LEFT > 1 && RIGHT > 1) _tile_stored(3, sums + 768, 64);
}

// Returns the part [begin, end) of the depth of up to kPair outputs of [output, last), for sums of `pairs` pairs of groups of rows.
// `copy`, [kPair][depth], gets zeros behind the last output and the last of the depth.
inline Part part_of(const RowProduct &given, int begin, int end, int output, int last, int pairs, bool calls_next, uint16_t *copy) {
  const int in = given.in, left = std::min(kPair, last - output), depth = (end - begin + 31) / 32 * 32;
  Part part{depth, given.weight + int64_t(output) * in + begin, in, nullptr, nullptr, (kPair + pairs - 1) / pairs, begin > 0};
  if (calls_next && last - output >= 2 * kPair) part.next = reinterpret_cast<const char *>(part.w + int64_t(in) * kPair);
  if (left < kPair || depth > end - begin) {
    memset(copy, 0, size_t(depth) * kPair * sizeof *copy);
    for (int i = 0; i < left; i++) memcpy(copy + size_t(i) * depth, part.w + int64_t(i) * in, (end - begin) * sizeof *copy);
    part.w = copy, part.stride = depth;
  }
  return part;
}

// Sums of one or two tiles of outputs and one or two of packed rows.
inline void sum_pairs(Part &part, const uint32_t *rows, bool two, bool both, float *sums) {
  part.rows = rows;
  (two ? both ? sum_tiles<2, 2> : sum_tiles<2, 1> : both ? sum_tiles<1, 2> : sum_tiles<1, 1>)(part, sums);
  if (part.next) part.next += int64_t(part.lines) * 2 * part.depth;
}

// Writes the sums of `count` outputs, at most 16, and of the rows from `row` on, at most 16.
inline void write_tile(const RowProduct &given, const float *sums, int row, int output, int count) {
  __m512i lines[16];
  for (int i = 0; i < 16; i++) lines[i] = _mm512_loadu_si512(sums + i * 16);
  transpose(lines);
  const __mmask16 used = count >= 16 ? 0xffff : (1u << count) - 1;
  float *to = given.out + int64_t(row) * given.outputs + output;
  const int rows = std::min(kTile, given.rows - row);
  const bool lines_of_memory = reinterpret_cast<uintptr_t>(to) % 64 == 0 && given.outputs % kTile == 0;
  if (int64_t(given.rows) * given.outputs * 4 > kManyBytes && lines_of_memory) {
    for (int r = 0; r < rows; r++, to += given.outputs) _mm512_stream_ps(to, _mm512_castsi512_ps(lines[r]));
    return;
  }
  for (int r = 0; r < rows; r++, to += given.outputs)
    _mm512_mask_storeu_ps(to, used, _mm512_castsi512_ps(lines[r]));
}

void multiply(const RowProduct &given, int first, int last) {
  TileRegisters registers;
  const int in = given.in, groups = (given.rows + kTile - 1) / kTile, pairs = (groups + 1) / 2;
  const int padded = std::max(1, (in + 31) / 32) * 32, most = given.rows > kPair ? std::min(padded, kDepthOfPart) : padded;
  const bool whole = most == padded;  // the whole depth at once
  const size_t group = size_t(most) / 2 * kTile, rest = size_t(most) * kPair;
  const size_t held = whole ? kSums : size_t(kSums) * pairs * ((last - first + kPair - 1) / kPair);
  Arena arena(Arena::bytes<uint32_t>(group * groups) + Arena::bytes<uint16_t>(rest) + Arena::bytes<float>(held));
  uint32_t *rows = arena.take<uint32_t>(group * groups);
  uint16_t *copy = arena.take<uint16_t>(rest);
  float *all = arena.take<float>(held);
  for (int begin = 0; begin == 0 || begin < in; begin += most) {
    const int end = std::min(in, begin + most), depth = (end - begin + 31) / 32 * 32;
    for (int g = 0; g < groups; g++) pack_rows<kTile>(given, g * kTile, begin, end, rows + g * size_t(depth) / 2 * kTile);
    float *sums = all;
    for (int output = first; output < last; output += kPair) {
      const int left = std::min(kPair, last - output);
      Part part = part_of(given, begin, end, output, last, pairs, whole, copy);
      for (int g = 0; g < groups; g += 2, sums += whole ? 0 : kSums) {
        const bool two = left > kTile, both = g + 1 < groups;
        sum_pairs(part, rows + g * size_t(depth) / 2 * kTile, two, both, sums);
        if (end < in) continue;
        for (int l = 0; l <= two; l++)
          for (int r = 0; r <= both; r++)
            write_tile(given, sums + (2 * l + r) * 256, (g + r) * kTile, output + l * kTile, left - l * kTile);
      }
    }
  }
  _mm_sfence();  // for the stores past the caches
}

}  // namespace
}  // namespace chunkattn
