// Products of matrices whose right side is packed in panels of 16 columns. Compiled once per instruction set.
//
// A panel holds [depth / pair][16 columns][pair] values: pairs of bfloat16 where the processor multiplies such pairs, else
// single floats. Every element of a product is summed over the depth in ascending order, whatever the number of lines.
#pragma once
#include "vectors.h"

namespace chunkattn {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif

// C [LINES, 16 * PANELS] = or += A [LINES, depth] * B.
template <int LINES, int PANELS> inline void block(bool add, int depth, const float *a, int lda, const float *b, float *c,
                                                   int ldc) {
  constexpr int kEach = 16 / kWidth, kWide = PANELS * kEach;
  Floats sums[LINES][kWide];
  for (int i = 0; i < LINES; i++)
    for (int p = 0; p < kWide; p++) sums[i][p] = add ? read<Floats>(c + i * ldc + kWidth * p) : Floats{};
  for (int k = 0; k < depth; k++) {
    Floats right[kWide];
#pragma GCC unroll 4
    for (int p = 0; p < kWide; p++) right[p] = read<Floats>(b + (int64_t(p / kEach) * depth + k) * 16 + p % kEach * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++)
#pragma GCC unroll 4
      for (int p = 0; p < kWide; p++) sums[i][p] += a[i * lda + k] * right[p];
  }
  for (int i = 0; i < LINES; i++)
    for (int p = 0; p < kWide; p++) write(c + i * ldc + kWidth * p, sums[i][p]);
}

#if defined(__AVX512BF16__)
template <int LINES, int PANELS> inline void block(bool add, int depth, const uint16_t *a, int lda, const uint16_t *b,
                                                   float *c, int ldc) {
  __m512 sums[LINES][PANELS];
  for (int i = 0; i < LINES; i++)
    for (int p = 0; p < PANELS; p++) sums[i][p] = add ? _mm512_loadu_ps(c + i * ldc + 16 * p) : _mm512_setzero_ps();
  for (int k = 0; k < depth; k += 2) {
    __m512bh right[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) right[p] = (__m512bh)_mm512_loadu_si512(b + (int64_t(p) * depth + k) * 16);
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(read<int32_t>(a + i * lda + k));
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sums[i][p] = _mm512_dpbf16_ps(sums[i][p], left, right[p]);
    }
  }
  for (int i = 0; i < LINES; i++)
    for (int p = 0; p < PANELS; p++) _mm512_storeu_ps(c + i * ldc + 16 * p, sums[i][p]);
}
#endif

// Lines and panels of a block: sums, right sides and a left side fit the registers.
#if defined(__AVX512F__)
constexpr int kBlockLines = 8, kBlockPanels = 2;
#elif defined(__x86_64__) && !defined(__AVX2__)
constexpr int kBlockLines = 2, kBlockPanels = 1;
#else
constexpr int kBlockLines = 4, kBlockPanels = 1;
#endif

// The lines of a product are padded to a multiple.
#if defined(__AMX_BF16__)
constexpr int kProductLines = 16;
#else
constexpr int kProductLines = kBlockLines;
#endif

#if defined(__AMX_BF16__)
// GCC's intrinsics do not say which memory a tile is loaded from, so it may delay stores before them. This makes it write them.
inline void finish_stores(const void *memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Tiles 0 to 3 hold sums, 4 and 5 the left side, 6 and 7 the right side. The caller's configuration is put back.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) uint8_t all[64] = {};
    all[0] = 1;
    for (int i = 0; i < 8; i++) all[16 + 2 * i] = 64, all[48 + i] = 16;
    asm volatile("sttilecfg %0" : "=m"(saved_));
    load(all);
  }
  ~TileRegisters() {
    if (saved_[0])
      load(saved_);
    else
      _tile_release();
  }

 private:
  // The intrinsic names eight bytes of the configuration, and GCC drops the stores of the others.
  static void load(const uint8_t (&config)[64]) { asm volatile("ldtilecfg %0" : : "m"(config)); }

  alignas(64) uint8_t saved_[64];
};

template <bool ADD> inline void amx_product(int lines, int panels, int depth, const uint16_t *a, int lda, const uint16_t *b,
                                            float *c, int ldc) {
  const int64_t a_bytes = lda * 2, c_bytes = ldc * 4;
  finish_stores(a);
  for (int line = 0; line < lines; line += 32)
    for (int p = 0; p < panels; p += 2) {
      const bool both = lines - line > 16;
      const uint16_t *left = a + line * lda, *right = b + int64_t(p) * 16 * depth, *next = right + 16 * depth;
      float *to = c + line * ldc + p * 16, *below = to + 16 * ldc;
      if (ADD) {
        _tile_loadd(0, to, c_bytes);
        _tile_loadd(1, to + 16, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
      }
      if (ADD && both) {
        _tile_loadd(2, below, c_bytes);
        _tile_loadd(3, below + 16, c_bytes);
      } else {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int k = 0; k < depth; k += 32) {
        _tile_loadd(4, left + k, a_bytes);
        _tile_loadd(6, right + k * 16, 64);
        _tile_loadd(7, next + k * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
          _tile_loadd(5, left + 16 * lda + k, a_bytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, to, c_bytes);
      _tile_stored(1, to + 16, c_bytes);
      if (both) {
        _tile_stored(2, below, c_bytes);
        _tile_stored(3, below + 16, c_bytes);
      }
    }
}
#else
struct TileRegisters {
  ~TileRegisters() {}
};
#endif

// C [lines, 16 * panels] = or += A [lines, depth] * B; `lines` is a multiple of kProductLines, `panels` of 2
// and `depth` of 32.
template <bool ADD, class E> inline void product(int lines, int panels, int depth, const E *a, int lda, const E *b, float *c,
                                                 int ldc) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) return amx_product<ADD>(lines, panels, depth, a, lda, b, c, ldc);
#endif
  for (int p = 0; p < panels; p += kBlockPanels) {
    const E *right = b + int64_t(p) * 16 * depth;
    for (int line = 0; line < lines; line += kBlockLines)
      block<kBlockLines, kBlockPanels>(ADD, depth, a + line * lda, lda, right, c + line * ldc + p * 16, ldc);
  }
}

}  // namespace
}  // namespace chunkattn
