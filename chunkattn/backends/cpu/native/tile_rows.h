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

constexpr int kPackedBytes = 1 << 20;  // half of the cache of a core
constexpr int kTile = 16;              // outputs or rows of a tile

// Sums of 16 * LEFT outputs and 16 * RIGHT rows, [LEFT][2][16 outputs][16 rows]. `next`: memory that is called into the cache
// meanwhile, as much as the weight in use; null calls none.
template <int LEFT, int RIGHT> inline void sum_tiles(int in, const uint16_t *w, const uint32_t *rows, const char *next, float *sums) {
  const int64_t w_bytes = int64_t(in) * 2;
  const uint32_t *more = rows + int64_t(in) / 2 * kTile;
  finish_stores(rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < in; k += 32, w += 32, rows += 16 * kTile, more += 16 * kTile) {
    if (next)
      for (int i = 0; i < LEFT * kTile; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(4, w, w_bytes);
    _tile_loadd(6, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (RIGHT > 1) {
      _tile_loadd(7, more, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (LEFT > 1) {
      _tile_loadd(5, w + int64_t(in) * kTile, w_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (RIGHT > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (RIGHT > 1) _tile_stored(1, sums + 256, 64);
  if constexpr (LEFT > 1) _tile_stored(2, sums + 512, 64);
  if constexpr (LEFT > 1 && RIGHT > 1) _tile_stored(3, sums + 768, 64);
}

// Writes the sums of `count` outputs, at most 16, and of the rows from `row` on, at most 16.
inline void write_tile(const RowProduct &given, const float *sums, int row, int output, int count) {
  __m512i lines[16];
  for (int i = 0; i < 16; i++) lines[i] = _mm512_loadu_si512(sums + i * 16);
  transpose(lines);
  const __mmask16 used = count >= 16 ? 0xffff : (1u << count) - 1;
  float *to = given.out + int64_t(row) * given.outputs + output;
  for (int r = 0; r < std::min(kTile, given.rows - row); r++, to += given.outputs)
    _mm512_mask_storeu_ps(to, used, _mm512_castsi512_ps(lines[r]));
}

void multiply(const RowProduct &given, int first, int last) {
  TileRegisters registers;
  const int in = given.in, groups = (given.rows + kTile - 1) / kTile;
  const size_t group = size_t(in) / 2 * kTile, tile = size_t(in) * kTile;
  Arena arena(Arena::bytes<uint32_t>(group * groups) + Arena::bytes<uint16_t>(tile) + Arena::bytes<float>(1024));
  uint32_t *rows = arena.take<uint32_t>(group * groups);
  uint16_t *rest = arena.take<uint16_t>(tile);
  float *sums = arena.take<float>(1024);
  for (int g = 0; g < groups; g++) pack_rows<kTile>(given, g * kTile, rows + g * group);
  for (int output = first, step; output < last; output += step) {
    const int left = last - output;
    step = left >= 2 * kTile ? 2 * kTile : kTile;
    const uint16_t *w = given.weight + int64_t(output) * in;
    const char *next = left >= 4 * kTile ? reinterpret_cast<const char *>(w + 2 * tile) : nullptr;
    if (left < kTile) {
      memcpy(rest, w, size_t(left) * in * 2), memset(rest + size_t(left) * in, 0, (tile - size_t(left) * in) * 2);
      w = rest;
    }
    for (int g = 0; g < groups; g += 2, next = nullptr) {
      const bool both = g + 1 < groups;
      (step > kTile ? both ? sum_tiles<2, 2> : sum_tiles<2, 1> : both ? sum_tiles<1, 2> : sum_tiles<1, 1>)(
          in, w, rows + g * group, next, sums);
      for (int l = 0; l * kTile < step; l++)
        for (int r = 0; r <= both; r++)
          write_tile(given, sums + (2 * l + r) * 256, (g + r) * kTile, output + l * kTile, std::min(kTile, left - l * kTile));
    }
  }
}

}  // namespace
}  // namespace chunkattn
