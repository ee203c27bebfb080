// Vectors of codes, their unpacking, and products with four digits of a row. Compiled once per instruction set.
#pragma once
#include <cmath>

#include "packed.h"
#include "vectors.h"
#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

namespace chunkattn {
namespace {

// A vector of codes holds four values of each of kWidth outputs: a part of a vector of a panel.
typedef uint8_t Codes __attribute__((vector_size(kVectorBytes)));
typedef int16_t Shorts __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kDots = true;  // an instruction adds four products to 32 bits
#else
constexpr bool kDots = false;
#endif
#if defined(__AVX512VNNI__)
constexpr bool kSigned = false;  // codes of 8 bits are made signed, since pairs of products would not fit 16 bits
#else
constexpr bool kSigned = true;
#endif

// How the blocks of a packing are multiplied; several packings have one kind. `kZero` is subtracted from the codes as `unpack` makes
// them. `kTogether`: vectors of codes whose sums of two products fit 16 bits together.
template <int GROUPS, bool MINIMUM, bool ZERO, bool SIGNED, int TOGETHER> struct Kind {
  static constexpr int kGroups = GROUPS, kTogether = TOGETHER;
  static constexpr bool kMinimum = MINIMUM, kZero = ZERO, kSignedCodes = SIGNED;
};
template <class L> constexpr int kZeroOf = kSigned && L::kZero == 128 ? 0 : L::kZero;
template <class L> using KindOf = Kind<L::kGroups, L::kMinimum, kZeroOf<L> != 0, kSigned && L::kZero == 128,
                                       kDots ? 8 : L::kZero == 128 ? 1 : L::kBits == 6 ? 2 : 4>;

inline Floats fused(Floats a, Floats b, Floats c) {  // a * b + c, rounded once
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < kWidth; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

inline Ints larger(Ints a, Ints b) {
#if defined(__AVX512F__)
  return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}

inline int32_t largest_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
#endif
}

inline int32_t sum_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
#endif
}

inline Floats floats_of(Ints x) { return __builtin_convertvector(x, Floats); }

// Integers of 8 bits, written as such.
inline void write_bytes(int8_t *to, Ints x) {
#ifdef __AVX512F__
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int i = 0; i < kWidth; i++) to[i] = int8_t(x[i]);
#endif
}

inline Floats read_halves(const uint8_t *from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(read<__m128i>(from));
#else
  return Stored<Format::f16>::load(reinterpret_cast<const uint16_t *>(from));
#endif
}

template <bool SIGNED> inline Floats read_factors(const uint8_t *from) {
#if defined(__AVX512F__)
  const __m128i x = read<__m128i>(from);
  return _mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
#elif defined(__AVX2__)
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return _mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#else
  Floats x;
  for (int i = 0; i < kWidth; i++) x[i] = SIGNED ? float(int8_t(from[i])) : float(from[i]);
  return x;
#endif
}

inline Codes splat_code(int x) { return Codes{} + uint8_t(x); }

// Values of a table of 16 bytes.
inline Codes looked_up(const uint8_t *table, Codes codes) {
#if defined(__AVX512F__)
  return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(read<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(read<__m128i>(table)), (__m256i)codes);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Codes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  for (int i = 0; i < kVectorBytes; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}

// 16 where the bit of a code is set. `bits`: of a vector of 64 codes, from the first code on.
inline Codes sixteens(const uint8_t *bits) {
#if defined(__AVX512F__)
  return (Codes)_mm512_maskz_set1_epi8(read<uint64_t>(bits), 16);
#elif defined(__AVX2__)
  const __m256i of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i all = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(read<int32_t>(bits)), of), bit);
  return (Codes)_mm256_and_si256(_mm256_cmpeq_epi8(all, bit), _mm256_set1_epi8(16));
#else
  typedef uint64_t Quads __attribute__((vector_size(kVectorBytes)));
  const Quads all = Quads{bits[0], bits[1]} * 0x0101010101010101u & 0x8040201008040201u;
  return (Codes)((Codes)all != 0) & splat_code(16);
#endif
}

// Codes of the outputs [lane, lane + kWidth) of a block: eight vectors.
template <class L> inline void unpack(const uint8_t *from, int lane, Codes (&codes)[8]) {
  const int at = lane * 4;
  if constexpr (L::kBits == 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      codes[j] = read<Codes>(from + j * 64 + at);
      if (kSigned) codes[j] ^= splat_code(0x80);
    }
    return;
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    Codes both = read<Codes>(from + j * 64 + at);
#ifdef __AVX512F__
    asm("" : "+v"(both));  // else GCC loads it twice, and each load crosses two lines
#endif
    codes[j] = both & splat_code(15), codes[j + 4] = (Codes)((Pairs)both >> 4) & splat_code(15);
  }
  if constexpr (L::kTable) {
    uint8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = uint8_t(kTableValues[i] + (kSigned ? 0 : 128));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) codes[j] = looked_up(table, codes[j]);
  }
  if constexpr (L::kBits == 5)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) codes[j] |= sixteens(from + 256 + j * 8 + at / 8);
  if constexpr (L::kBits == 6)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const Pairs high = read<Pairs>(from + 256 + half * 64 + at);
      const Codes two = splat_code(0x30);
      codes[4 * half] |= (Codes)(high << 4) & two;
      codes[4 * half + 1] |= (Codes)(high << 2) & two;
      codes[4 * half + 2] |= (Codes)high & two;
      codes[4 * half + 3] |= (Codes)(high >> 2) & two;
    }
}

#if defined(__AVX512VNNI__)
inline Ints dot(Ints sum, Codes codes, const int8_t *digits) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(read<int32_t>(digits)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline Ints dot(Ints sum, Codes codes, const int8_t *digits) {
  const int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t *>(digits)));
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, four);
}
#else
// Sums of two products, 16 bits each. A digit is at most 127.
template <bool SIGNED> inline Shorts products(Codes codes, const int8_t *digits) {
#if defined(__AVX2__)
  const __m256i c = (__m256i)codes, x = _mm256_set1_epi32(read<int32_t>(digits));
  return (Shorts)(SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c)) : _mm256_maddubs_epi16(c, x));
#else
  const Shorts x = (Shorts)(Ints{} + read<int32_t>(digits)), c = (Shorts)codes;
  const Shorts even = SIGNED ? (Shorts)((Pairs)c << 8) >> 8 : c & 0xff, odd = SIGNED ? c >> 8 : (Shorts)((Pairs)c >> 8);
  return even * ((Shorts)((Pairs)x << 8) >> 8) + odd * (x >> 8);
#endif
}

// Adds neighbours.
inline Ints widened(Shorts x) {
#if defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1));
#else
  return ((Ints)((Words)x << 16) >> 16) + ((Ints)x >> 16);
#endif
}
#endif

}  // namespace
}  // namespace chunkattn
