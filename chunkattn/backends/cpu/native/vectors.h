// Vectors of the processor's width, and loads that convert the formats of queries and caches. GCC keeps wider vectors in memory
// and compares them value by value. Compiled once per instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "step.h"

namespace chunkattn {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kWidth = kVectorBytes / 4;  // floats of a vector; it divides 16
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));

inline Floats splat(float x) { return x - Floats{}; }

template <class V> inline V read(const void *from) {
  V x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class V> inline void write(void *to, const V &x) { memcpy(to, &x, sizeof x); }

inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(x);
#else
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
#endif
}

inline float largest_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(x);
#else
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
#endif
}

#ifdef __AVX512F__
typedef __m512i Line;  // of a matrix to transpose
__attribute__((always_inline)) inline void transpose(__m512i (&r)[16]) {  // a 16 x 16 matrix
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++)
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88), r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88), r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}
#else
typedef Words Line;
// Transposes a matrix of kWidth lines: rounds that exchange halves of ever smaller blocks.
template <int HALF, size_t... I> inline void exchange(Words &a, Words &b, std::index_sequence<I...>) {
#ifdef __clang__
  const Words low = __builtin_shufflevector(a, b, (int(I) & HALF ? kWidth + int(I) - HALF : int(I))...);
  b = __builtin_shufflevector(a, b, (int(I) & HALF ? kWidth + int(I) : int(I) + HALF)...), a = low;
#else
  const Words low = __builtin_shuffle(a, b, Ints{(int(I) & HALF ? kWidth + int(I) - HALF : int(I))...});
  b = __builtin_shuffle(a, b, Ints{(int(I) & HALF ? kWidth + int(I) : int(I) + HALF)...}), a = low;
#endif
}
template <int HALF = kWidth / 2> inline void transpose(Words r[kWidth]) {
  if constexpr (HALF > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i++)
      if (!(i & HALF)) exchange<HALF>(r[i], r[i + HALF], std::make_index_sequence<kWidth>());
    transpose<HALF / 2>(r);
  }
}
#endif

// 2^x with a relative error below 2e-7, for x from -126 to 127; 2^-126 for smaller x, and anything for larger x.
inline Floats exp2_of(Floats x) {
  x = larger(x, splat(-126.f));
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  const Floats shifted = x + kRound, f = x - (shifted - kRound);
  Floats p = splat(1.32647285e-3f);
  p = p * f + 9.67151299e-3f;
  p = p * f + 5.55073358e-2f;
  p = p * f + 2.40222424e-1f;
  p = p * f + 6.93147004e-1f;
  p = p * f + 1.f;
  return (Floats)((Words)p + ((Words)shifted << 23));
}

template <Format F> struct Stored;
template <> struct Stored<Format::f32> {
  using Type = float;
  static Floats load(const float *from) { return read<Floats>(from); }
};
template <> struct Stored<Format::bf16> {
  using Type = uint16_t;
  static Floats load(const uint16_t *from) { return (Floats)(__builtin_convertvector(read<Halves>(from), Words) << 16); }
};

// Widens a float of MANTISSA and EXPONENT bits, exactly. XLA's threads take subnormal inputs for zero, so those of the narrow
// format go through integers.
template <int MANTISSA, int EXPONENT, uint32_t NAN_FROM> inline Floats widened(Words x) {
  constexpr int bias = (1 << (EXPONENT - 1)) - 1;
  const Words magnitude = x & ((1u << (MANTISSA + EXPONENT)) - 1), sign = (x >> (MANTISSA + EXPONENT)) << 31;
  const Words normal = (magnitude << (23 - MANTISSA)) + (uint32_t(127 - bias) << 23);
  const Floats small = __builtin_convertvector((Ints)magnitude, Floats) * (1.f / (1u << (bias + MANTISSA - 1)));
  const Words finite = magnitude < (1u << MANTISSA) ? (Words)small : normal;
  return (Floats)((magnitude >= NAN_FROM ? normal | 0x7f800000u : finite) | sign);
}
template <> struct Stored<Format::f16> {
  using Type = uint16_t;
  static Floats load(const uint16_t *from) {
    return widened<10, 5, 0x7c00>(__builtin_convertvector(read<Halves>(from), Words));
  }
};
template <> struct Stored<Format::fp8> {
  using Type = uint8_t;
  static Floats load(const uint8_t *from) {
    // GCC converts four-fold value by value.
    return widened<3, 4, 0x7f>(__builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Halves), Words));
  }
};

}  // namespace
}  // namespace chunkattn
